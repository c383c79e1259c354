"""Rows whose models have adapters beside a frozen base."""

from dataclasses import replace

import pytest

from benchmarks.published.measured import RowError
from benchmarks.published.model_kinds import Adapter
from benchmarks.published.route import asked_of, predict
from benchmarks.published.rows import read_table
from benchmarks.published.stacks import stack_of
from meshwright.ir.graph.graph import Kind
from tests.benchmarks.published_folder import FOLDER
from tests.benchmarks.published_rows import LLAMA_8B, llama

TARGETS = {"rank": 8, "targets": ["q_proj", "v_proj"]}
ONE = {"hardware": {"gpu": "H100-SXM5-80GB", "gpus": 2}, "parallel": {"dp": 2, "zero": 3},
       "batch": {"gbs": 64, "mbs": 4, "seq": 2048}, "recompute": "none"}  # fmt: skip
SMALL = {**LLAMA_8B, "layers": 4}


def test_a_row_says_which_layers_have_adapters():
    read = llama(model=SMALL, adapter=TARGETS | {"dropout": 0.1}, **ONE)
    assert read.adapter == Adapter(rank=8, only=("q_proj", "v_proj"), dropout=0.1)
    assert llama(model=SMALL, **ONE).adapter is None
    with pytest.raises(RowError, match="rank is 'some'"):
        llama(model=SMALL, adapter=TARGETS | {"rank": "some"}, **ONE)
    for part in TARGETS:
        with pytest.raises(RowError, match=r"or adapter\.targets is missing"):
            llama(model=SMALL, adapter={k: x for k, x in TARGETS.items() if k != part}, **ONE)


def test_a_frozen_base_has_no_gradients_of_weights():
    """Two of three products of a step are left, and no state of its optimizer."""
    row = llama(model=SMALL, adapter=TARGETS, **ONE)
    stack = stack_of(row)
    tensors = asked_of(row, stack).graph.tensors.values()
    trained = [x.fqn for x in tensors if x.kind is Kind.PARAMETER and x.requires_grad]
    assert len(trained) == 2 * 2 * SMALL["layers"]
    assert all("lora" in name for name in trained)
    adapted, whole = predict(row), predict(replace(row, adapter=None))
    assert 0.55 < adapted.step_s / whole.step_s < 0.8
    saved_bytes = whole.peaks["allocated"] - adapted.peaks["allocated"]
    assert saved_bytes > 12 * row.shape.parameters / row.parallel.dp


def test_every_row_of_fine_tuning_is_read():
    table = read_table(FOLDER / "fine_tuning.json")
    assert not table.skipped
    assert {stack_of(row).style for row in table.rows} == {"fsdp", "automodel"}
    assert sum(row.adapter is not None for row in table.rows) == 15
    assert all(row.gbs % (row.mbs * row.parallel.dp) == 0 for row in table.rows)
