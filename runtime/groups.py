"""Process groups that a plan needs, made in the same order on every rank."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from meshwright.ir.errors import PlanError
from meshwright.ir.plan import Plan, Stage

Line = tuple[int, ...]
"""Global ranks that differ in one axis only, in order of their coordinate."""


def stage_lines(stage: Stage) -> dict[str, tuple[Line, ...]]:
    """Axis -> its lines. `dp_line` order is that of the first rank of each line."""
    tp, shard = stage.tp, stage.mesh.get("dp_shard", 1)
    replicate = stage.mesh.get("dp_replicate", 1)
    device = {
        (r, s, t): stage.devices[(r * shard + s) * tp + t]
        for r in range(replicate)
        for s in range(shard)
        for t in range(tp)
    }
    return {
        "dp": tuple(
            tuple(device[r, s, t] for r in range(replicate) for s in range(shard))
            for t in range(tp)
        ),
        "tp": tuple(
            tuple(device[r, s, t] for t in range(tp))
            for r in range(replicate)
            for s in range(shard)
        ),
        "dp_shard": tuple(
            tuple(device[r, s, t] for s in range(shard))
            for r in range(replicate)
            for t in range(tp)
        ),
        "dp_replicate": tuple(
            tuple(device[r, s, t] for r in range(replicate))
            for s in range(shard)
            for t in range(tp)
        ),
    }


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
