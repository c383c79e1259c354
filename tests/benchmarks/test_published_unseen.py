"""The tables that the project found itself, and what they are predicted with."""

import json
from dataclasses import replace

import pytest

from benchmarks.published.layers import layer
from benchmarks.published.measured import RowError
from benchmarks.published.predict import predict
from benchmarks.published.recipes import recipe_of
from benchmarks.published.report import errors, evaluate, spearman
from benchmarks.published.rows import Context, Table, read_row, tables
from benchmarks.published.site import Site, announced
from benchmarks.published.sites import ground_of
from benchmarks.published.stages import site_of
from benchmarks.published.systems import system_of
from benchmarks.published.times import cost, recomputed, timed
from meshwright.ir.errors import PlanError
from tests.benchmarks.published_folder import FOLDER
from tests.benchmarks.published_rows import raw


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
    (table,) = tables(FOLDER, only="mpt_llm_foundry")
    assert (table.name, len(table.rows), table.skipped) == ("mpt_llm_foundry", 216, ())
    every = evaluate(Table(table.name, table.rows[::9], ()))
    found = errors(case.time_error for case in every.cases)
    assert found is not None and found.median_abs < 0.08 and found.worst < 0.25


def nemo(**changes):
    llama = {"name": "LLAMA3-70B", "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8,
             "ffn": 28672, "vocab": 128256, "act": "swiglu", "tied": False}  # fmt: skip
    made = raw(
        hardware={"gpu": "H100-SXM5-80GB", "gpus": 64}, model=llama,
        parallel={"tp": 4, "pp": 8, "dp": 2, "vpp": 5, "zero": 1, "async_tp": True},
        batch={"gbs": 128, "mbs": 1, "seq": 8192}, precision="fp8 mixed", recompute="none",
    )  # fmt: skip
    return read_row(made | changes, 0, Context("nemo", {}, "NeMo, Megatron-Core"))


def nemo_layer(**changes):
    row = nemo(**changes)
    site = site_of(row, recipe_of(row, system_of(row)))
    return row, {piece.name: piece for piece in layer(site)}


def moved(piece):
    """Bytes of its forward."""
    return piece.op.inputs[0].nbytes


def test_transformer_engine_casts_in_norms_and_turns_in_one_pass():
    row, pieces = nemo_layer()
    assert system_of(row).name == "NeMo"
    tokens = 8192
    # The norm writes float8 itself; an activation's result is read and written twice as float8.
    assert moved(pieces["scale qkv"]) == 0
    assert moved(pieces["scale down"]) == 4 * tokens * 28672 / 4
    _, current = nemo_layer(precision="fp8 mixed, current scaling")
    assert moved(current["scale qkv"]) == 2 * tokens * 8192
    assert moved(current["scale down"]) == 6 * tokens * 28672 / 4


@pytest.mark.parametrize(("seq", "pays"), [(8192, True), (256, False)])
def test_userbuffers_cut_products_only_where_that_pays(seq, pays):
    row, pieces = nemo_layer(batch={"gbs": 128, "mbs": 1, "seq": seq})
    ground = ground_of(row)
    assert [m.under for m in pieces["qkv"].messages] == ["tuned", "input", "weight"]
    chosen = cost([pieces["qkv"]], ground)
    ways = {}
    for under in ("chunks", "nothing"):
        messages = tuple(
            replace(m, under=under) if m.under == "tuned" else m for m in pieces["qkv"].messages
        )
        ways[under] = cost([replace(pieces["qkv"], messages=messages)], ground)
    assert (ways["chunks"].forward_s < ways["nothing"].forward_s) == pays
    assert chosen == ways["chunks" if pays else "nothing"]
    _, plain = nemo_layer(parallel={"tp": 4, "pp": 8, "dp": 2, "vpp": 5, "zero": 1})
    assert all(m.under != "tuned" for piece in plain.values() for m in piece.messages)


def test_the_tables_that_the_project_found_are_ranked():
    for table in tables(FOLDER):
        cases = evaluate(
            Table(table.name, table.rows[:: 3 if len(table.rows) > 9 else 1], ())
        ).cases
        pairs = [(c.prediction.step_s, c.row.step_s) for c in cases if c.row.step_s]
        rank = spearman(pairs)
        # BLOOM's are all of one size, from 102 to 230 s but for a few.
        least = 0.85 if table.name == "bloom_prequel" else 0.97
        assert rank is not None and rank > least, table.name


def test_llama_2_with_fsdp_is_predicted():
    (table,) = tables(FOLDER, only="fms_fsdp")
    found = evaluate(table)
    assert len(found.cases) == 6 and len(found.skipped) == 2
    assert {case.prediction.system for case in found.cases} == {"fms-fsdp"}
    assert all(abs(case.time_error or 0.0) < 0.08 for case in found.cases)
    assert {case.row.network for case in found.cases if "H100" in case.row.gpu} == {
        "RoCE, 8 x 100 Gb/s a node"
    }


def dgxc():
    return json.loads((FOLDER / "dgxc.json").read_text())


def test_one_run_sets_what_current_libraries_take_and_is_not_reported():
    data = dgxc()
    (marked,) = [raw for raw in data["rows"] if "calibrates" in raw]
    context = Context("dgxc", data["common"], json.dumps(data["common"]))
    with pytest.raises(RowError, match="it sets what products take"):
        read_row(marked, 0, context)
    row = read_row({k: v for k, v in marked.items() if k != "calibrates"}, 0, context)
    assert predict(row).step_s == pytest.approx(row.step_s, rel=5e-3)
    (table,) = tables(FOLDER, only="dgxc")
    assert (len(table.rows), [skip.index for skip in table.skipped]) == (57, [0])


@pytest.mark.parametrize(
    ("gpu", "current", "wheels"),
    [("H100-SXM5-80GB", 1.035, 1.375), ("B200", 1.035, 1.375), ("A100-SXM4-80GB", 1.08, 1.08)],
)
def test_what_products_take_with_whose_libraries(gpu, current, wheels):
    row = nemo(hardware={"gpu": gpu, "gpus": 64}, precision="bf16", parallel={"tp": 1, "dp": 64})
    site, ground = site_of(row, recipe_of(row, system_of(row))), ground_of(row)
    assert site.system.current_libraries and not system_of(foundry()).current_libraries
    old = replace(site, system=replace(site.system, current_libraries=False))
    for each, factor in ((site, current), (old, wheels)):
        down = next(piece for piece in announced(each, layer(each)) if piece.name == "down")
        alone = timed(down.op, ground.device.name)
        assert cost([down], ground).forward_s == pytest.approx(factor * alone.forward_s)


def test_nemo_on_dgx_cloud_is_predicted():
    (table,) = tables(FOLDER, only="dgxc")
    every = evaluate(Table(table.name, table.rows[::3], ()))
    found = errors(case.time_error for case in every.cases)
    assert found is not None and found.median_abs < 0.06 and found.worst < 0.2
