"""What replicas that train alone hear of each other's steps: some steps later, so that one that is
late holds nobody up meanwhile."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from meshwright.forms.alone import LoneReplicas, lone_replicas
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.record.late import LateNumber
from meshwright.runtime.world.groups import Groups


class AskedOfAll(NamedTuple):
    """What all ranks sum of a batch."""

    step: int
    mark: int
    """Which this rank has put into the sum (`UserGroups.mark`)."""
    numbers: Tensor
    """The loss, and the sum of marks."""
    work: dist.Work


class HeardLoss(NamedTuple):
    """The mean of all replicas' losses of a batch, the same on every rank."""

    step: int
    loss: float


class LoneReplica:
    """This rank's replica, and what it has asked the others and not heard yet."""

    def __init__(self, replicas: LoneReplicas, rank: int, groups: Groups) -> None:
        self.number = replicas.of(rank)
        line = replicas.lines[self.number]
        self.is_first_rank = rank == line[0]
        self.group = groups.of(line)
        """Of the replica's ranks; None where it is one."""
        self.share = replicas.shares[self.number] / sum(replicas.shares)
        """Of the samples of a batch."""
        self.lag = replicas.lag
        self._under_way: deque[AskedOfAll] = deque()
        self._come: deque[tuple[int, LateNumber]] = deque()
        """Losses that have come and that the host has not read."""

    @classmethod
    def of(cls, plan: Plan, rank: int, groups: Groups) -> "LoneReplica | None":
        """The replica of a rank; None where replicas of the plan meet in each step."""
        found = lone_replicas(plan)
        return None if found is None else cls(found, rank, groups)

    def ask(self, step: int, mark: int, numbers: Tensor) -> None:
        """Starts to sum the loss of a batch, and marks, over all ranks."""
        work = dist.all_reduce(numbers, async_op=True)
        assert work is not None
        self._under_way.append(AskedOfAll(step, mark, numbers, work))

    def due(self, step: int | None) -> Iterator[AskedOfAll]:
        """Waits for what a rank has to have heard before it ends a step, and yields it; None: for
        all. All ranks have asked as much."""
        while self._under_way:
            first = self._under_way[0]
            if step is not None and first.step + self.lag > step:
                return
            self._under_way.popleft()
            first.work.wait()
            self._come.append((first.step, LateNumber(first.numbers[0])))
            yield first

    def heard(self, *, all_of_them: bool) -> Iterator[HeardLoss]:
        """Yields, once, the losses that have come; on a device that the host does not wait for all
        but the newest, unless `all_of_them`."""
        while self._come and (all_of_them or len(self._come) > int(self._come[-1][1].is_late)):
            step, loss = self._come.popleft()
            yield HeardLoss(step, float(loss))

    def forget(self) -> None:
        """The job stops: nothing is to be under way, and nobody asks what came of it."""
        for _ in self.due(None):
            pass
        self._come.clear()

    def own_loss(self, local: Tensor) -> Tensor:
        """The mean over the replica's own samples, on all of its ranks; `local`: this rank's part
        of the sum over the batch."""
        if self.group is not None:
            dist.all_reduce(local, group=self.group)
        return local / self.share


def largest(found: Tensor, world_size: int, replica: LoneReplica | None) -> Tensor:
    """The largest of a number of all ranks that decide together, on the device: those of a lone
    replica, or of the job."""
    if replica is None:
        if world_size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
    elif replica.group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=replica.group)
    return found
