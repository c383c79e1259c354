"""Dynamic programming over block boundaries and devices; the simulator judges the finalists.

For every number of pipeline ranks and micro-batches, the best cuts, device groups, meshes, ZeRO
levels and recompute per stage are found by `planner.partition`. Groups have equal sizes; where
there are few devices, or nodes differ, also all other sizes. The best few of all that are judged by
the cost model's simulator, and improved by small steps as long as that helps.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.placement import step_cores
from meshwright.ir.plan import Plan
from meshwright.planner.bound import lower_bound
from meshwright.planner.candidates import Choice, StageChoice, build_plan, recomputable
from meshwright.planner.constraints import broken, pinned
from meshwright.planner.obey import obey
from meshwright.planner.offers import Offer
from meshwright.planner.partition import Part, Pipeline, load, memory, path_within, solve
from meshwright.planner.predict import excess_bytes
from meshwright.planner.problem import Problem
from meshwright.planner.refine import neighbours, other_schedules
from meshwright.planner.schedule_tools import stages_per_rank
from meshwright.planner.space import microbatch_counts, pipeline_sizes
from meshwright.planner.stage_tables import StageTables

LIMITS = (1.0, 1.05, 1.15, 1.35, 1.7, 2.5)
"""Loads tried, as multiples of the least possible one."""
WORSE = 1.3
"""Pipelines that cannot come within this factor of the best value are not looked at further."""
JUDGED, CLOSE = 48, 1.1
"""Finalists that are simulated: so many, and those within this factor of the best step."""
POLISHED, STEPS, ACTIONS = 3, 400, 150_000
"""Finalists that are improved, simulations spent on that, and schedule actions in all of them."""
UNITS = 16
"""At most so many units of devices are shared out unevenly."""


@dataclass(frozen=True, slots=True)
class Finalist:
    """A choice and about how good it is: seconds, or bytes where memory is what counts."""

    value: float
    choice: Choice


def search(problem: Problem) -> Iterator[Offer]:
    """Finalists, best first; then improvements of the best for several numbers of ranks."""
    tables = StageTables(problem)
    best: list[tuple[tuple[float, ...], Choice]] = []
    seen: set[Choice] = set()
    if problem.objective != "memory":
        for finalist in _fastest(problem, tables):
            if _is_out(finalist, best):
                break
            yield from _offer(problem, finalist, best, seen)
    if not any(value[0] == 0 for value, _ in best):
        for finalist in _smallest(problem, tables):
            yield from _offer(problem, finalist, best, seen)
    ranked = sorted(best, key=lambda item: item[0])
    firsts = {choice.num_ranks: choice for _, choice in reversed(ranked)}
    size = max((2 * len(c.stages) * c.num_microbatches for _, c in ranked), default=1)
    most = len(seen) + min(STEPS, ACTIONS // size)
    for start in [choice for _, choice in ranked if choice in firsts.values()][:POLISHED]:
        yield from _polish(problem, start, seen, most)


def _is_out(finalist: Finalist, best: list[tuple[tuple[float, ...], Choice]]) -> bool:
    """Whether the finalist is too far behind a plan that fits."""
    fitting = [value[1] for value, _ in best if value[0] == 0]
    return bool(fitting) and finalist.value > CLOSE * min(fitting)


def _offer(
    problem: Problem,
    finalist: Finalist,
    best: list[tuple[tuple[float, ...], Choice]],
    seen: set[Choice],
) -> Iterator[Offer]:
    for choice in _starts(problem, finalist.choice):
        if choice not in seen:
            seen.add(choice)
            yield _judge(problem, choice, best)


def _starts(problem: Problem, choice: Choice) -> Iterator[Choice]:
    """The choice, or under the schedule that is pinned."""
    pin = pinned(problem.constraints, "schedule")
    if pin is None or pin == choice.schedule:
        yield choice
    else:
        yield from other_schedules(problem, choice)


def _judge(problem: Problem, choice: Choice, best: list[tuple[tuple[float, ...], Choice]]) -> Offer:
    plan = build_plan(problem, obey(problem, choice))
    if not broken(problem.constraints, plan, problem.graph):
        best.append((_value(problem, plan), choice))
    return Offer(plan=plan)


def _value(problem: Problem, plan: Plan) -> tuple[float, ...]:
    assert plan.predicted
    step, peak = plan.predicted.step_s, float(plan.predicted.peak_bytes)
    objective = (peak, step) if problem.objective == "memory" else (step, peak)
    return (float(excess_bytes(problem, plan)), *objective)


def _polish(problem: Problem, start: Choice, seen: set[Choice], most: int) -> Iterator[Offer]:
    """Moves to the best neighbour while that is better."""
    current = start
    held: list[tuple[tuple[float, ...], Choice]] = []
    _judge(problem, current, held)
    while held:
        value, current = min(held, key=lambda item: item[0])
        held = []
        for choice in neighbours(problem, current):
            if choice in seen:
                continue
            if len(seen) >= most:
                return
            seen.add(choice)
            yield _judge(problem, choice, held)
        held = [item for item in held if item[0] < value]


def _smallest(problem: Problem, tables: StageTables) -> list[Finalist]:
    """Choices that need least memory, for each frame."""
    found: list[Finalist] = []
    for asked, count in _frames(problem, tables):
        answer = solve(asked, memory, join=np.maximum)
        if answer:
            found.append(Finalist(answer[0], _choice(problem, asked, answer[1], count)))
    return sorted(found, key=lambda item: item.value)[:JUDGED]


def _fastest(problem: Problem, tables: StageTables) -> list[Finalist]:
    """Choices of least estimated time, for each frame that can be good at all."""
    best, found = float("inf"), []
    bound = lower_bound(problem)
    for asked, count in _frames(problem, tables):
        # Even perfectly equal stages wait for the pipeline to fill and drain.
        if bound * (count + asked.num_stages - 1) / count > WORSE * best:
            continue
        for value, parts in _candidates(problem, asked, count, WORSE * best):
            best = min(best, value)
            found.append(Finalist(value, _choice(problem, asked, parts, count)))
    return sorted(found, key=lambda item: item.value)[:JUDGED]


def _candidates(
    problem: Problem, asked: Pipeline, count: int, limit_s: float
) -> Iterator[tuple[float, tuple[Part, ...]]]:
    """(about the step time, stages) of the shortest paths under several limits of the load."""
    least = solve(asked, load, join=np.maximum)
    if least is None or least[0] > limit_s:
        return
    answers = {least[1]: None}
    for factor in LIMITS:
        answer = solve(asked, path_within(least[0] * factor), join=np.add)
        if answer:
            answers[answer[1]] = None
    for parts in answers:
        yield _step_s(problem, asked, parts, count), parts


def _step_s(problem: Problem, asked: Pipeline, parts: tuple[Part, ...], count: int) -> float:
    """About the step time of these stages."""
    path = most = work = 0.0
    for part in parts:
        options = asked.options(part.first_rank, part.option.mesh.size)
        at = (options.options.index(part.option), part.start, part.stop)
        path += float(options.path_s[at])
        most = max(most, float(options.load_s[at]))
        once = float(options.load_s[at] - (count - 1) * options.busy_s[at])
        work += (count * float(options.busy_s[at]) + once) * part.option.mesh.size
    return max(path + most, work / step_cores(problem.cluster))


def _frames(problem: Problem, tables: StageTables) -> Iterator[tuple[Pipeline, int]]:
    """(pipeline, micro-batches) of all numbers of ranks, groups of equal size first."""
    devices = problem.cluster.num_devices
    unit = _unit(problem)
    for ranks in pipeline_sizes(problem):
        uneven = tuple(range(unit, devices, unit)) if unit and ranks > 1 else ()
        even = (devices // ranks,) if devices % ranks == 0 else ()
        for sizes in filter(None, (even, uneven)):
            if len(sizes) * min(sizes) < devices and ranks * min(sizes) > devices:
                continue
            for count in microbatch_counts(problem):
                yield _pipeline(problem, tables, ranks, sizes, count), count


def _unit(problem: Problem) -> int:
    """Devices that are shared out together where groups may differ; 0 if they may not."""
    devices = problem.cluster.num_devices
    if devices <= UNITS:
        return 1
    sizes = {len(node.devices) for node in problem.cluster.nodes}
    mixed = len(set(problem.tables.device_names)) > 1 or pinned(problem.constraints, "pp")
    if len(sizes) == 1 and problem.cluster.num_nodes <= UNITS and mixed:
        return sizes.pop()
    return 0


def _pipeline(
    problem: Problem, tables: StageTables, ranks: int, sizes: tuple[int, ...], count: int
) -> Pipeline:
    devices = problem.cluster.num_devices
    rooms: dict[tuple[int, int], float] = {}

    def room(first: int, size: int) -> float:
        if (first, size) not in rooms:
            ranks = tuple(range(first, first + size))
            rooms[first, size] = float(problem.room_bytes(ranks))
        return rooms[first, size]

    return Pipeline(
        num_blocks=len(problem.graph.blocks),
        num_devices=devices,
        num_stages=ranks,
        sizes=sizes,
        options=lambda first, size: tables.options(first, size, count, first + size),
        in_flight=tuple(_in_flight(problem, ranks, count)),
        room_bytes=room,
        pins={b: s for b, s in problem.stage_of_block.items() if _one_stage(problem)},
    )


def _one_stage(problem: Problem) -> bool:
    pin = pinned(problem.constraints, "schedule")
    return pin is None or stages_per_rank(str(pin)) == (1,)


def _in_flight(problem: Problem, ranks: int, count: int) -> Iterator[int]:
    """Micro-batches that each stage holds under 1F1B, or under the pinned schedule."""
    pin = pinned(problem.constraints, "schedule")
    for stage in range(ranks):
        held = {"gpipe": count, "dapple_pb": 2 * (ranks - stage) - 1, "zero_bubble": ranks}
        yield min(count, held.get(str(pin), ranks - stage))


def _choice(problem: Problem, asked: Pipeline, parts: tuple[Part, ...], count: int) -> Choice:
    pin = pinned(problem.constraints, "schedule")
    keep = isinstance(pin, str) and stages_per_rank(pin) == (1,)
    return Choice(
        stages=tuple(_stage(problem, part) for part in parts),
        num_microbatches=count,
        schedule=str(pin) if keep else "one_f_one_b",
        num_ranks=asked.num_stages,
    )


def _stage(problem: Problem, part: Part) -> StageChoice:
    mesh = part.option.mesh
    blocks = problem.graph.blocks[part.start : part.stop]
    return StageChoice(
        start=part.start, stop=part.stop,
        devices=tuple(range(part.first_rank, part.first_rank + mesh.size)),
        dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, model=mesh.model,
        variant=mesh.variant, zero=mesh.zero,
        recompute=recomputable(problem.graph, blocks) if part.option.recompute else (),
    )  # fmt: skip
