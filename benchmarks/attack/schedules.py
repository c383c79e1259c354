"""Every schedule and border under NCCL's rules: the job must end, and equal plain training.

Ranks are processes over a Gloo group that hangs where NCCL would (`testing/nccl_rule.py`).
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from benchmarks.attack.result import Result
from meshwright.costmodel.simulate.simulate import StageTimes
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.ir.plan.schedule import Schedule
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.inside.prices import AlphaBeta
from meshwright.planner.problem.candidates import Choice, build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.schedule_tools import SCHEDULES, make_schedule, stages_per_rank
from meshwright.planner.synthesis.solve import synthesise
from meshwright.planner.synthesis.task import Task
from meshwright.runtime.checkpoint.export import full_state
from meshwright.testing.equality import Difference, check_each_equal, check_equal
from meshwright.testing.handmade import (
    BATCH,
    Chain,
    batches,
    make_job,
    reference,
)
from meshwright.testing.models import CASES
from meshwright.testing.nccl_rule import run_under_rule
from meshwright.testing.pipelines import Pipeline, pipeline
from meshwright.testing.ring_layouts import with_rings
from meshwright.testing.spawn import RankFailed, alone

STEPS = 2


def attacks(size: int, seed: int) -> Iterator[Result]:
    """Pipelines of 2 to 4 ranks, and of up to 8 at full size; all of one world in one start."""
    worlds = (2, 3, 4, 6, 8) if size >= 100 else (2, 4)
    for world in worlds:
        found = list(pipelines(world, 8 if size >= 100 else 4))
        if size < 100:
            found = found[:: max(1, 100 // max(size, 1) // 4)]
        start = time.monotonic()
        try:
            differences = train_all(world, found)
        except RankFailed as error:
            yield Result(f"{len(found)} pipelines of {world} ranks", False, str(error)[-2000:])
            continue
        seconds = (time.monotonic() - start) / len(found)
        for one, difference in zip(found, differences, strict=True):
            held = difference <= 1e-9
            yield Result(one.name, held, f"equal to {difference:.0e}", seconds)
    if size >= 100:
        yield from _traced()
        for world in (3, 4, 5, 6):
            yield from _crossed(world)


@dataclass(frozen=True)
class Traced:
    """A model of the zoo, the axes that its blocks are split on, and the rest of its plan."""

    model: str
    axes: dict[str, int]
    choice: dict[str, Any]
    ring: bool = False
    """Whether attention goes round a ring on `cp`, which small models would not take."""

    def __str__(self) -> str:
        return f"{self.model} {self.axes} {self.choice}{' ring' * self.ring}"


TRACED = (
    Traced("llama", {"cp": 2}, {"pp": 2, "schedule": "zbv", "num_microbatches": 2}, ring=True),
    Traced("mixtral", {"ep": 2}, {"pp": 2, "schedule": "gpipe", "num_microbatches": 2}),
    Traced("mixtral", {"ep": 2}, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
    Traced("vgg19", {"cp": 2}, {"pp": 2, "schedule": "zero_bubble", "num_microbatches": 2}),
    Traced("bert_mlm", {"cp": 4}, {}, ring=True),
    Traced("gpt2", {"tp": 2}, {"pp": 2, "schedule": "dapple_pb", "num_microbatches": 2}),
    Traced("t5", {"tp": 2}, {"pp": 2, "dp_shard": 2, "zero": 3, "schedule": "gpipe",
                             "num_microbatches": 2}),
)  # fmt: skip
"""Rings of attention, tokens that travel to experts, halos, sums and gathers beside messages."""

QUICK = AlphaBeta(latency_s=0.0, bandwidth=1e15, state_per_parameter_byte=1e6)
"""Prices at which everything that can be split is."""


def train_traced(one: Traced) -> Difference:
    """How far the model under the rule is from one process, both in float64."""
    case, plan, graph = CASES[one.model], *planned_traced(one)
    return check_equal(case, plan, graph, steps=2, run=run_under_rule)


def planned_traced(one: Traced) -> tuple[Plan, Graph]:
    """Its plan, and the graph that it is of."""
    case = CASES[one.model]
    graph = trace(case.model(), case.example(8), case.loss_fn)
    problem = make_problem(graph, Cluster.local(8), precision="fp64", optimizer="adam")
    axes = model_mesh(one.axes)
    problem.solved[axes, ""] = solve_layouts(graph, axes, usual(axes, QUICK))
    plan = build_plan(problem, uniform_choice(problem, model=axes, **one.choice), predict=False)
    return with_rings(plan, graph) if one.ring else plan, graph


@dataclass(frozen=True)
class Crossing:
    """A pipeline whose stages differ in replicas and in tensor parallelism: M:N borders."""

    stages: tuple[tuple[int, int], ...]
    """dp and tp of each."""
    schedule: str
    num_microbatches: int = 4

    def __str__(self) -> str:
        return f"{self.schedule} {' to '.join(f'dp{dp} tp{tp}' for dp, tp in self.stages)}"

    @property
    def world_size(self) -> int:
        return sum(dp * tp for dp, tp in self.stages)


def crossings(world: int) -> Iterator[Crossing]:
    """Every way in which two or three stages on so many ranks differ in both, or in tp alone, each
    under a schedule of its own by turns."""
    names = [name for name in SCHEDULES if 1 in stages_per_rank(name)]
    for number, stages in enumerate(_unlike(world)):
        yield Crossing(stages, names[number % len(names)])


def _unlike(world: int) -> Iterator[tuple[tuple[int, int], ...]]:
    sizes = [(dp, tp) for dp in (1, 2) for tp in (1, 2)]
    for count in (2, 3):
        for stages in product(sizes, repeat=count):
            unlike = len({tp for _, tp in stages}) > 1
            if unlike and sum(dp * tp for dp, tp in stages) == world:
                yield stages


def train_crossings(found: Sequence[Crossing]) -> list[Difference]:
    """How far each, all on as many ranks, is from one process under the rule, in float64."""
    case = CASES["gpt2"]
    graph = trace(case.model(), case.example(8), case.loss_fn)
    problem = make_problem(graph, Cluster.local(8), precision="fp64", optimizer="adam")
    axes = model_mesh({"tp": 2})
    problem.solved[axes, ""] = solve_layouts(graph, axes, usual(axes, QUICK))
    planned = [(build_plan(problem, _crossing(problem, one), predict=False), graph)
               for one in found]  # fmt: skip
    return check_each_equal(case, planned, steps=2, run=run_under_rule)


def _crossing(problem: Problem, one: Crossing) -> Choice:
    return uniform_choice(
        problem, pp=len(one.stages), stage_dp=[dp for dp, _ in one.stages],
        stage_tp=[tp for _, tp in one.stages], zero=1, schedule=one.schedule,
        num_microbatches=one.num_microbatches,
    )  # fmt: skip


def _crossed(world: int) -> Iterator[Result]:
    found = [*crossings(world)]
    start = time.monotonic()
    try:
        differences = train_crossings(found)
    except RankFailed as error:
        yield Result(f"{len(found)} crossings of {world} ranks", False, str(error)[-2000:])
        return
    seconds = (time.monotonic() - start) / len(found)
    for one, difference in zip(found, differences, strict=True):
        what = f"equal to {difference.worst_of_both:.0e}"
        yield Result(str(one), difference.worst_of_both <= 1e-9, what, seconds)


def _traced() -> Iterator[Result]:
    for one in TRACED:
        start = time.monotonic()
        try:
            found = train_traced(one)
        except RankFailed as error:
            yield Result(str(one), False, str(error)[-2000:])
            continue
        what = f"equal to {found.worst_of_both:.0e}"
        yield Result(str(one), found.worst_of_both <= 1e-9, what, time.monotonic() - start)


def pipelines(world: int, microbatches: int) -> Iterator[Pipeline]:
    """All schedules on `world` ranks: one rank a stage, replicas, stages of unequal replicas."""
    for name in SCHEDULES:
        for chunks in stages_per_rank(name)[:1]:
            for ranks in dict.fromkeys((world, world // 2)):
                if ranks < 2:
                    continue
                try:
                    schedule = make_schedule(name, chunks * ranks, microbatches, ranks)
                except PlanError:
                    continue  # not for this many ranks or micro-batches
                yield pipeline(f"{name} {ranks}", schedule, world // ranks)
    for times in ((1.0, 2.0, 1.5, 0.5), (3.0, 1.0, 1.0, 2.0)):
        yield pipeline(f"solver {times}", _solved(times, world, microbatches), 1)
    for schedule in ("gpipe", "one_f_one_b", "zero_bubble", "dapple_pb"):
        for replicas in _uneven(world, BATCH // 4):
            made = make_schedule(schedule, len(replicas), 4, len(replicas))
            yield pipeline(f"{schedule} {replicas}", made, replicas)


def distinct(found: Iterable[Pipeline]) -> list[Pipeline]:
    """Those that differ in more than their names: some schedules are equal at some sizes."""
    known = {(one.plan.schedule.rows, repr(one.plan.stages)): one for one in reversed([*found])}
    return [*reversed(known.values())]


def _uneven(world: int, samples: int) -> Iterator[tuple[int, ...]]:
    """Replicas per stage, unequal; each has a sample of a micro-batch."""
    ends = (1, world - 1), (world - 1, 1), (1, world - 2, 1), (2, world - 2), (2, 1, world - 3)
    for found in ends:
        if min(found) > 0 and max(found) <= samples and len({*found}) > 1:
            yield found


def _solved(times: tuple[float, ...], ranks: int, microbatches: int) -> Schedule:
    stages = tuple(
        StageTimes(
            forward_s=times[i % 4], backward_s=2.0, backward_input_s=times[-i % 4],
            backward_weight_s=1.0,
        )
        for i in range(2 * ranks)
    )  # fmt: skip
    placement = tuple(i % ranks for i in range(2 * ranks))
    return synthesise(
        Task(stages=stages, placement=placement, num_microbatches=microbatches), effort=0.1
    ).schedule


def train_all(world: int, found: list[Pipeline]) -> list[float]:
    """Per pipeline, how far losses and parameters are from those of plain training."""
    wanted = alone(_plainly, [pipeline.chain for pipeline in found])
    results = run_under_rule(world, _train, found)[0]
    return [max(map(_apart, *pair)) for pair in zip(results, wanted, strict=True)]


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().max())


def _plainly(chains: list[Chain]) -> list[list[torch.Tensor]]:
    """Losses and parameters of plain training."""
    found = (reference(chain, batches(STEPS)) for chain in chains)
    return [[torch.tensor(losses, dtype=torch.float64), *state.values()] for losses, state in found]


def _train(found: list[Pipeline]) -> list[list[torch.Tensor]]:
    results = []
    for one in found:
        job = make_job(one.chain, one.plan)
        first, *_ = batches(STEPS)
        before = job.eval(first)
        losses = [float(job.step(batch)) for batch in batches(STEPS)]
        assert float(before) == losses[0], f"{one.name}: evaluation {before}, training {losses[0]}"
        state = full_state(job)
        for batch in batches(STEPS):
            job.accumulate(batch)
        job.apply(1.0 / STEPS)
        job.eval(first)
        job.close()
        results.append([torch.tensor(losses, dtype=torch.float64), *_in_order(state, one.chain)])
    return results


def _in_order(state: dict[str, torch.Tensor], chain: Chain) -> list[torch.Tensor]:
    return [state[name] if name in state else p.detach() for name, p in chain.named_parameters()]
