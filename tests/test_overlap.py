"""Blocks whose collectives go on beside other work equal one process: float64, uneven halves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshwright.codegen.collectives.comm import AxisConversion
from meshwright.codegen.collectives.products import columns, rows
from meshwright.codegen.lower.lower import lower
from meshwright.costmodel.block.overlap import PhaseTimes, _turns
from meshwright.costmodel.stage.program import play
from meshwright.ir.cluster.device import OpClass, OpCurve
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.conversions import COMMUNICATES
from meshwright.ir.placed import used
from meshwright.ir.plan.plan import OVERLAPS, Plan
from meshwright.ir.plan.verify import check
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.search.finish import variants
from meshwright.planner.search.search import search_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES
from meshwright.testing.spawn import run_ranks
from tests.overlap_plans import machine, planned, priced
from tests.planner.problems import cluster, problem
from tests.runtime.fused_graphs import BATCH, graph_of

LEVELS = OVERLAPS[1:]


@pytest.mark.sampled
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("level", LEVELS)
def test_levels_equal_one_process(model: str, level: str) -> None:
    """Micro-batches of three samples: halves of two and one, which differ."""
    graph, plan = planned(model, 6, level, tp=2, num_microbatches=2)
    difference = check_equal(CASES[model], plan, graph, steps=2)
    assert difference.worst_of_both <= 1e-9, str(difference)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "choice",
    [
        {"tp": 3, "num_microbatches": 1},
        {"tp": 2, "pp": 2, "num_microbatches": 2, "recompute": "full"},
        {"tp": 2, "dp_shard": 2, "zero": 3, "num_microbatches": 2},
        {"tp": 2, "pp": 2, "num_microbatches": 2, "recompute": "full",
         "schedule": "pre_recompute_1f1b"},
    ],
    ids=["uneven", "recompute", "zero3", "early"],
)  # fmt: skip
def test_halves_equal_one_process_beside_all_else(choice: dict[str, Any]) -> None:
    graph, plan = planned("gpt2", 12 if "zero" in choice else 10, "blocks", **choice)
    difference = check_equal(CASES["gpt2"], plan, graph, steps=2)
    assert difference.worst_of_both <= 1e-9, str(difference)


def test_halves_equal_one_process_with_kernels_that_make_several_things() -> None:
    """A sum and its norm: a sum of the ranks waits for the norm, what is beside it for the sum."""
    graph, plan = planned(
        "llama", BATCH, "block", graph=graph_of("llama"), tp=2, num_microbatches=2
    )  # fmt: skip
    assert "rms_norm" in used(plan)
    difference = check_equal(CASES["llama"], plan, graph, steps=2)
    assert difference.worst_of_both <= 1e-9, str(difference)


def test_what_each_level_changes() -> None:
    """Of a layer of GPT-2: two products of each kind."""
    made = {}
    for level in LEVELS:
        graph, plan = planned("gpt2", 6, level, tp=2, num_microbatches=2)
        (program,) = lower(graph, plan, 0)
        made[level] = code = program.calls[1].code
        assert "columns(" in program.source and ("rows(" in program.source) == (level == "linear")
        halved = level in ("block", "blocks")
        assert ("one half computes" in program.source) == halved
        targets = [node.target for node in code.module.graph.nodes]
        assert targets.count(columns) == (0 if halved else 2)
        assert targets.count(rows) == (2 if level == "linear" else 0)
        assert any(call.follows for call in program.calls) == (level == "blocks")
    assert made["gradients"].halves is None and made["linear"].halves is None
    follows = [call.follows for call in program.calls]
    assert follows == [False, *[True] * (len(follows) - 2), False]
    halves = made["block"].halves
    assert halves and halves.samples == (2, 1)
    sends = [[m.sends_forward for m in phase.moves] for phase in halves.cuts[0].phases]
    assert sends == [[], [False], [True], [False], [True], []]


@pytest.mark.parametrize("level", ["block", "blocks"])
def test_a_half_goes_on_while_the_other_waits(level: str) -> None:
    """The first half is in the second layer before the other half's last sum of the first is there;
    within single blocks both wait for each other."""
    graph, plan = planned("gpt2", 4, level, tp=2, num_microbatches=1)
    for events in run_ranks(2, order_of, graph, plan):
        begins = events.index(("begins", "transformer.h.1", 0))
        arrives = max(i for i, e in enumerate(events) if e == ("arrives", "transformer.h.0", 2))
        assert (begins < arrives) == (level == "blocks")


def order_of(graph: Graph, plan: Plan) -> list[tuple[str, str, int]]:
    """What begins and arrives in a forward: of which block, and from which sample on."""
    case = CASES["gpt2"]
    job = compile_job(case.model(), plan, optimizer="sgd", lr=1e-3, device="cpu", graph=graph)
    comm = job.parts.stages[0].comm
    begin, events = comm.begin_forward, []

    def watched(move: AxisConversion, x: Tensor) -> Callable[[], Tensor]:
        block, sample = comm.block, comm.sample_offset
        arrive = begin(move, x)
        if move.forward not in COMMUNICATES:
            return arrive
        events.append(("begins", block, sample))
        return lambda: events.append(("arrives", block, sample)) or arrive()

    comm.begin_forward = watched  # type: ignore[method-assign]
    job.step(case.example(4))
    return events


def test_uneven_replicas_exchange_block_by_block() -> None:
    """All replicas must open and close blocks in one order, and one of them has a single sample."""
    graph, plan = planned("gpt2", 3, "blocks", tp=2, dp_shard=2, zero=3, num_microbatches=1)
    assert plan.stages[0].batch_shares == (2, 1)
    assert not any(call.follows for call in lower(graph, plan, 0)[0].calls)


def test_search_leaves_halves_that_cost_more_than_they_hide() -> None:
    """Where products are flat, two halves move their weights twice."""
    plain = cluster(4)
    device = replace(plain.device_types[0], kind="cuda", source="measured")
    asked = {}
    for packing in (0.0, 8.0):
        curve = OpCurve(share=1.0, packing=packing)
        own = replace(device, curves={OpClass.MATMUL: curve})
        graph = planned("gpt2", 8, "none", tp=2)[0]
        asked[packing] = problem(graph, replace(plain, device_types=(own,)),
                                 constraints=("pp=1", "tp=4", "num_microbatches=1"))  # fmt: skip
    cost = {}
    for packing, one in asked.items():
        base = build_plan(one, uniform_choice(one, tp=4))
        halved = next(p for p in variants("overlap", one, base) if p.stages[0].overlap == "block")
        assert halved.predicted and base.predicted
        cost[packing] = halved.predicted.step_s - base.predicted.step_s
    assert cost[8.0] > cost[0.0]


def test_single_samples_run_as_they_are() -> None:
    graph, plan = planned("gpt2", 2, "block", tp=2, num_microbatches=2)
    assert all(call.code.halves is None for call in lower(graph, plan, 0)[0].calls)


def test_rules() -> None:
    graph, plan = planned("gpt2", 4, "block", tp=2, num_microbatches=2)
    alone = replace(plan.stages[0], mesh={"tp": 1}, devices=(0,), layouts={})
    found = replace(plan, stages=(alone,)).verify()
    assert [(f.rule, f.severity) for f in found if f.rule == "overlap"] == [("overlap", "warning")]
    split = replace(plan.schedule, rows=("0F0 0I0 0W0 0F1 0I1 0W1",))
    found = replace(plan, schedule=split).verify(graph)
    assert [(f.rule, f.severity) for f in found] == [("overlap", "error")]


def test_each_level_hides_more() -> None:
    asked = priced("tp=4", "num_microbatches=1")
    plain = build_plan(asked, uniform_choice(asked, tp=4))
    found = [plain, *variants("overlap", asked, plain)]
    assert [plan.stages[0].overlap for plan in found] == list(OVERLAPS)
    exposed = [
        p.predicted.breakdown.tensor_s for p in found if p.predicted and p.predicted.breakdown
    ]
    assert (
        exposed == sorted(exposed, reverse=True)
        and exposed[0] > exposed[1] > exposed[3] > exposed[4]
    )


def test_halves_of_backwards_give_way() -> None:
    """Under zero bubble nothing can be beside a whole backward: 1F1B stands in."""
    graph = planned("gpt2", 8, "none", tp=2)[0]
    asked = problem(graph, machine(4))
    choice = uniform_choice(asked, pp=2, tp=2, num_microbatches=4, schedule="zero_bubble")
    found = list(variants("overlap", asked, build_plan(asked, choice)))
    assert [(p.schedule.name, p.stages[0].overlap) for p in found] == [
        ("one_f_one_b", level) for level in LEVELS
    ]
    for plan in found:
        check(plan, asked.graph, asked.cluster)


def test_search_takes_what_pays_and_pins_are_kept() -> None:
    best = search_problem(priced("tp=4", "num_microbatches=1"), "ilp")
    plain = search_problem(priced("tp=4", "num_microbatches=1", "overlap=none"), "ilp")
    assert best.predicted and plain.predicted and plain.evidence and best.evidence
    assert best.stages[0].overlap != "none" and plain.stages[0].overlap == "none"
    assert best.predicted.step_s < plain.predicted.step_s
    assert 0 < best.evidence.bound_s < best.predicted.step_s and best.evidence.gap
    asked = search_problem(priced("tp=4", "num_microbatches=1", "overlap=linear"), "ilp")
    assert asked.stages[0].overlap == "linear"


@settings(max_examples=60)
@given(
    forward=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    sent=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_turns_hide_at_most_what_computes_beside(forward: list[int], sent: list[int]) -> None:
    """No turn is shorter than the computing, than what is sent, and none longer than all in a row;
    the price is that of the runtime's turns, taken here by hand."""
    times = [float(f) for f in forward], [float(s) for s in sent[: len(forward) - 1]]
    parts = [PhaseTimes(times[0], times[0], [*times[1]], [*times[1]]) for _ in range(2)]
    for back in (False, True):
        took = play(tuple(_turns(parts, back=back)))[0]
        assert took == by_hand(*times, back)
        whole, moved = 2 * sum(times[0]), 2 * sum(times[1])
        assert max(whole, moved) <= took <= whole + moved


def by_hand(computed: list[float], sent: list[float], back: bool) -> float:
    """Two halves by the clock: a half runs up to a collective, then it is the other's turn."""
    if back:
        computed, sent = computed[::-1], sent[::-1]
    now = link = 0.0
    place, arrives = [0, 0], [0.0, 0.0]
    turn = 0
    while any(n < len(computed) for n in place):
        if place[turn] < len(computed):
            now = max(now, arrives[turn])
            while place[turn] < len(computed):
                now += computed[place[turn]]
                place[turn] += 1
                after = sent[place[turn] - 1] if place[turn] <= len(sent) else 0.0
                if after:
                    link = arrives[turn] = max(link, now) + after
                    break
        turn = 1 - turn
    return now
