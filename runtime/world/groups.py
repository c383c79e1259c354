"""Process groups that a plan needs, made in the same order on every rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch.distributed as dist

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan, Stage

Line = tuple[int, ...]
"""Global ranks that differ in one axis only, in order of their coordinate."""


def stage_lines(stage: Stage) -> dict[str, tuple[Line, ...]]:
    """Axis -> its lines, in the order of the first rank of each."""
    data = {axis: stage.mesh.get(axis, 1) for axis in ("dp_replicate", "dp_shard")}
    sizes = data | dict(stage.model)
    both = {"dp": prod(data.values())} | dict(stage.model)
    found = {axis: _along(stage, sizes, axis) for axis in sizes}
    return found | {"dp": _along(stage, both, "dp")}


def _along(stage: Stage, sizes: dict[str, int], axis: str) -> tuple[Line, ...]:
    """The lines of an axis of a row-major mesh."""
    names = list(sizes)
    stride = prod(sizes[name] for name in names[names.index(axis) + 1 :])
    starts = [i for i in range(len(stage.devices)) if i // stride % sizes[axis] == 0]
    return tuple(
        tuple(stage.devices[start + i * stride] for i in range(sizes[axis])) for start in starts
    )


@dataclass(frozen=True, eq=False)
class Groups:
    """The process groups of this rank. A line of one rank has no group."""

    by_ranks: dict[Line, dist.ProcessGroup]
    upward: dist.ProcessGroup | None
    """Messages from a lower to a higher rank. With one group per direction, what two ranks send
    each other never has to be ordered against what they receive (NCCL runs each pair in order)."""
    downward: dist.ProcessGroup | None

    def line(self, stage: Stage, axis: str, rank: int) -> dist.ProcessGroup | None:
        """The group of `rank` along an axis of its stage."""
        line = next(line for line in stage_lines(stage)[axis] if rank in line)
        return self.by_ranks[line] if len(line) > 1 else None

    def between(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group of messages from one rank to another."""
        return self.upward if source < target else self.downward

    def close(self) -> None:
        """Every rank calls it when nothing is under way."""
        for group in (*self.by_ranks.values(), self.upward, self.downward):
            if group is not None:
                dist.destroy_process_group(group)

    def of(self, ranks: Line) -> dist.ProcessGroup | None:
        return self.by_ranks[ranks] if len(ranks) > 1 else None


def make_groups(plan: Plan, rank: int, more: tuple[Line, ...] = ()) -> Groups:
    """Every rank calls this at the same time. `more` are further rank sets, equal on all ranks."""
    wanted = dict.fromkeys([*_plan_lines(plan), *(tuple(sorted(line)) for line in more)])
    by_ranks = {}
    for line in wanted:
        if len(line) > 1:
            group = dist.new_group(list(line))
            if rank in line:
                by_ranks[line] = group
    if plan.world_size == 1 or len(plan.stages) == 1:
        return Groups(by_ranks, None, None)
    return Groups(by_ranks, dist.new_group(), dist.new_group())


def _plan_lines(plan: Plan) -> Iterator[Line]:
    for index, stage in enumerate(plan.stages):
        for axis, lines in stage_lines(stage).items():
            for line in lines:
                if line != tuple(sorted(line)):
                    raise PlanError(
                        f"stage {index}: the devices {line} along {axis} are not in ascending "
                        f"order; list them as {tuple(sorted(line))}"
                    )
                yield line
