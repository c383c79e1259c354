"""Plans priced as other software stacks run them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import meshwright as mw
from meshwright.costmodel.as_run import as_exchanged, as_run
from meshwright.costmodel.block.site import StageSite
from meshwright.costmodel.comm.comm import Level, collective_time
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.ops.routing import axes_outside
from meshwright.forms.exchange_rows import Event, Send
from meshwright.forms.sync import exchange
from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.cluster.launching import Casting, Launching
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.routing import spread_evenly
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Axis, R, Shard, Strategy
from meshwright.ir.layout.op_messages import Inner
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import ModelMesh, Plan
from meshwright.ir.styles import OURS, STYLES, Style, refuse_style, style
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.mesh_variants import ways
from meshwright.planner.inside.variants import own_variants
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.vocabulary import vocabulary_notes
from meshwright.tools.diff.rows import structure
from meshwright.tools.report.contents import contents

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 2048, "use_cache": False,
}  # fmt: skip
FUSED = ("rms_norm", "swiglu", "rotary")


@pytest.fixture(scope="module")
def graph() -> Graph:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    ids = torch.zeros(2, 2048, dtype=torch.int64)
    return trace(model, {"input_ids": ids, "labels": ids}, global_batch_size=64, kernels=FUSED,
                 precision="bf16")  # fmt: skip


def priced(graph: Graph, stack: str, *pins: str, gpus: int = 8, **layout: int) -> Plan:
    problem = make_problem(
        graph, Cluster.preset("h100-sxm", num_nodes=gpus // 8), constraints=pins, style=stack,
        precision="bf16",
    )  # fmt: skip
    variant = (style(stack).variants or ("",))[0] if layout.get("tp", 1) > 1 else ""
    return build_plan(problem, uniform_choice(problem, variant=variant, **layout))


def priced_hash(plan: Plan) -> str:
    return plan_io.rehash(plan).hash


def step_s(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.step_s


def with_style(
    monkeypatch: pytest.MonkeyPatch, graph: Graph, plan: Plan, stack: Style, nodes: int = 1
) -> float:
    """Seconds of the plan as a stack of the test's own runs it."""
    monkeypatch.setattr("meshwright.costmodel.cost_cache.known_style", lambda name: stack)
    cluster = Cluster.preset("h100-sxm", num_nodes=nodes)
    tables = CostTables(graph, cluster, plan.precision)
    return estimate_all(graph, cluster, plan, tables).prediction.step_s


@pytest.mark.parametrize("name", STYLES)
def test_each_file_is_a_style_with_its_source(name: str) -> None:
    found = style(name)
    assert found.title and len(found.reference) > 10 and found.libraries >= 2020
    assert as_run(Cluster.local(2), found) == Cluster.local(2)


def test_ours_is_what_is_taken_unasked(graph: Graph) -> None:
    plain, named = priced(graph, "", dp_shard=8, zero=1), priced(graph, OURS, dp_shard=8, zero=1)
    assert step_s(plain) == step_s(named)
    assert '"style"' not in plan_io.dumps(plain)
    assert named.style == OURS and priced_hash(plain) != priced_hash(named)


def test_older_libraries_take_longer_by_what_the_device_says(graph: Graph) -> None:
    h100 = Cluster.preset("h100-sxm")
    curve = h100.device_types[0].curves[OpClass.MATMUL]
    assert curve.in_runs(2024) == 1.375 and curve.in_runs(2026) == 1.155
    assert curve.narrow_in_runs(2024) == 1.375 and curve.narrow_in_runs(2026) == 1.0
    assert replace(curve, narrow_sustained=()).narrow_in_runs(2026) == 1.155
    now = as_run(h100, style("")).device_types[0].curves[OpClass.MATMUL]
    assert now.share == curve.share / 1.155 and now.narrow_share == curve.share
    assert curve.in_runs(2010) == 1.375 and replace(curve, sustained=()).in_runs(2024) == 1.0
    (device,) = as_run(h100, style("torchtitan")).device_types
    assert device.curves[OpClass.MATMUL].share == pytest.approx(curve.share / 1.375)
    assert device.curves[OpClass.COPY] == h100.device_types[0].curves[OpClass.COPY]
    older = priced(graph, "torchtitan", dp_shard=8, zero=3)
    assert 1.1 < step_s(older) / step_s(priced(graph, "", "sync=zero", dp_shard=8, zero=3)) < 1.5


def test_sustained_factors_must_be_in_order() -> None:
    curve = Cluster.preset("h100-sxm").device_types[0].curves[OpClass.MATMUL]
    with pytest.raises(PlanError, match="ascending order"):
        replace(curve, sustained=((2025, 1.1), (2023, 1.2)))


def test_the_cpu_is_waited_for_where_it_is_slower(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = priced(graph, "", "sync=zero", tp=8, num_microbatches=4)
    free = style("")
    fast = with_style(monkeypatch, graph, plan, replace(free, launching=Launching()))
    slow = with_style(
        monkeypatch, graph, plan, replace(free, launching=Launching(block_forward_s=0.1))
    )
    blocks = len(graph.blocks)
    assert 4 * blocks * 0.09 < slow - fast < 4 * blocks * 0.11
    checked = replace(free, launching=Launching(check_s=1e-3))
    more = with_style(monkeypatch, graph, plan, checked) - fast
    # At least one collective each way in each of the four layers, of seven further ranks.
    assert more > 4 * 4 * 2 * 7e-3 * 0.5
    waits = replace(free, launching=Launching(waits=True))
    assert with_style(monkeypatch, graph, plan, waits) > fast


def test_a_share_of_the_work_hides_collectives(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = priced(graph, "", "sync=zero", dp_shard=8, zero=1)
    whole = with_style(monkeypatch, graph, plan, style(""))
    part = with_style(monkeypatch, graph, plan, replace(style(""), hides=0.1))
    assert part > whole


def test_gradients_agree_as_the_stack_has_it() -> None:
    plain = exchange("zero1", 16)
    late = as_exchanged(plain, style("nanotron"))
    sends = [row for row in late.rows if isinstance(row, Send) and row.what == "gradients"]
    assert [(row.primitive.value, row.axis, row.at) for row in sends] == [
        ("all_reduce", "dp", Event.END)
    ]
    assert late.bucket_bytes and late.bucket_bytes > 2**40
    assert as_exchanged(plain, style("")) is plain
    beside = as_exchanged(exchange("zero3", 16), style("torchtitan"))
    (copies,) = [row for row in beside.rows if isinstance(row, Send) and row.axis == "dp_replicate"]
    assert copies.at is Event.AFTER_LAST and copies.unit == "block"


def test_what_is_gathered_again_is_not_kept_and_sent_once_more(graph: Graph) -> None:
    kept = priced(graph, "torchtitan", tp=8, num_microbatches=4)
    again = priced(graph, "megatron", "overlap=none", tp=8, num_microbatches=4)
    assert kept.predicted and again.predicted
    held, less = (p.predicted.stages[0].memory.activations_bytes for p in (kept, again))  # type: ignore[union-attr]
    assert less < 0.8 * held


def test_what_is_gathered_again_takes_its_time(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = priced(graph, "megatron", "overlap=none", tp=8, num_microbatches=4)
    once = with_style(monkeypatch, graph, plan, style(""))
    assert with_style(monkeypatch, graph, plan, replace(style(""), regathers=True)) > once


def test_a_style_is_kept_and_said_and_not_run(graph: Graph, tmp_path: Path) -> None:
    plan = priced(graph, "megatron", tp=8, num_microbatches=4)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.style == "megatron" and again.hash == plan_io.rehash(plan).hash
    assert "priced as Megatron-Core runs it" in str(again)
    with pytest.raises(PlanError, match=r"priced as Megatron-Core runs it.*export"):
        refuse_style(again)
    text = (tmp_path / "plan.json").read_text().replace('"megatron"', '"megatronn"')
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(PlanError, match=r"megatronn.*nearest is 'megatron"):
        plan_io.load(tmp_path / "other.json", check_hash=False)


def test_chunks_hide_collectives_beside_products(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = priced(graph, "", "sync=zero", "overlap=gradients", tp=8, num_microbatches=4)
    assert plan.stages[0].overlap == "gradients"
    plain = with_style(monkeypatch, graph, plan, style(""))
    chunks = with_style(monkeypatch, graph, plan, replace(style(""), chunks=True))
    assert 0.5 < chunks / plain < 0.99


def test_balanced_rings_share_causal_attention_out(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours do by their layout; where ranks have one run each, as in layouts of others, the last one
    has most to do."""
    problem = make_problem(
        graph, Cluster.preset("h100-sxm"), constraints=("sync=zero",), precision="bf16"
    )
    plan = build_plan(problem, uniform_choice(problem, model=(("cp", 2),), num_microbatches=1))
    text = plan_io.dumps(plan)
    assert "S(2,outer=2,zigzag)" in text
    in_runs = plan_io.loads(text.replace(",outer=2,zigzag", ""), check_hash=False)
    balanced = replace(style(""), balanced=True)
    shared = with_style(monkeypatch, graph, plan, style(""))
    last = with_style(monkeypatch, graph, in_runs, style(""))
    assert shared == with_style(monkeypatch, graph, plan, balanced) < last
    assert with_style(monkeypatch, graph, in_runs, balanced) < last


def test_tokens_go_to_experts_as_the_stack_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that goes once to each expert, rank or node travels ever less: of 8 picks on 16 ranks
    of 2 nodes, 8, 6.5 and 2 copies, half of which stay on a node."""
    config = Qwen3MoeConfig(
        hidden_size=1024, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        head_dim=128, moe_intermediate_size=4096, intermediate_size=256, num_experts=64,
        num_experts_per_tok=8, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    ids = torch.zeros(2, 4096, dtype=torch.int64)
    made = trace(model, {"input_ids": ids, "labels": ids}, global_batch_size=16, precision="bf16")
    cluster = Cluster.preset("h100-sxm", num_nodes=2)
    problem = make_problem(
        made, cluster, style="nemo", precision="bf16", constraints=("place *.experts.* ep=S(0)",)
    )
    mesh: ModelMesh = (("ep", 16),)
    variant = own_variants(mesh, problem.batch)[0]
    plan = build_plan(problem, uniform_choice(problem, model=mesh, variant=variant))

    def seconds(cpu_s: float = 0.0, **changes: Any) -> float:
        changed = replace(style("nemo"), experts_cpu_s=(cpu_s, cpu_s), **changes)
        return with_style(monkeypatch, made, plan, changed, nodes=2)

    # Of neighbours 2 ranks of one node have the eight, as each has four.
    expert, rank, node, near = (
        seconds(token_to=to) for to in ("expert", "rank", "node", "neighbours")
    )
    assert near < node < rank < expert
    # The network's rate bounds the others: a copy more takes as long, whatever it is for.
    ranks, nodes = (spread_evenly(64, 8).copies(n) for n in (16, 2))
    assert (expert - rank) / (8 - ranks) == pytest.approx((rank - node) / (ranks - nodes), rel=0.6)
    # Where the CPU takes longer than all that, a layer takes what the CPU does.
    longer = [seconds(cpu_s, token_to="expert") for cpu_s in (0.2, 0.3)]
    assert expert < 0.8 < longer[0] and longer[1] - longer[0] == pytest.approx(4 * 0.1, rel=1e-3)

    # As long as the device is busy it hides; not where the CPU waits for counts in each forward.
    beside, waited = (
        [seconds(cpu_s, token_to="expert", experts_wait=waits) for cpu_s in (0.0, 1e-3)]
        for waits in (False, True)
    )
    assert beside[1] == pytest.approx(beside[0], rel=1e-9)
    assert waited[1] - waited[0] == pytest.approx(2 * 1e-3, rel=1e-3)

    told: set[tuple[str, int, tuple[str, ...]]] = set()

    def note(self: StageSite, message: Inner, axis: str, outside: Sequence[str] = ()) -> float:
        if message.routing:
            told.add((axis, message.outer, tuple(outside)))
        return 0.0

    pins = "place *.experts.* ep=S(0)", "place *.experts.* tp=S(0,outer=2)"
    problem = make_problem(made, cluster, style="nemo", precision="bf16", constraints=pins)
    mesh = (("ep", 2), ("tp", 2))
    monkeypatch.setattr(StageSite, "inner_s", note)
    variant = own_variants(mesh, problem.batch)[0]
    build_plan(problem, uniform_choice(problem, dp_shard=2, model=mesh, variant=variant))
    assert told == {("ep", 1, ()), ("tp", 2, ("ep",))}


def test_one_all_to_all_over_two_axes_takes_the_slower_links() -> None:
    """Whichever of them is outside, and whatever links replicas have, of which there may be as
    many."""
    device, known = presets.device("h100-sxm"), spread_evenly(16, 4)
    links = {"dp": presets.LINKS["ethernet-10g"], "ep": presets.LINKS["pcie4"],
             "tp": presets.LINKS["nvlink4"]}  # fmt: skip
    axes = {"dp": Axis(2), "ep": Axis(4), "tp": Axis(2)}
    site = StageSite(
        axes, dict.fromkeys(axes, 0), device,
        {name: (Level(axes[name].size, links[name]),) for name in axes}, style("nemo"),
    )  # fmt: skip

    on_data = Strategy((Shard(0), Shard(0), Shard(0), R), (Shard(0),))

    def whole_s(outside: str, inside: str) -> float:
        found = 0.0
        cuts = {outside: 1, inside: axes[outside].size}
        placed = {a: Strategy((Shard(0), R, R, Shard(0, n)), (R,)) for a, n in cuts.items()}
        for axis, outer in cuts.items():
            ranks = axes[axis].size
            nbytes = round(2**24 * ranks * known.copies(ranks * outer))
            move = Inner(Primitive.ALL_TO_ALL, nbytes, 1, backward=False, routing=known,
                         held=16 // ranks // outer, outer=outer)  # fmt: skip
            found += site.inner_s(move, axis, axes_outside({**placed, "dp": on_data}, axis))
        return found

    slow_s = collective_time(Primitive.ALL_TO_ALL, 2**24 * 4 * 4, site.levels["ep"])
    assert whole_s("ep", "tp") == pytest.approx(slow_s, rel=1e-3)
    assert whole_s("tp", "ep") == pytest.approx(slow_s, rel=1e-3)


def test_a_loss_of_its_own_moves_more(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = priced(graph, "", "sync=zero", dp_shard=8)
    none, some, more = (
        with_style(monkeypatch, graph, plan, replace(style(""), loss_bytes=n)) for n in (0, 64, 128)
    )
    assert more - some == pytest.approx(some - none, rel=1e-3)
    bandwidth = Cluster.preset("h100-sxm").device_types[0].memory_bandwidth_bytes_per_s
    least_s = 64 * (64 * 2048 / 8) * SIZES["vocab_size"] / bandwidth
    assert least_s < some - none < 1.5 * least_s
    with pytest.raises(PlanError, match="loss_bytes is -1"):
        replace(style(""), loss_bytes=-1)


def test_what_comes_before_a_softmax_may_be_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(
        n_embd=512, n_layer=2, n_head=8, n_positions=1024, vocab_size=1024, use_cache=False
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(2, 1024, dtype=torch.int64)
    eager = trace(model, {"input_ids": ids, "labels": ids}, precision="bf16")
    facts = CostTables(eager, Cluster.preset("h100-sxm"), "bf16").facts
    kinds = {op.target.split(".")[1] for op in eager.ops if op.name in facts.before_softmax}
    assert {"mul", "add"} & kinds and "matmul" not in kinds and "softmax" not in kinds
    plan = priced(eager, "", "sync=zero", dp_shard=2)
    fused = replace(style(""), fused_softmax=True)
    assert with_style(monkeypatch, eager, plan, fused) < with_style(
        monkeypatch, eager, plan, style("")
    )


def test_casts_are_what_the_stack_makes_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    ids = torch.zeros(2, 2048, dtype=torch.int64)
    made = trace(model, {"input_ids": ids, "labels": ids}, precision="fp8-tensorwise",
                 global_batch_size=16)  # fmt: skip
    facts = CostTables(made, Cluster.preset("h100-sxm"), "fp8-tensorwise").facts
    assert facts.normed
    problem = make_problem(made, Cluster.preset("h100-sxm"), precision="fp8-tensorwise")
    plan = build_plan(problem, uniform_choice(problem))
    stacks = [replace(style(""), casting=Casting(operand=n, result=n)) for n in (0, 60)]
    free, dear = (with_style(monkeypatch, made, plan, stack) for stack in stacks)
    assert free < dear


def test_layouts_are_those_that_the_stack_has(graph: Graph) -> None:
    for stack, names in (("megatron", {"halves"}), ("megatron-2021", {""}), ("alpa", {"plain"})):
        problem = make_problem(graph, Cluster.preset("h100-sxm"), constraints=("tp=8",),
                               precision="bf16", style=stack)  # fmt: skip
        assert {way.variant for way in ways(problem) if way.model} == names


def test_a_diff_and_the_report_say_it(graph: Graph) -> None:
    ours, other = (priced(graph, stack, tp=8, num_microbatches=4) for stack in ("", "megatron"))
    rows = [row for row in structure(ours, other) if row.what == "style"]
    assert [(row.first, row.second) for row in rows] == [("-", "megatron")]
    said = [contents(plan)["plan"]["style"] for plan in (ours, other)]
    assert said == ["", "Megatron-Core"]


def test_unknown_styles_are_refused_with_the_nearest(graph: Graph) -> None:
    with pytest.raises(PlanError, match=r"'megatrom'; nearest is 'megatron"):
        make_problem(graph, Cluster.preset("h100-sxm"), style="megatrom")
    with pytest.raises(PlanError, match="hides"):
        replace(style(""), hides=0.0)
    with pytest.raises(PlanError, match="launching: collective_s"):
        Launching(collective_s=2.0)


def test_a_search_takes_what_the_stack_has_no_choice_of(graph: Graph) -> None:
    found = mw.search(
        graph, Cluster.preset("h100-sxm"), style="megatron", constraints=("tp=8",), progress=False
    )
    assert found.style == "megatron" and found.stages[0].overlap == "gradients"
    assert all(stage.sync is None and stage.store is None for stage in found.stages)
    own = mw.search(
        graph, Cluster.preset("h100-sxm"), style="megatron", constraints=("tp=8", "overlap=none"),
        progress=False,
    )  # fmt: skip
    assert own.stages[0].overlap == "none"


def test_a_plan_by_hand_may_name_one() -> None:
    found = mw.complete(
        {"tp": 2, "dp_shard": 4, "zero": 1, "style": "nemo", "precision": "bf16"},
        _small(), Cluster.preset("h100-sxm"), example_inputs=_batch(), global_batch_size=8,
    )  # fmt: skip
    assert found.style == "nemo"
    assert {fusion.kernel for fusion in found.kernels} >= {"swiglu", "rotary"}


def _small(words: int = 512) -> torch.nn.Module:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=words, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(2, 128, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def test_vocabularies_are_padded_as_the_stack_pads_them(graph: Graph) -> None:
    """Refused, or told: a plan has the rows of the model that is given."""
    odd = trace(_small(500), _batch(), precision="bf16")
    for stack in ("megatron", "bloom", "nemo"):
        with pytest.raises(PlanError, match=r"500 words to 512 \(1024 with tp=8\)"):
            make_problem(odd, Cluster.preset("h100-sxm"), style=stack)
    make_problem(odd, Cluster.preset("h100-sxm"), style="torchtitan")
    told = {tp: tuple(vocabulary_notes(graph, priced(graph, "megatron", tp=tp))) for tp in (2, 4)}
    assert "32000 words to 32256 for tp=4, 0.8% more" in told[4][0] and told[2] == ()
    assert vocabulary_notes(graph, priced(graph, "", tp=4)) == ()
