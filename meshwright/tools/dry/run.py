"""`dry_run(plan, graph)`: every rank once, and what came of it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.costmodel.start_up import StartUp, start_up
from meshwright.forms.alone import replica_lines
from meshwright.forms.folding import folded_lines
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.measured import TensorMemory
from meshwright.ir.text.units import size
from meshwright.ir.torch_errors import DATA_DEPENDENT, operator_of
from meshwright.runtime.step.tied import find_ties
from meshwright.runtime.world.open_files import most_open
from meshwright.tools.dry.classes import RankClass, rank_classes
from meshwright.tools.dry.shorten import shortened
from meshwright.tools.dry.step import step_rank
from meshwright.tools.dry.transfers import (
    check_order,
    check_transfers,
    count_transfers,
    pairs_of_all,
)

MEMORY_BAND = 0.15
"""Relative difference of counted and predicted bytes from which there is a warning."""


@dataclass(frozen=True, slots=True)
class DryRank:
    """What ranks of one kind hold in a step."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    memory: TensorMemory
    predicted_bytes: int | None
    """Of the worst rank of the stage's devices; None without a prediction."""

    @property
    def error(self) -> float | None:
        """Predicted over counted, minus one."""
        if not self.predicted_bytes or not self.memory.peak_bytes:
            return None
        return self.predicted_bytes / self.memory.peak_bytes - 1


@dataclass(frozen=True, slots=True)
class DryRun:
    """A step of all ranks that nobody took."""

    ranks: tuple[DryRank, ...]
    transfers: int
    """Pieces that go from one rank to another, per micro-batch."""
    seconds: float
    start: StartUp
    findings: tuple[Finding, ...]

    @property
    def world_size(self) -> int:
        return sum(len(rank.ranks) for rank in self.ranks)


def dry_run(plan: Plan, graph: Graph) -> DryRun:
    """Builds and steps all ranks of a legal plan in this process, equal ones once."""
    begun = time.monotonic()
    # On fake tensors there is nothing to compile for.
    stages = tuple(replace(stage, compile=False) for stage in plan.stages)
    plan = replace(plan, stages=stages)
    classes = rank_classes(plan, graph)
    short = shortened(plan)
    findings = [*check_transfers(plan, classes), *check_order(short, classes)]
    found = []
    for group in classes if not findings else ():
        try:
            memory = step_rank(plan, short, graph, group)
        except DATA_DEPENDENT as error:
            findings.append(_data_dependent(group, operator_of(error)))
            break
        found.append(DryRank(group.ranks, group.stages, memory, _predicted(plan, group)))
    findings += _memory(found)
    ties = tuple(line for tie in find_ties(graph, plan) for line in tie.groups)
    lines = (*ties, *folded_lines(plan, graph), *replica_lines(plan))
    start = start_up(plan, pairs_of_all(plan, classes), lines)
    findings += start.findings(most_open())
    seconds = time.monotonic() - begun
    return DryRun(tuple(found), count_transfers(plan, classes), seconds, start, tuple(findings))


def _predicted(plan: Plan, group: RankClass) -> int | None:
    if plan.predicted is None:
        return None
    stages = [plan.predicted.stages[index].memory for index in group.stages]
    return max(memory.tensor_bytes for memory in stages)


def _data_dependent(group: RankClass, operator: str) -> Finding:
    message = (
        f"rank {group.rank}: the values of tensors decide what {operator} gives, and in a dry run "
        "there are none"
    )
    return Finding("dry run", message, "a short real run", "warning")


def _memory(ranks: list[DryRank]) -> Iterator[Finding]:
    """The worst rank of each pipeline rank against what was predicted for it."""
    worst: dict[tuple[int, ...], DryRank] = {}
    for rank in ranks:
        held = worst.get(rank.stages)
        if held is None or rank.memory.peak_bytes > held.memory.peak_bytes:
            worst[rank.stages] = rank
    for rank in worst.values():
        if rank.error is not None and abs(rank.error) > MEMORY_BAND:
            assert rank.predicted_bytes is not None
            message = (
                f"rank {rank.ranks[0]} holds {size(rank.memory.peak_bytes)} of tensors, predicted "
                f"{size(rank.predicted_bytes)} ({rank.error:+.0%})"
            )
            yield Finding("dry run memory", message, size(rank.memory.peak_bytes), "warning")
