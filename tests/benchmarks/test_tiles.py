"""The file of tiles is what counting makes, every entry of it compiles without spills, and launches
have nothing else."""

import json
from dataclasses import replace
from importlib.resources import files
from itertools import product

import pytest
import torch

from benchmarks import attention_tiles
from benchmarks import tiles as counting
from benchmarks.gpu.tile_cases import proposal
from benchmarks.tile_targets import TARGETS, is_legal
from benchmarks.tiles import candidates
from meshwright.ir import tiles
from meshwright.ir.errors import PlanError
from meshwright.ir.kernels import gather_linear, linear_scatter
from meshwright.ir.launch import triton
from meshwright.ir.random.attention_kernels import ADDED, LOOKS, NO_MASK
from meshwright.ir.random.attention_tiles import (
    KERNELS,
    WIDTHS,
    attention_tile,
    builds,
    head_room,
)

TEXT = files(tiles).joinpath("choices.json").read_text()
EVERY = [
    (device, kernel, tile)
    for device, own in tiles.choices().items()
    for kernel, found in own.items()
    for tile in found
    if kernel not in KERNELS
]
HEADS = {head_room(*heads).columns: heads for heads in attention_tiles.HEADS}
ATTENTION = [
    (device, kernel, tile)
    for device, own in tiles.choices().items()
    for kernel in KERNELS
    for tile in own[kernel]
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
            assert is_legal(device, code)
            by_descriptor = any(i.kind == "UTMALDG" for i in code.instructions)
            assert by_descriptor == (kernel == gather_linear.BY_DESCRIPTOR)


@pytest.mark.sampled
@pytest.mark.parametrize(("device", "kernel", "tile"), ATTENTION)
def test_every_choice_for_attention_is_legal_and_no_worse_than_another(device, kernel, tile):
    if triton is None:
        pytest.skip("Triton compiles the kernels")
    heads = HEADS[tile.most_columns]
    for mask in (NO_MASK, LOOKS, ADDED):
        assert attention_tiles.is_legal_with(device, kernel, heads, mask, tile)
    others = [one for one in attention_tiles.candidates(head_room(*heads)) if one != tile]
    other = others[len(others) // 2]
    if attention_tiles.is_legal_with(device, kernel, heads, NO_MASK, other):
        least = attention_tiles.cycles(device, kernel, heads, tile)
        assert least <= attention_tiles.cycles(device, kernel, heads, other)


def test_attention_has_tiles_for_all_widths_of_heads():
    """Values may be narrower than keys, or wider; more than all tiles have room for is refused."""
    for device in ("sm_80", "sm_90"):
        for kernel in KERNELS:
            classes = [tile.most_columns for tile in tiles.choices()[device][kernel]]
            assert classes == sorted(classes) and {*classes} <= {*HEADS}
            for width, value_width in product(WIDTHS, (16, 64, 128, 256)):
                room = head_room(width, value_width)
                if room.columns <= classes[-1]:
                    found = attention_tile(device, kernel, room)
                    assert found and found.most_columns >= max(
                        room.columns, room.keys + room.values
                    )
            assert attention_tile(device, kernel, head_room(256, 512)) is None


def test_launches_of_attention_have_the_files_tiles():
    """What is compiled and read for the page of machine code, too."""
    for width in WIDTHS:
        for found in builds("bf16", width):
            (target,) = found.targets
            assert found.constants["BLOCK"] >= width
            name = next(name for name, kernel in KERNELS.items() if kernel is found.kernel)
            values = 128 if width == 192 else width
            own = attention_tile(f"sm_{target}", name, head_room(width, values))
            sizes = {own.rows, own.depth}
            assert {found.constants["QUERIES"], found.constants["KEYS"]} == sizes
            assert (found.warps, found.stages) == (own.warps, own.stages)
            assert TARGETS[f"sm_{target}"].capability == target


def test_every_device_has_a_tile_for_every_product():
    for device in tiles.choices():
        for item_bytes in (2, 4):
            for columns in (1, 1536, 1537, 1 << 20):
                assert tiles.tile(device, gather_linear.BY_POINTERS, item_bytes, columns)
    assert tiles.tile("sm_90", gather_linear.BY_DESCRIPTOR, 2, 4096)
    assert tiles.tile(tiles.ANY, gather_linear.BY_DESCRIPTOR, 2, 4096) is None
    every = {tile.source for _, _, tile in (*EVERY, *ATTENTION)}
    assert every == {"count"}, "nothing was measured"


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
    for own in (found[gather_linear.BY_POINTERS], found[gather_linear.BY_DESCRIPTOR]):
        assert [(t.most_columns, t.columns) for t in own if t.item_bytes == 2] == [
            (1536, 64), (None, 256),
        ]  # fmt: skip
        assert {t.source for t in own if t.item_bytes == 2} == {"measured on an H100"}
    counted = [t for t in found[gather_linear.BY_POINTERS] if t.item_bytes == 4]
    assert counted and {t.source for t in counted} == {"count"}
    for kernel in KERNELS:
        assert found[kernel] == tiles.choices()["sm_90"][kernel]
    # Of attention as well.
    one = next(iter(KERNELS))
    slow = {
        (one, t): 1.0 / t.rows
        for heads in attention_tiles.HEADS for t in attention_tiles.candidates(head_room(*heads))
    }  # fmt: skip
    widest = tiles.read_choices(json.dumps(proposal("sm_90", "an H100", slow)))["sm_90"][one]
    assert [t.rows for t in widest] == [128, 128, 64, 64]
    assert {t.source for t in widest} == {"measured on an H100"}
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
