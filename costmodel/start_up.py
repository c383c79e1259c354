"""What it takes for the ranks of a plan to meet: groups, sockets, operations of the store, time.

Counted for every rank, of a plan alone. That a job makes these groups and no others is tested on
CPUs, where sockets and groups of processes are counted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.ir.comm.by_store import OPERATIONS_PER_RANK
from meshwright.ir.comm.opening import OTHER_FILES, STORE_OPERATION_S, Opening, opening_on
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.lines import Line, Pair, border_pairs, plan_lines
from meshwright.ir.plan.plan import Plan

EXCHANGES = 4
"""In which all ranks tell each other something before the first step: the plan, where each rank
computes, what must be equal, and who has which tensor."""


@dataclass(frozen=True, slots=True)
class StartUp:
    """Of all ranks of a plan, before the first step; of a rank it is the one that has most."""

    world_size: int
    groups: int
    """Of the whole job, that of all ranks among them."""
    rank_groups: int
    """That a rank is in."""
    sockets: int
    """That a rank's process has."""
    busiest_rank: int
    """Whose sockets these are."""
    store_sockets: int
    """Of the process that has the job's store: torchrun's on the first node, or rank 0's."""
    store_operations: int
    seconds: float
    """Until a rank has opened its groups, one after the other, and the store has answered all."""

    def findings(self, limit: int) -> Iterator[Finding]:
        """What does not fit where a process may have `limit` files open at most."""
        needed = self.sockets + OTHER_FILES
        if needed > limit:
            yield Finding(
                "open files",
                f"rank {self.busiest_rank} has {self.sockets} sockets and about {OTHER_FILES} "
                f"other files open, of at most {limit} (ulimit -n)",
                f"ulimit -n {needed}, or a plan for GPUs, where NCCL connects neighbours only",
            )
        if self.store_sockets + OTHER_FILES > limit:
            yield Finding(
                "open files of the store",
                f"the process with the job's store (torchrun's on the first node) has "
                f"{self.store_sockets} sockets, of at most {limit} files (ulimit -n)",
                f"ulimit -n {self.store_sockets + OTHER_FILES} where it is started",
                "warning",
            )


def start_up(plan: Plan, pairs: Iterable[Pair] | None = None, more: Iterable[Line] = ()) -> StartUp:
    """Counts what the ranks of a plan open. `pairs`: all that have messages (default: as if what
    crosses borders were samples); `more`: rank sets that share a parameter."""
    backend, world = opening_on(plan.cluster.device_kind or "cuda"), plan.world_size
    if world == 1:
        return StartUp(1, 0, 0, 0, 0, 0, 0, 0.0)
    lines: list[tuple[Line, Opening]] = [
        (line, backend.group(len(line))) for line in (tuple(range(world)), *plan_lines(plan, more))
    ]
    of_pair = backend.pair()
    lines += ((pair, of_pair) for pair in (border_pairs(plan) if pairs is None else pairs))
    groups, sockets = Counter[int](), Counter[int]()
    seconds: defaultdict[int, float] = defaultdict(float)
    for ranks, opening in lines:
        for rank in ranks:
            groups[rank] += 1
            sockets[rank] += opening.sockets
            seconds[rank] += opening.seconds
    busiest = max(sockets, key=sockets.__getitem__)
    operations = sum(opening.store_operations for _, opening in lines)
    operations += EXCHANGES * OPERATIONS_PER_RANK * world
    return StartUp(
        world_size=world,
        groups=len(lines),
        rank_groups=max(groups.values()),
        sockets=sockets[busiest] + backend.store_sockets,
        busiest_rank=busiest,
        store_sockets=1 + world * backend.store_sockets,
        store_operations=operations,
        seconds=max(seconds.values()) + operations * STORE_OPERATION_S,
    )
