"""Memory of stages on devices of several types: each replica against the device that it is on."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.memory.rank_memory import rank_memories
from meshwright.costmodel.simulate.compiled_schedule import table_of
from meshwright.costmodel.stage.placement import StageCosts, silent_borders, stage_costs
from meshwright.costmodel.stage.stage_model import stage_model
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.predicted import RankMemory
from meshwright.planner.problem.problem import Problem


def is_mixed(problem: Problem, stage: Stage) -> bool:
    """Whether the stage is on devices of several types."""
    return len(problem.tables.cluster.types_of(stage.devices)) > 1


def tightest(problem: Problem, plan: Plan) -> tuple[tuple[RankMemory, int], ...]:
    """Per stage: memory of the rank with least to spare, and by how much it exceeds its room.

    The excess is negative where there is room.
    """
    indices = range(len(plan.stages))
    slowest = [stage_costs(problem.tables, plan, i) for i in indices]
    owners = table_of(problem.tables.schedule(plan.schedule)).owners
    found: list[tuple[RankMemory, int] | None] = [None for _ in indices]
    for rank in sorted(set(owners)):
        own = [i for i in indices if owners[i] == rank]
        worst = max(_judged(problem, plan, slowest, rank, own), key=lambda pair: pair[1])
        for i in own:
            found[i] = worst
    return tuple(pair for pair in found if pair is not None)


def _judged(
    problem: Problem, plan: Plan, slowest: Sequence[StageCosts], rank: int, own: Sequence[int]
) -> Iterator[tuple[RankMemory, int]]:
    """Of each replica and device type of a pipeline rank."""
    table = table_of(problem.tables.schedule(plan.schedule), silent_borders(slowest))
    for at in _situations(problem, [plan.stages[i] for i in own]):
        costs = list(slowest)
        for i, (samples, device) in zip(own, at, strict=True):
            costs[i] = _costs_at(problem, plan, i, slowest[i], samples, device)
        models = [stage_model(problem.tables, plan, i, c) for i, c in enumerate(costs)]
        memory = rank_memories(problem.tables, plan, table, costs, models)[rank]
        ranks = [r for r in plan.stages[own[0]].devices
                 if problem.tables.device_names[r] == at[0][1]]  # fmt: skip
        yield memory, memory.used_bytes - problem.room_bytes((ranks[0],))


def _situations(
    problem: Problem, stages: Sequence[Stage]
) -> dict[tuple[tuple[int, str], ...], None]:
    """(samples, device type) per stage, of each rank, without repeats."""
    names = problem.tables.device_names
    return dict.fromkeys(
        tuple((stage.batch_shares[stage.coordinates(rank)["dp"]], names[rank]) for stage in stages)
        for rank in stages[0].devices
    )


def _costs_at(
    problem: Problem, plan: Plan, index: int, costs: StageCosts, samples: int, device: str
) -> StageCosts:
    """The same stage on another of its replicas."""
    spot: BlockSpot = replace(costs.spot, samples=samples, device=device)
    layouts = {pattern: plan.layout(name) for pattern, name in plan.stages[index].layouts.items()}
    return replace(
        costs,
        cost=problem.tables.stage(costs.blocks, layouts, costs.modes, spot),
        spot=spot,
        device=problem.tables.devices[device],
    )
