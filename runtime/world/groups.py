"""The process groups that a rank needs, each made by its members alone.

All ranks make theirs in one order, so that no two wait for each other in a circle. A group is of
the one backend that its device needs, and pipeline ranks that are neighbours have a group of two
for each direction: what they send each other never has to be ordered against what they receive
(NCCL runs each communicator in order), and nobody is connected to ranks that it has nothing to say
to.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import count

import torch
import torch.distributed as dist

from meshwright.ir.comm.opening import opening_on
from meshwright.ir.plan.lines import Line, Pair, in_order, line_of, plan_lines
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.torch_private import member_group
from meshwright.runtime.world.open_files import make_room
from meshwright.runtime.world.world import backends

_made = count()
"""Sets of groups made in this process: as many on every rank of a job."""


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


def make_groups(
    plan: Plan, rank: int, device: torch.device, pairs: Iterable[Pair], more: Iterable[Line] = ()
) -> Groups:
    """Makes the groups of `rank`; every rank of the job calls it as often. `pairs` are all that the
    rank has messages with; `more` are further rank sets, equal on all ranks."""
    number, backend = next(_made), backends().get(device.type, "")
    lines = [line for line in plan_lines(plan, more) if rank in line]
    opening, own = opening_on(device.type), in_order(pairs)
    make_room(
        opening.group(plan.world_size).sockets + len(own) * opening.pair().sockets
        + sum(opening.group(len(line)).sockets for line in lines) + opening.store_sockets
    )  # fmt: skip

    def made(kind: str, ranks: Line) -> dist.ProcessGroup:
        which = sha256(repr(ranks).encode()).hexdigest()[:16]
        return member_group(sorted(ranks), backend, f"meshwright-{number}-{kind}-{which}")

    return Groups(
        {line: made("line", line) for line in lines}, {pair: made("pair", pair) for pair in own}
    )
