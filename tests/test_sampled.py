"""Ranks of a replica with samples of their own, against one process in float64: all of a block is
split as `dp` splits it, and tokens alone travel to the experts."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import isinf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright.codegen.collectives.line import TRAVEL
from meshwright.codegen.lower.lower import lower
from meshwright.costmodel.block.overlap import phases_of
from meshwright.costmodel.stage.placement import stage_costs
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.lines import border_pairs, in_order, side
from meshwright.ir.plan.plan import ModelMesh, Plan, Stage
from meshwright.ir.plan.sampled import sample_ranks
from meshwright.ir.trace.trace import trace
from meshwright.planner.bounds.bound import relaxed
from meshwright.planner.bounds.frames import frames
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.pins.constraints import placement_rules
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.messages.messages import pairs_of
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks
from tests import dropout_jobs
from tests.clipped_jobs import check_each_goes_on
from tests.codegen.quick import QUICK
from tests.overlap_plans import machine
from tests.planner.mixed import mixed
from tests.traces import zoo_graph

EP2, EP4, CP2, TP2 = (("ep", 2),), (("ep", 4),), (("cp", 2),), (("tp", 2),)
SHARES, PLACED, STAGE = "shares", "placed", "stage"
"""Of the keys of a choice: samples of each replica, where experts lie, and what stages say."""
KEPT = {
    "model.layers.0": {
        "mlp.experts/experts": "recompute",
        "self_attn/add": "recompute",
        "*": "offload",
    },
    "model.layers.1": {"post_attention_layernorm/mul": "recompute"},
}
BOTH = ("place *.experts.* ep=S(0)", "place *.experts.* tp=S(0,outer=2)")
TURNED = ("place *.experts.* ep=S(0,outer=2)", "place *.experts.* tp=S(0)")
PAIRS = {"schedule": "dual_pipe_v_pairs", "num_microbatches": 4}
ON_FOUR: dict[str, tuple[ModelMesh, dict[str, Any]]] = {
    "replicas": (EP2, {"dp_replicate": 2}),
    "uneven replicas": (EP2, {"dp_shard": 2, "zero": 3, SHARES: (6, 2)}),
    "alone": (EP4, {"zero": 2, "num_microbatches": 2}),
    "beside tp": ((*EP2, *TP2), {"zero": 1}),
    "experts on tp, too": ((*EP2, *TP2), {"zero": 1, PLACED: BOTH}),
    "experts on tp first": ((*EP2, *TP2), {"zero": 0, PLACED: TURNED, "num_microbatches": 2}),
    "inside cp": ((*CP2, *EP2), {"zero": 3, "num_microbatches": 2}),
    "stages": (EP2, {"pp": 2, "zero": 1, "num_microbatches": 2, "recompute": "full"}),
    "uneven halves": (EP2, {"dp_shard": 2, "zero": 3, SHARES: (6, 2), STAGE: {"overlap": "block"}}),
    "halves of kept ops": (EP4, {"zero": 2, STAGE: {"overlap": "block", "saved": KEPT}}),
    "halves that go on": (EP4, {"zero": 3, STAGE: {"overlap": "blocks", "saved": KEPT}}),
    "single samples": (
        EP4,
        {"num_microbatches": 2, "zero": 2, STAGE: {"overlap": "blocks", "saved": KEPT}},
    ),
    "halves on tp, too": (
        (*EP2, *TP2),
        {"zero": 1, PLACED: BOTH, "recompute": "full", STAGE: {"overlap": "blocks"}},
    ),
    "pairs, recomputed": (EP2, {"pp": 2, "zero": 1, "recompute": "full", **PAIRS}),
    "pairs that gather": (EP2, {"pp": 2, "zero": 3, **PAIRS}),
    "pairs of kept ops, uneven stages": (
        EP2,
        {
            "cuts": (1,),
            "dp_shard": 2,
            "zero": 2,
            **PAIRS,
            "num_microbatches": 2,
            STAGE: {"saved": KEPT},
        },
    ),
    "pairs on tp, too": ((*EP2, *TP2), {"cuts": (2,), "zero": 1, PLACED: BOTH, **PAIRS}),
}
ON_EIGHT = {
    "cp and tp": ((*CP2, *EP2, *TP2), {"zero": 2}),
    "stages": (EP2, {"pp": 2, "dp_shard": 2, "num_microbatches": 2, "schedule": "zero_bubble"}),
    "stages of other replicas": (EP2, {"pp": 3, "zero": 1, "stage_dp": (2, 1, 1)}),
}


@cache
def traced(batch: int = 8) -> Graph:
    case = CASES["mixtral"]
    return zoo_graph(case, batch)


def _plan(world: int, mesh: ModelMesh, choice: dict[str, Any], graph: Graph | None = None) -> Plan:
    graph = graph or traced()
    said = {n: value for n, value in choice.items() if n not in (SHARES, PLACED, STAGE)}
    problem = make_problem(
        graph, Cluster.local(world), precision="fp64", optimizer="adam",
        constraints=choice.get(PLACED, ()),
    )  # fmt: skip
    rules = placement_rules(problem.constraints, graph)
    layouts = solve_layouts(
        graph, mesh, usual(mesh, QUICK), split_borders=True, apart="ep", asked=rules
    )
    problem.keep_layouts(mesh, "", layouts)
    chosen = uniform_choice(problem, model=mesh, **said)
    shares = choice.get(SHARES, ())
    chosen = replace(chosen, stages=tuple(replace(s, shares=shares) for s in chosen.stages))
    plan = build_plan(problem, chosen, predict=False)
    stages = tuple(replace(stage, **choice.get(STAGE, {})) for stage in plan.stages)
    return replace(plan, stages=stages)


@pytest.mark.filterwarnings("ignore:offload on cpu")
@pytest.mark.parametrize(("world", "plans"), [(4, ON_FOUR), (8, ON_EIGHT)])
def test_training_is_that_of_one_process(
    world: int, plans: dict[str, tuple[ModelMesh, dict[str, Any]]]
) -> None:
    made = {name: _plan(world, mesh, choice) for name, (mesh, choice) in plans.items()}
    for name, plan in made.items():
        for stored in (
            axes for x in plan.layouts for k, axes in x.parameters.items() if ".exp" in k
        ):
            for place in plans[name][1].get(PLACED, ()):
                axis, placement = place.split()[-1].split("=", 1)
                assert stored[axis] == placement, (name, stored)
        assert sample_ranks(plan, plan.stages[0]) == (("ep",), dict(plan.stages[0].model)["ep"])
        assert not [f for f in plan.verify(traced()) if f.severity == "error"], name
    found = check_each_equal(CASES["mixtral"], [(plan, traced()) for plan in made.values()])
    for name, difference in zip(made, found, strict=True):
        assert difference.worst_of_both <= 1e-9, f"{name}: {difference}"


def test_one_half_computes_while_tokens_of_the_other_travel() -> None:
    """As it is run, and as it is priced: tokens go out on one axis after the other, and come home
    the other way round. Nothing of a block in which samples are moved is cut."""
    plan = _plan(4, *ON_FOUR["halves on tp, too"])
    (program,) = lower(traced(), plan, 0)
    halves = program.calls[1].code.halves
    assert halves and halves.samples == (2, 2)
    phases = halves.cuts[0].phases
    moves = [[m for m in phase.moves if m.method == TRAVEL] for phase in phases]
    tokens = [[(m.axis, m.sends_backward) for m in found] for found in moves if found]
    out = [[(axis, True), (axis, False), (axis, True)] for axis in ("ep", "tp")]
    assert tokens == [*out, [("tp", True)], [("ep", True)]]  # what was picked has no gradient
    assert [call.code.halves is not None for call in program.calls] == [False, True, True, False]
    problem = make_problem(traced(), machine(4), precision="fp64", optimizer="adam")
    costs = stage_costs(problem.tables, plan, 0)
    block = traced().blocks[1]
    layout = plan.layout(plan.stages[0].layouts[block.pattern])
    walk = problem.tables.blocks.walk(block, layout, costs.spot)
    (legs,) = walk.travels.values()
    assert [leg.axis for leg in legs] == ["ep", "tp"]
    priced = [seconds > 0 for seconds in phases_of(walk).sent]
    run = [any(m.sends_forward for m in phase.moves) for phase in phases[1:]]
    assert priced == run[: len(priced)] and not any(run[len(priced) :])
    assert problem.tables.blocks.parts(block, layout, costs.spot) == 2
    cost = problem.tables.blocks.cost(block, layout, costs.spot)
    hidden = problem.tables.blocks.hidden(block, layout, costs.spot, "block")
    assert 0 < hidden.forward_s < cost.comm_forward_s
    assert 0 < hidden.backward_s < cost.comm_backward_s


MANY = 256
"""Samples, so many that all ranks together get as many tokens as is predicted, if not each."""


def _one_layer() -> nn.Module:
    """Of two, a rank's peak is in the one that gives it more tokens than the mean rank has."""
    model = CASES["mixtral"].model()
    model.model.layers = model.model.layers[:1]
    return model


def test_memory_of_experts_is_as_predicted() -> None:
    """What the backward makes inside of the operator and beside what the forward kept counts, too,
    where tokens travel and where they do not."""
    case, made = CASES["mixtral"], []
    graph = trace(_one_layer(), case.example(MANY), case.loss_fn)
    for mesh, replicas in ((EP2, 2), ((), 4)):
        for recompute in ("none", "full"):
            plan = _plan(4, mesh, {"dp_shard": replicas, "zero": 1, "recompute": recompute}, graph)
            asked = make_problem(graph, Cluster.local(4), precision="fp64", optimizer="adam")
            made.append((plan, predict_plan(asked, plan)))
    found = run_ranks(4, _peaks, [plan for plan, _ in made])
    for number, (_, predicted) in enumerate(made):
        mean = sum(peaks[number] for peaks in found) / len(found)
        assert predicted.stages[0].memory.tensor_bytes == pytest.approx(mean, rel=0.01)


def test_memory_of_the_rank_that_most_tokens_come_to() -> None:
    """If it was counted where they go: of the same tokens, with weights that stay as they are."""
    case, mesh = CASES["mixtral"], (("tp", 2),)
    graph = trace(_one_layer(), case.example(MANY), case.loss_fn)
    problem = make_problem(
        graph, Cluster.local(2), precision="fp64", optimizer="adam",
        constraints=("place *.experts.* tp=S(0)",),
        routes=mw.count_routes(_one_layer(), [case.example(MANY)]),
    )  # fmt: skip
    plan = build_plan(problem, uniform_choice(problem, model=mesh))
    most, least = sorted((peak for (peak,) in run_ranks(2, _peaks, [plan], 1e-12)), reverse=True)
    assert plan.predicted
    assert plan.predicted.stages[0].memory.tensor_bytes == pytest.approx(most, rel=0.01)
    assert least < 0.95 * most


def _peaks(plans: list[Plan], lr: float = 1e-3) -> list[int]:
    case = CASES["mixtral"]
    jobs = (
        compile_job(_one_layer(), plan, loss_fn=case.loss_fn, optimizer="adam", lr=lr, device="cpu")
        for plan in plans
    )
    return [peak_of(job, case.example(MANY)) for job in jobs]


def test_clipping_checkpoints_and_batches_in_parts(tmp_path: Path) -> None:
    """Norms count each part once, checkpoints go on under plans whose ranks share samples and under
    those whose ranks do not, and ranks may be given their replica's samples alone."""
    names = ("uneven replicas", "experts on tp, too", "stages")
    plans = {name: _plan(4, *ON_FOUR[name]) for name in names}
    plans["replicas"] = _plan(4, (), {"dp_replicate": 4, "zero": 0})
    check_each_goes_on(CASES["mixtral"], plans, traced(), tmp_path)


def test_samples_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    plan = _plan(4, EP2, {"dp_shard": 2, SHARES: (5, 3)})
    (found,) = plan.verify(traced())
    assert found.rule == "batch_shares" and found.nearest == "shares [4, 4]"
    assert "5 samples of a replica do not divide among the 2 ranks of ep" in found.message
    few = _plan(4, EP4, {"num_microbatches": 4})
    (found,) = [f for f in few.verify(traced()) if f.rule == "batch_shares"]
    assert found.nearest == "a micro-batch of 4"


def test_borders_between_ranks_with_samples_of_their_own() -> None:
    """An axis inside of `cp` belongs to `dp`, and pairs are those that the runtime connects."""
    stage = Stage(
        first="a", last="b", mesh={"dp_shard": 2, "cp": 2, "ep": 2, "tp": 2},
        devices=tuple(reversed(range(16))), batch_shares=(4, 2),
    )  # fmt: skip
    plan = _plan(8, *ON_EIGHT["stages of other replicas"])
    there = side(replace(plan, stages=(stage,)), 0, ("ep",))
    assert there.spans() == ((0, 2), (2, 4), (4, 5), (5, 6))
    for rank in range(16):
        at = stage.coordinates(rank)
        assert there.rank(2 * at["dp"] + at["ep"], 2 * at["cp"] + at["tp"]) == rank
    met = [pairs_of(plan, lower(traced(), plan, rank), rank) for rank in range(8)]
    assert border_pairs(plan) == in_order(pair for pairs in met for pair in pairs)


def test_searches_of_mixed_devices_know_which_samples_suit() -> None:
    """A micro-batch of one sample suits no ranks with samples of their own."""
    asked = make_problem(traced(), mixed(), precision="fp64", constraints=("samples=own", "zero=0"))
    bounds = {frame: relaxed(asked).bound(frame).seconds for frame in frames(asked)}
    assert {n.num_microbatches for n, seconds in bounds.items() if isinf(seconds)} == {8}
    found = search_problem(asked, "ilp")
    assert found.predicted and min(bounds.values()) <= found.predicted.step_s
    assert all(sample_ranks(found, stage)[1] > 1 for stage in found.stages)
    assert not [f for f in found.verify(traced()) if f.severity == "error"]


class Noisy(nn.Module):
    """Statistics of the batch, noise of whole channels, and an op drawn sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout2d(0.4)
        self.head = nn.Linear(4 * 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = self.drop(self.norm(self.into(x)).relu())
        made = made + 0.1 * torch.poisson(made.detach().abs())
        rows = torch.arange(len(x), device=x.device)
        return functional.dropout(self.head(made.flatten(1)), 0.3) + made[rows, 0, 0, :1]


def _images(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(8, 2, 4, 4, dtype=torch.float64, generator=draw)
    return images, torch.randint(8, (8,), generator=draw)


def _noisy() -> nn.Module:
    torch.manual_seed(0)
    return Noisy().double().train()


Job = tuple[Callable[[], nn.Module], Callable[[int], Any], Plan, Graph, Any]


def _losses(jobs: list[Job]) -> list[list[float]]:
    found = []
    for build, batch, plan, graph, loss_fn in jobs:
        job = compile_job(
            build(), plan, graph=graph, optimizer="sgd", lr=0.1, seed=3, loss_fn=loss_fn
        )
        found.append([float(job.step(batch(i))) for i in range(3)])
        job.close()
    return found


def test_what_is_drawn_and_batch_statistics_are_those_of_one_process() -> None:
    """Dropout of elements, attention and channels, an op drawn by samples, batch-norm, and indexing
    along samples."""
    models: tuple[Any, ...] = (
        (dropout_jobs.build, dropout_jobs.batch, None, 2),
        (_noisy, _images, functional.cross_entropy, 1),
    )
    jobs: dict[int, list[Job]] = {1: [], 4: []}
    for build, batch, loss_fn, count in models:
        graph = trace(build(), batch(0), loss_fn)
        for world, (mesh, choice) in {1: ((), {}), 4: (EP2, {"dp_replicate": 2})}.items():
            problem = make_problem(graph, Cluster.local(world), precision="fp64", optimizer="sgd")
            layouts = solve_layouts(graph, mesh, usual(mesh, QUICK), split_borders=True, apart="ep")
            problem.keep_layouts(mesh, "", layouts)
            chosen = uniform_choice(problem, model=mesh, num_microbatches=count, **choice)
            plan = build_plan(problem, chosen, predict=False)
            assert sample_ranks(plan, plan.stages[0])[1] == (2 if mesh else 1)
            jobs[world].append((build, batch, plan, graph, loss_fn))
    (wanted,) = run_ranks(1, _losses, jobs[1])
    for found in run_ranks(4, _losses, jobs[4]):
        for own, others in zip(found, wanted, strict=True):
            assert own == pytest.approx(others, rel=1e-9)
