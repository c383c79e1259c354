"""The table of LLM Foundry that the project found itself, and what it is predicted with."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published.layers import layer
from benchmarks.published.report import errors, evaluate
from benchmarks.published.rows import Context, Table, read_row, tables
from benchmarks.published.site import Site
from benchmarks.published.sites import ground_of
from benchmarks.published.systems import system_of
from benchmarks.published.times import cost, recomputed
from meshwright.ir.errors import PlanError
from tests.benchmarks.test_published import raw

FOLDER = Path(__file__).parents[2] / "benchmarks" / "tables"


def foundry(**changes):
    context = Context("mpt_llm_foundry", {}, "LLM Foundry (Composer, FSDP)")
    model = {"name": "MPT 7b", "layers": 32, "hidden": 4096, "heads": 32, "ffn": 16384,
             "vocab": 50368, "act": "gelu", "tied": True, "positions": 2048}  # fmt: skip
    made = raw(
        hardware={"gpu": "A100-SXM4-80GB", "gpus": 8}, model=model,
        parallel={"tp": 1, "pp": 1, "dp": 8, "zero": 3},
        batch={"gbs": 96, "mbs": 6, "seq": 2048}, precision="bf16 mixed", recompute="none",
    )  # fmt: skip
    return read_row(made | changes, 0, context)


def test_llm_foundry_is_a_stack_of_its_own():
    new, old = system_of(foundry()), system_of(foundry(precision="bf16 mixed, bf16 throughout"))
    assert new.name == old.name == "LLM Foundry" and new.attention_slowdown == 1.9
    assert (new.sync_bytes, new.stops_early) == (4, True)
    assert (old.sync_bytes, old.stops_early) == (2, False)
    # Its attention is slower than version 2, of models that are not gated as well.
    slow, fast = (
        cost(layer(Site(shape=foundry().shape, system=system, mbs=2, seq=8192)),
             ground_of(foundry())).forward_s
        for system in (new, replace(new, attention_slowdown=1.0))
    )  # fmt: skip
    assert slow > 1.05 * fast


def test_checkpoints_that_stop_early_leave_out_the_last_product():
    row = foundry(recompute="full")
    site = Site(shape=row.shape, system=system_of(row), mbs=6, seq=2048)
    pieces, ground = layer(site), ground_of(row)
    whole = cost(pieces, ground)
    late, early = (
        recomputed(pieces, "full", 0, ground, stops_early=stops) for stops in (False, True)
    )
    assert late.backward_s == pytest.approx(whole.backward_s + whole.forward_s)
    down = cost([p for p in pieces if p.name in ("down", "add 2")], ground)
    assert early.backward_s == pytest.approx(late.backward_s - down.forward_s)
    assert (early.saved_bytes, early.peak_bytes) == (late.saved_bytes, late.peak_bytes)


def test_tables_of_several_folders_are_read_in_the_order_of_their_names(tmp_path):
    for folder, name in (("a", "second"), ("b", "first")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text('{"rows": []}')
    folders = tmp_path / "a", tmp_path / "b"
    assert [table.name for table in tables(*folders)] == ["first", "second"]
    assert [table.name for table in tables(*folders, only="second")] == ["second"]
    with pytest.raises(PlanError, match=r"third\.json"):
        list(tables(*folders, only="third"))


def test_the_table_that_the_project_found_is_predicted():
    (table,) = tables(FOLDER)
    assert (table.name, len(table.rows), table.skipped) == ("mpt_llm_foundry", 216, ())
    every = evaluate(Table(table.name, table.rows[::9], ()))
    found = errors(case.time_error for case in every.cases)
    assert found is not None and found.median_abs < 0.08 and found.worst < 0.25
