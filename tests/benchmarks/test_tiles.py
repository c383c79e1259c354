"""The file of tiles is what counting makes, every entry of it compiles without spills, and launches
have nothing else."""

import json
from dataclasses import replace
from importlib.resources import files

import pytest
import torch

from benchmarks import tiles as counting
from benchmarks.gpu.tile_cases import proposal
from benchmarks.tiles import candidates
from meshwright.ir import tiles
from meshwright.ir.errors import PlanError
from meshwright.ir.kernels import gather_linear, linear_scatter
from meshwright.ir.launch import triton

TEXT = files(tiles).joinpath("choices.json").read_text()
EVERY = [
    (device, kernel, tile)
    for device, own in tiles.choices().items()
    for kernel, found in own.items()
    for tile in found
]


def test_the_file_is_what_counting_makes():
    """A slice of it: a device without choices of its own, two bytes."""
    if triton is None:
        pytest.skip("Triton compiles the candidates")
    found = tuple(counting.choose(tiles.ANY, gather_linear.BY_POINTERS, 2))
    own = tiles.choices()[tiles.ANY][gather_linear.BY_POINTERS]
    assert found == tuple(tile for tile in own if tile.item_bytes == 2)


@pytest.mark.sampled
@pytest.mark.parametrize(("device", "kernel", "tile"), EVERY)
def test_every_choice_is_legal(device, kernel, tile):
    if triton is None:
        pytest.skip("Triton compiles the kernels")
    for module in (gather_linear, linear_scatter):
        for code in counting.codes(device, kernel, replace(tile, most_columns=None), module):
            assert counting.is_legal(device, code)
            by_descriptor = any(i.kind == "UTMALDG" for i in code.instructions)
            assert by_descriptor == (kernel == gather_linear.BY_DESCRIPTOR)


def test_every_device_has_a_tile_for_every_product():
    for device in tiles.choices():
        for item_bytes in (2, 4):
            for columns in (1, 1536, 1537, 1 << 20):
                assert tiles.tile(device, gather_linear.BY_POINTERS, item_bytes, columns)
    assert tiles.tile("sm_90", gather_linear.BY_DESCRIPTOR, 2, 4096)
    assert tiles.tile(tiles.ANY, gather_linear.BY_DESCRIPTOR, 2, 4096) is None
    assert {tile.source for _, _, tile in EVERY} == {"count"}, "nothing was measured"


def test_a_device_that_is_not_known_has_what_any_has(monkeypatch):
    on_gpu = torch.empty(0)
    assert tiles.device_of(on_gpu) == tiles.ANY

    class OnGpu:
        is_cuda, device = True, "cuda:0"

    for capability, name in (((9, 0), "sm_90"), ((8, 0), "sm_80"), ((12, 0), tiles.ANY)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert tiles.device_of(OnGpu()) == name


def test_a_weight_that_descriptors_cannot_read_goes_by_addresses():
    weight = torch.empty(64, 48, dtype=torch.bfloat16)
    assert gather_linear.readable(weight) == gather_linear.PLAIN
    assert gather_linear.readable(weight.T) == gather_linear.TURNED
    for odd in (weight[:, :9].contiguous(), weight[:, 1:], weight[::2, ::2], weight[:0]):
        assert gather_linear.readable(odd) == gather_linear.POINTERS


def test_a_device_proposes_what_it_has_measured():
    """Here of times that are made up: the widest tile is the fastest where results are wide."""
    every = [replace(t, most_columns=most) for t in candidates(2) for most in (1536, None)]
    timed = {
        (kernel, t): 1.0 / t.columns if t.most_columns is None else float(t.columns)
        for kernel in (gather_linear.BY_POINTERS, gather_linear.BY_DESCRIPTOR)
        for t in every
    }
    found = tiles.read_choices(json.dumps(proposal("sm_90", "an H100", timed)))["sm_90"]
    for own in found.values():
        assert [(t.most_columns, t.columns) for t in own if t.item_bytes == 2] == [
            (1536, 64), (None, 256),
        ]  # fmt: skip
        assert {t.source for t in own if t.item_bytes == 2} == {"measured on an H100"}
    counted = [t for t in found[gather_linear.BY_POINTERS] if t.item_bytes == 4]
    assert counted and {t.source for t in counted} == {"count"}
    # Of one class alone nothing is proposed.
    some = {key: s for key, s in timed.items() if key[1].most_columns}
    kept = tiles.read_choices(json.dumps(proposal("sm_90", "an H100", some)))["sm_90"]
    assert kept == tiles.choices()["sm_90"]


@pytest.mark.parametrize(
    "wrong",
    [{"schema": "meshwright.tiles/9"}, {"schema": tiles.SCHEMA}, {"devices": {"any": {"product": [
        {"rows": 1}]}}}, {"devices": 3}],
)  # fmt: skip
def test_another_file_is_refused(wrong):
    with pytest.raises(PlanError, match="tiles: "):
        tiles.read_choices(json.dumps({"schema": tiles.SCHEMA, **wrong} if "devices" in wrong
                                      else wrong))  # fmt: skip
    assert tiles.read_choices(TEXT) == tiles.choices()
