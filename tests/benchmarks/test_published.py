"""Published runs by the user's route: what is read of a row, and what the product says of it."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published.cuts import by_cost, equal, full, starts
from benchmarks.published.measured import RowError
from benchmarks.published.model_kinds import ModelKind, config_of
from benchmarks.published.notes import HEAD
from benchmarks.published.parts import CALIBRATION, REPORT
from benchmarks.published.recipes import recompute_mode
from benchmarks.published.report import Case, errors, evaluate, spearman, widening
from benchmarks.published.route import (
    Prediction,
    asked_of,
    pins_of,
    plan_of,
    precision_of,
    predict,
)
from benchmarks.published.rows import TABLES, Context, Row, Table, read_row, read_table, tables
from benchmarks.published.sites import cluster_of
from benchmarks.published.stacks import stack_of
from meshwright.ir.errors import PlanError
from meshwright.ir.styles import style
from tests.benchmarks.published_folder import FOLDER
from tests.benchmarks.published_rows import GPT3, LLAMA_8B, llama, raw, row

SWEEP = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 32, "ffn": 8192, "vocab": 131072,
         "tied": True}  # fmt: skip
CHECKED = {"ar_intra": 425.0}
TORCHAO = {"study": "torchao float8 README (torchtitan)", "compile": True}


def nanotron(gpus, text="nanotron", **changes):
    """A row of nanotron's sweep after its fix."""
    made = {
        "hardware": {"gpu": "H100-SXM5-80GB", "gpus": gpus}, "model": SWEEP,
        "parallel": {"pp": gpus, "zero": 0}, "batch": {"gbs": 64, "mbs": 1, "seq": 4096},
        "recompute": "none", "after_pp_fix": True, "usable_throughput": True,
    }  # fmt: skip
    return read_row(raw(**made | changes), 0, Context("nanotron_runs", {}, text, rerun=True))


def test_parameter_counts_are_the_known_ones():
    assert llama().shape.parameters == 8_030_261_248
    assert row().shape.parameters == pytest.approx(174.6e9, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"tp": 8, "pp": 8, "dp": 2}}, "is not 64 GPUs"),
        ({"parallel": {}}, "parallel layout is not given"),
        ({"parallel": {"strategy": "guess"}}, "'guess'"),
        ({"batch": {"seq": 2048}}, "micro-batch or the global batch"),
        ({"batch": {"gbs": 64, "mbs": 1}}, "batch.seq is missing"),
        ({"batch": {"gbs": "many", "mbs": 1, "seq": 8}}, "'many'"),
        ({"model": {"name": "ResNet-50"}}, "no shape"),
        ({"status": "failed"}, "another reason"),
        ({"hardware": {"gpu": "A100-SXM4-80GB"}}, "hardware.gpus"),
    ],
)
def test_rows_that_lack_something_are_refused(changes, words):
    with pytest.raises(RowError, match=words):
        row(**changes)


def test_unknown_device_stack_and_recompute_are_refused():
    hardware = {"gpu": "Abacus 9000", "gpus": 64}
    with pytest.raises(RowError, match="Abacus 9000"):
        predict(row(hardware=hardware))
    with pytest.raises(RowError, match="no stack is named"):
        predict(row("a table of runs"))
    with pytest.raises(RowError, match="'sometimes'"):
        recompute_mode("sometimes")


def test_a_file_that_is_no_table_is_refused(tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(PlanError, match="rows"):
        read_table(path)


def test_measured_times_come_from_what_the_row_prints():
    assert row(measured={"tokens_per_s_per_gpu": 64}).step_s == 64 * 2048 / (64 * 64)
    flops = row().shape.dense_flops(64, 2048, 96)
    assert row(measured={"tflops_per_gpu": 100}).step_s == flops / (100e12 * 64)
    assert row(suspect=True).step_s is None


def test_error_figures():
    found = errors([0.1, -0.2, None, 0.03])
    assert found and (found.count, found.worst, found.median_abs) == (3, 0.2, 0.1)
    assert found.within_8 == pytest.approx(1 / 3)
    assert spearman([(1, 10), (2, 20), (3, 30)]) == 1
    assert spearman([(1, 30), (2, 20), (3, 10)]) == -1


def test_bands_are_told_by_how_much_they_miss():
    """Of nine rows with errors of .1 to .9, eight lie within .8: four fifths of ten."""
    made = Prediction(step_s=1.0, band=0.4, peaks={}, fits=True, style="")
    cases = [Case(replace(row(), step_s=1 + i / 10), made) for i in range(1, 10)]
    assert widening(cases) == pytest.approx(0.8 / 0.4)
    assert widening(cases[:3]) == math.inf
    assert widening([Case(replace(row(), step_s=None), made)]) is None


def test_a_width_given_as_a_ratio_is_rounded_up():
    ratio = {**LLAMA_8B, "ffn": 10922, "mlp_ratio": "8/3 (gated)"}
    assert llama(model=ratio).shape.ffn == 11008
    assert llama(model={**LLAMA_8B, "ffn": 10922}).shape.ffn == 10922
    missing = {key: value for key, value in LLAMA_8B.items() if key != "ffn"}
    assert llama(model=missing).shape.ffn == 11008
    assert row(model={**GPT3, "ffn": None}).shape.ffn == 4 * 12288


def test_report_counts_every_row(tmp_path: Path):
    small = GPT3 | {"layers": 2}
    batch, parallel = {"gbs": 64, "mbs": 1, "seq": 2048}, {"tp": 8, "dp": 8}
    common = {"model": small, "parallel": parallel, "batch": batch}
    rows = [raw(**common), raw(model={"name": "ResNet"}),
            raw(**common, hardware={"gpu": "Abacus", "gpus": 64}),
            raw(**common, status="oom", measured={})]  # fmt: skip
    path = tmp_path / "megatron_runs.json"
    path.write_text(json.dumps({"name": "megatron", "rows": rows}))
    result = evaluate(read_table(path))
    assert [case.row.index for case in result.cases] == [0, 3]
    assert [skip.index for skip in result.skipped] == [1, 2]
    assert result.cases[0].time_error == result.cases[0].prediction.step_s / 18.13 - 1
    assert result.cases[0].in_band is False and result.cases[1].in_band is None
    assert result.cases[1].time_error is None
    assert result.cases[0].prediction.fits and result.cases[0].prediction.style == "megatron-2022"


@pytest.mark.parametrize(
    ("made", "stack"),
    [
        (row(), "megatron-2022"), (row("megatron", precision="bf16"), "megatron-2022"),
        (row("bigscience, Megatron-DeepSpeed"), "bloom"), (row("NeMo, Megatron-Core"), "nemo"),
        (row("Megatron-Core"), "megatron"), (row("LLM Foundry"), "llm-foundry"),
        (llama(), "torchtitan"), (llama(compile=True), "torchtitan-compiled"),
        (llama(precision="float8"), "torchtitan-2024"), (row("fms-fsdp"), "fms-fsdp"),
        (nanotron(8), "nanotron"), (nanotron(16, network_gb_s=CHECKED), "nanotron-checked"),
        (nanotron(16, network_gb_s={"ar_intra": 458.0}), "nanotron"),
        (nanotron(16, text="nanotron bench_cluster"), "nanotron-2024"),
        (nanotron(8, after_pp_fix=False), "nanotron-early"),
        (nanotron(8, after_pp_fix=None, status="oom", measured={}), "nanotron"),
        (llama(**TORCHAO, hardware={"gpu": "H100-SXM5-80GB", "gpus": 64}), "torchtitan-2024"),
        (llama(**TORCHAO, hardware={"gpu": "MI300X-192GB", "gpus": 64}), "torchtitan-compiled"),
        (row("InternEvo"), "internevo"),
        (row("InternEvo", parallel={"tp": 1, "pp": 1, "zero": 3}), "internevo-fsdp"),
    ],
)  # fmt: skip
def test_rows_tell_their_stack(made: Row, stack: str):
    assert stack_of(made).style == stack
    assert style(stack).title


def test_pipelines_before_the_fix_and_broken_devices_have_no_time():
    parallel = {"tp": 8, "pp": 8}
    context = Context("nanotron_runs", {}, "nanotron")
    assert read_row(raw(parallel=parallel), 0, context).step_s is None
    assert row(parallel=parallel).step_s == 18.13
    assert nanotron(8, network_gb_s={"ar_intra": 45.0}).untimed


def test_how_stacks_cut_layers():
    deep = {"pp": 12, "dp": 1, "tp": 1}
    hardware = {"gpu": "A100-SXM4-80GB", "gpus": 12}
    made = row(model=GPT3 | {"layers": 78}, parallel=deep, hardware=hardware)
    assert full(made, 12) == [7] * 11 + [1] and equal(made, 12) == [7] * 6 + [6] * 6
    ends = row(model=GPT3 | {"layers": 106}, parallel={**deep, "ends_are_layers": True},
               hardware=hardware)  # fmt: skip
    assert equal(ends, 12) == [8, *[9] * 10, 8]
    # The head costs four layers: ten and six. In a deep pipeline it has a rank without layers.
    assert by_cost(nanotron(2), 2) == [10, 6]
    assert by_cost(nanotron(8), 8) == [3, 2, 3, 2, 3, 2, 1, 0]
    assert starts([3, 2, 1, 0]) == (4, 6, 7)
    with pytest.raises(RowError, match="no layer"):
        starts([2, 0, 2])


def test_launchers_of_2024_left_cudnns_attention_out_but_of_gpt_3():
    (found,) = tables(TABLES, only="nemo")
    (long,) = tables(TABLES, only="long_context")
    styles = {row.label.split(" ")[0]: stack_of(row).style for row in found.rows[:12]}
    assert styles.pop("GPT3-175B") == "nemo" and set(styles.values()) == {"nemo-2024"}
    assert {stack_of(row).style for row in found.rows[12:]} == {"nemo"}
    assert [stack_of(long.rows[i]).style for i in (0, 8, 9)] == ["nemo-2024", "nemo-2024", "nemo"]


def test_what_plans_have_no_word_for_is_refused():
    with pytest.raises(RowError, match="not gated"):
        config_of(ModelKind(shape=row(model=GPT3 | {"moe": {"experts": 8}}).shape), 2048)
    with pytest.raises(RowError, match="not whole micro-batches"):
        pins_of(replace(row(), gbs=63, mbs=2), stack_of(row()))
    with pytest.raises(RowError, match="second layer"):
        pins_of(nanotron(8, recompute="selective: every second layer"), stack_of(nanotron(8)))


def test_mixtures_of_experts_have_the_shapes_of_their_rows():
    """Against the sums that the models' cards give: all parameters, and those of a token."""
    table = next(tables(Path("benchmarks/tables"), only="mixtures"))
    assert [skip.index for skip in table.skipped] == [34]  # sets a constant
    # The table's framework goes before its sources, which name AutoModel, too.
    stacks = {row.index: stack_of(row).style for row in table.rows}
    assert [stacks[i] for i in (0, 21, 36)] == ["automodel", "nemo", "nemo-flex"]
    # Padded experts, CUDA graphs and all-to-alls beside other work are told row by row.
    assert [stacks[i] for i in (6, 27, 28, 38, 41)] == [
        "nemo-padded", "nemo-flex-routers", "nemo-flex-graphs", "nemo-flex-beside", "nemo-beside",
    ]  # fmt: skip
    # In the spring of 2025 latent attention had no kernel for its rotary embedding, and on
    # Blackwell none that trains it.
    early = [stack_of(row) for row in table.rows if row.index in (15, 18)]
    assert [(x.style, x.flash) for x in early] == [
        ("nemo-latent-2025", False), ("nemo-latent-2025", True),
    ]  # fmt: skip
    known = {"Qwen3 30B-A3B": 30.5e9, "Qwen3 235B-A22B": 235e9, "Grok-1 314B": 314e9,
             "Llama 4 Maverick 400B": 400e9, "GPT-OSS 120B": 116.8e9}  # fmt: skip
    rows = {row.label.split(" dp")[0]: row for row in table.rows}
    for name, parameters in known.items():
        shape = rows[name].shape
        assert shape.parameters == pytest.approx(parameters, rel=0.015), name
        config = config_of(ModelKind(shape=shape), 4096)
        experts = config.num_local_experts if shape.window else config.num_experts
        assert (experts, config.num_experts_per_tok) == (shape.experts, shape.top_k)
    latent = config_of(ModelKind(shape=rows["DeepSeek-V3 671B"].shape), 4096)
    assert (latent.kv_lora_rank, latent.n_routed_experts, latent.first_k_dense_replace) == (
        512, 256, 3,
    )  # fmt: skip
    assert latent.n_shared_experts == 1
    some = replace(rows["Llama 4 Maverick 400B"].shape, dense_layers=3, head_width=96)
    config = config_of(ModelKind(shape=some), 4096)
    assert (config.mlp_only_layers, config.decoder_sparse_step) == ([0, 1, 2], 2)
    assert config.head_dim == 96
    with pytest.raises(RowError, match="some layers only"):
        config_of(ModelKind(shape=replace(rows["Kimi K2"].shape, moe_every=2)), 4096)


def mixture(**parallel):
    """A small mixture of experts on two nodes, as NeMo runs it."""
    moe = {"experts": 16, "topk": 4, "ffn": 1024}
    model = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 512, "vocab": 512,
             "act": "swiglu", "tied": False, "moe": moe}  # fmt: skip
    return row(
        "Megatron Bridge, Transformer Engine", model=model, precision="bf16", recompute="none",
        hardware={"gpu": "H100-SXM5-80GB", "gpus": 16, "gpus_per_node": 8},
        parallel={"tp": 1, "zero": 1} | parallel, batch={"gbs": 64, "mbs": 2, "seq": 256},
    )  # fmt: skip


def test_groups_of_experts_are_ranks_of_the_replicas():
    """Of 16 ranks with 2 samples each, groups of 4 are 4 replicas with 8; ZeRO is over all ranks,
    also where there is one group."""
    for group in (4, 16):
        made = mixture(ep=group)
        plan = plan_of(made, stack_of(made), asked_of(made, stack_of(made)))
        (stage,) = plan.stages
        assert (stage.mesh["dp_shard"], stage.mesh["ep"], stage.zero) == (16 // group, group, 1)
        assert set(stage.batch_shares) == {2 * group}
        (layout,) = {name for name in stage.layouts.values() if "layers" in name}
        placed = next(x for x in plan.layouts if x.name == layout).inputs[0]
        assert placed["ep"] == placed["dp"] == "S(0)"
    with pytest.raises(RowError, match="groups of 32 ranks for experts among 16"):
        pins_of(mixture(ep=32), stack_of(mixture(ep=32)))
    with pytest.raises(RowError, match="2 of 4 ranks of tensor parallelism share"):
        pins_of(mixture(ep=4, tp=4, etp=2), stack_of(mixture(ep=4)))


def test_only_tables_of_our_own_have_rows_to_learn_from(tmp_path):
    ours = TABLES / "mixtures.json"
    given = Path(shutil.copy(ours, tmp_path))
    parts = [{r.part for r in read_table(path).rows} for path in (ours, given)]
    assert parts == [{CALIBRATION, REPORT}, {REPORT}]


def test_ranks_of_tensor_parallelism_have_other_experts_or_parts_of_one():
    for etp, ep in ((1, 2), (2, 4)):
        made = mixture(ep=4, tp=2, etp=etp)
        plan = plan_of(made, stack_of(made), asked_of(made, stack_of(made)))
        assert (plan.stages[0].mesh["ep"], plan.stages[0].mesh["tp"]) == (ep, 2)
        stored = {key: axes for x in plan.layouts for key, axes in x.parameters.items()}
        tp = [axes["tp"] for key, axes in stored.items() if ".experts." in key]
        # Neighbours have neighbouring experts: their axis splits what the other has left.
        assert len(tp) == 2 and all((p == "S(0,outer=2)") is (etp == 1) for p in tp), stored
        assert etp == 1 or not any(p.startswith("S(0") for p in tp)


def test_groups_of_experts_may_be_ranks_along_a_sequence():
    """`cp` is next to `tp`, as in Megatron, where a group is of neighbours."""
    made = mixture(ep=4, cp=2, tp=2, etp=1)
    plan = plan_of(made, stack_of(made), asked_of(made, stack_of(made)))
    assert plan.stages[0].model == (("cp", 2), ("tp", 2))
    stored = {key: axes for x in plan.layouts for key, axes in x.parameters.items()}
    lie = [(axes["cp"], axes["tp"]) for key, axes in stored.items() if ".experts." in key]
    assert lie == [("S(0)", "S(0,outer=2)")] * 2
    # A group of half of such ranks has no word; then they are replicas' ranks.
    half = mixture(ep=4, cp=4, tp=2, etp=1)
    assert pins_of(half, stack_of(half))[1:] == (
        "place *.experts.* ep=S(0)", "place *.experts.* tp=S(0,outer=2)",
    )  # fmt: skip


def test_a_pipeline_is_empty_after_each_local_batch():
    """Four micro-batches in two rounds: no action of the second comes before one of the first, and
    the bubble is there twice."""
    whole = mixture(pp=2, dp=8)
    rounds = replace(whole, lbs=4)
    one, two = (plan_of(x, stack_of(x), asked_of(x, stack_of(x))) for x in (whole, rounds))
    assert one.num_microbatches == two.num_microbatches == 4
    for rank in two.schedule.parse().ranks:
        firsts = [action.microbatch < 2 for action in rank]
        assert len(firsts) == 8 and firsts == sorted(firsts, reverse=True)
    assert one.predicted and two.predicted
    assert 1.1 < two.predicted.step_s / one.predicted.step_s < 1.6


def test_precisions_by_words():
    assert precision_of(row("nemo", precision="fp8"), stack_of(row("nemo"))) == (
        "fp8-tensorwise-sums"
    )
    assert precision_of(llama(precision="float8 rowwise"), stack_of(llama())) == "fp8-rowwise"
    assert precision_of(row(precision="fp16"), stack_of(row())) == "fp16"
    assert precision_of(row("fms-fsdp"), stack_of(row("fms-fsdp"))) == "bf16-sums"


def test_bench_cluster_runs_over_tcp_unless_its_network_is_named():
    made = nanotron(16, text="nanotron bench_cluster", parallel={"tp": 8, "dp": 2})
    named = replace(made, network="AWS p5, EFA")
    tcp, efa = cluster_of(made).between_nodes, cluster_of(named).between_nodes
    assert tcp and efa and tcp.bandwidth_bytes_per_s < efa.bandwidth_bytes_per_s / 5


def test_tables_of_several_folders_are_read_in_the_order_of_their_names(tmp_path):
    for folder, name in (("a", "second"), ("b", "first")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.json").write_text('{"rows": []}')
    folders = tmp_path / "a", tmp_path / "b"
    assert [table.name for table in tables(*folders)] == ["first", "second"]
    assert [table.name for table in tables(*folders, only="second")] == ["second"]
    with pytest.raises(PlanError, match=r"third\.json"):
        list(tables(*folders, only="third"))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("table", "indices", "median"),
    [
        ("mpt_llm_foundry", (59, 117, 176), 0.08),
        ("nemo", (0, 17), 0.13),
        ("dgxc", (38, 45), 0.1),
        ("long_context", (3, 8), 0.06),
    ],
)
def test_runs_that_no_constant_has_seen(table: str, indices: tuple[int, ...], median: float):
    (found,) = tables(FOLDER, only=table)
    rows = tuple(made for made in found.rows if made.index in indices)
    assert len(rows) == len(indices)
    result = evaluate(Table(table, rows, ()))
    time = errors(case.time_error for case in result.cases)
    assert time and time.count == len(rows) and time.median_abs < median, time


def test_the_page_says_that_it_is_the_products_own_prediction():
    results = Path(__file__).parents[2] / "docs" / "results"
    page = (results / "published.md").read_text()
    assert page.startswith(HEAD)
    assert 0 < page.index("`plan.predicted`") < page.index("| table |")
