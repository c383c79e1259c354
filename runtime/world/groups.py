"""The process groups that a rank needs, each made by its members alone.

All ranks make theirs in one order, so that no two wait for each other in a circle. A group is of
the one backend that its device needs, and pipeline ranks that are neighbours have a group of two
for each direction: what they send each other never has to be ordered against what they receive
(NCCL runs each communicator in order), and nobody is connected to ranks that it has nothing to say
to.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from math import prod

import torch
import torch.distributed as dist

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.torch_private import member_group
from meshwright.runtime.world.world import backends

Line = tuple[int, ...]
"""Global ranks that differ in one axis only, in order of their coordinate."""
Pair = tuple[int, int]
"""Source and target of messages."""

_made = count()
"""Sets of groups made in this process: as many on every rank of a job."""


def stage_lines(stage: Stage) -> dict[str, tuple[Line, ...]]:
    """Axis -> its lines, in the order of the first rank of each."""
    sizes, both = _meshes(stage)
    found = {axis: _along(stage, sizes, axis) for axis in sizes}
    return found | {"dp": _along(stage, both, "dp")}


def line_of(stage: Stage, axis: str, rank: int) -> Line:
    """The line of an axis that goes through a rank of the stage."""
    sizes, both = _meshes(stage)
    stride = _stride(both if axis == "dp" else sizes, axis)
    size = both[axis] if axis == "dp" else sizes[axis]
    at = stage.devices.index(rank)
    first = at - at // stride % size * stride
    return tuple(stage.devices[first + i * stride] for i in range(size))


def _meshes(stage: Stage) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes of the axes, row-major, with data parallelism as two axes and as one."""
    data = {axis: stage.mesh.get(axis, 1) for axis in ("dp_replicate", "dp_shard")}
    return data | dict(stage.model), {"dp": prod(data.values())} | dict(stage.model)


def _stride(sizes: dict[str, int], axis: str) -> int:
    names = list(sizes)
    return prod(sizes[name] for name in names[names.index(axis) + 1 :])


def _along(stage: Stage, sizes: dict[str, int], axis: str) -> tuple[Line, ...]:
    """The lines of an axis of a row-major mesh."""
    stride = _stride(sizes, axis)
    starts = [i for i in range(len(stage.devices)) if i // stride % sizes[axis] == 0]
    return tuple(
        tuple(stage.devices[start + i * stride] for i in range(sizes[axis])) for start in starts
    )


@dataclass(frozen=True, eq=False)
class Groups:
    """The process groups of this rank. A line of one rank has no group."""

    by_ranks: dict[Line, dist.ProcessGroup]
    by_pair: dict[Pair, dist.ProcessGroup]

    def line(self, stage: Stage, axis: str, rank: int) -> dist.ProcessGroup | None:
        """The group of `rank` along an axis of its stage."""
        return self.of(line_of(stage, axis, rank))

    def between(self, source: int, target: int) -> dist.ProcessGroup:
        """The group of messages from one rank to another."""
        return self.by_pair[source, target]

    def close(self) -> None:
        """Every rank calls it when nothing is under way."""
        for group in (*self.by_ranks.values(), *self.by_pair.values()):
            dist.destroy_process_group(group)

    def of(self, ranks: Line) -> dist.ProcessGroup | None:
        return self.by_ranks[ranks] if len(ranks) > 1 else None


def in_order(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """Pairs of two ranks each in the one order of the whole job: by the lower rank, the higher
    one, upward first. Who meets in an order that all share cannot wait in a circle."""
    found = {(source, target) for source, target in pairs if source != target}
    return tuple(sorted(found, key=lambda pair: (min(pair), max(pair), pair[0] > pair[1])))


def plan_lines(plan: Plan, more: Iterable[Line] = ()) -> tuple[Line, ...]:
    """All lines of a plan that need a group, each once, in the one order of the whole job. `more`
    are further rank sets; PlanError if a line is not in ascending order."""
    wanted = dict.fromkeys([*_lines(plan), *(tuple(sorted(line)) for line in more)])
    return tuple(line for line in wanted if len(line) > 1)


def make_groups(
    plan: Plan, rank: int, device: torch.device, pairs: Iterable[Pair], more: Iterable[Line] = ()
) -> Groups:
    """Makes the groups of `rank`; every rank of the job calls it as often. `pairs` are all that the
    rank has messages with; `more` are further rank sets, equal on all ranks."""
    number, backend = next(_made), backends().get(device.type, "")

    def made(kind: str, ranks: Line) -> dist.ProcessGroup:
        which = sha256(repr(ranks).encode()).hexdigest()[:16]
        return member_group(sorted(ranks), backend, f"meshwright-{number}-{kind}-{which}")

    return Groups(
        {line: made("line", line) for line in plan_lines(plan, more) if rank in line},
        {pair: made("pair", pair) for pair in in_order(pairs)},
    )


def _lines(plan: Plan) -> Iterator[Line]:
    for index, stage in enumerate(plan.stages):
        for axis, lines in stage_lines(stage).items():
            for line in lines:
                if line != tuple(sorted(line)):
                    raise PlanError(
                        f"stage {index}: the devices {line} along {axis} are not in ascending "
                        f"order; list them as {tuple(sorted(line))}"
                    )
                yield line
