"""What one stage keeps on a rank, and by how much that rises within an action, by category.

It follows `runtime.stage` and `runtime.gradsync`: a block's graph goes with its backward, gradients
begin with the first backward of a step unless they live in flat buckets, ZeRO packs them in flat
tensors that live until they are reduced, and level 3 has one block's parameters whole at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import NamedTuple

from meshwright.costmodel.sync import Bucket


class Bytes(NamedTuple):
    """Bytes that come and go within a step."""

    gradients: int = 0
    activations: int = 0
    communication: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.communication + self.workspace

    def plus(self, other: "Bytes") -> "Bytes":
        return Bytes(
            self.gradients + other.gradients,
            self.activations + other.activations,
            self.communication + other.communication,
            self.workspace + other.workspace,
        )


NOTHING = Bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """One block on a rank."""

    saved: int
    """Of one micro-batch, freed by the block's backward."""
    forward: int
    """Most at once in forward beside what earlier blocks saved; at least `saved`."""
    workspace: int
    """Most at once in backward beside what is saved."""
    parameters: int
    """Whole, as level 3 gathers them."""
    gradients: int
    """Whole, of the parameters that this block is the last to add to."""
    largest: int
    """Largest gradient of one parameter."""
    halved: int = 0
    """Kept from the first to the second half of a split backward."""

    @property
    def adding(self) -> int:
        """`workspace` where gradients are added to those that are there. The op that makes the
        largest gradient is taken to have half of the most that any op of the block has."""
        return max(self.workspace, self.workspace // 2 + self.largest)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One stage on a rank. What has been worked out is kept."""

    zero: int
    shard: int
    reduces: bool
    """Gradients are summed over data parallel ranks."""
    prefetch: int
    parameters: int
    optimizer: int
    temporary: int
    """Of the optimizer's step."""
    border: int
    entry: int
    blocks: tuple[BlockMemory, ...]
    buckets: tuple[Bucket, ...]
    _backwards: dict[tuple[bool, bool], Bytes] = field(default_factory=dict, repr=False)

    @cached_property
    def trained(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def part(self) -> int:
        """Of the trained bytes, this rank's."""
        return ceil(self.trained / self.shard)

    @cached_property
    def always(self) -> Bytes:
        """From one end of a step to the other."""
        flat = self.trained if self.zero == 0 and self.reduces else 0
        # A message each way that is under way, and one that is asked for ahead.
        return Bytes(gradients=flat, communication=2 * (self.border + self.entry))

    @cached_property
    def saved(self) -> int:
        """Per micro-batch in flight. What is sent is kept until its gradient is back."""
        return sum(block.saved for block in self.blocks) + self.border

    @cached_property
    def halved(self) -> int:
        """Per micro-batch between the halves of its backward."""
        return sum(block.halved for block in self.blocks)

    @cached_property
    def begun(self) -> Bytes:
        """From the end of the first backward of a step to that of the last."""
        if self.zero >= 2:
            return Bytes(gradients=self.part)
        return Bytes(gradients=self.trained if self.zero or not self.reduces else 0)

    @cached_property
    def forward(self) -> Bytes:
        """Most within a forward, beside what is in flight before it."""
        return max(self._forward(), key=lambda b: b.total, default=NOTHING)

    def backward(self, *, first: bool, last: bool) -> Bytes:
        """Most within a backward, beside what is in flight (itself included) and `begun`."""
        found = self._backwards.get((first, last))
        if found is None:
            rises = self._backward(first, last)
            found = max(rises, key=lambda b: b.total, default=NOTHING)
            self._backwards[first, last] = found
        return found

    @cached_property
    def end(self) -> Bytes:
        """Most between the last backward and the next step, `always` left out."""
        own = self.begun.gradients
        if not self.zero:
            return Bytes(gradients=own, workspace=self.temporary)
        largest = max((b.nbytes for b in self.buckets), default=0)
        moving = 2 * largest if self.zero == 3 else largest + ceil(largest / self.shard)
        if self.zero == 1:  # the flat tensors live until all have been reduced
            moving = self.trained
        return Bytes(gradients=self.part, communication=max(moving, self.temporary))

    @cached_property
    def unseen(self) -> int:
        """What Gloo allocates for itself: a reduce-scatter works on a copy of the whole, which
        lives as long as the flat tensor; an all-gather gathers into one."""
        if not self.zero:
            return 0
        largest = max((b.nbytes for b in self.buckets), default=0)
        return self.trained if self.zero == 1 else 2 * largest

    def _forward(self) -> Iterator[Bytes]:
        saved = 0
        for index, block in enumerate(self.blocks):
            if self.zero == 3:
                # While it is unpacked, the flat tensor is there beside the parameters.
                yield Bytes(activations=saved, communication=2 * block.parameters)
            workspace = block.forward - block.saved
            saved += block.saved
            yield Bytes(0, saved, self._whole(index), workspace)

    def _whole(self, index: int, step: int = 1) -> int:
        """Parameters that level 3 has gathered while a block runs: its own, and those ahead."""
        if self.zero < 3:
            return 0
        ahead = [index + step * n for n in range(self.prefetch + 1)]
        return sum(self.blocks[i].parameters for i in ahead if 0 <= i < len(self.blocks))

    def _backward(self, first: bool, last: bool) -> Iterator[Bytes]:
        if self.zero >= 2:
            yield from self._scattered()
            return
        freed = made = flat = 0
        owners = {bucket.owner: bucket.nbytes for bucket in self.buckets}
        for index in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[index]
            if first and not (self.reduces and self.zero == 0):
                made += block.gradients
                workspace = block.workspace
            else:
                workspace = block.adding
            yield Bytes(made - flat, -freed, flat, workspace)
            freed += block.saved
            if last and self.zero == 1 and index in owners:
                part = ceil(owners[index] / self.shard)
                yield Bytes(made - flat + part, -freed, flat + owners[index], 0)
                flat += owners[index]

    def _scattered(self) -> Iterator[Bytes]:
        """Levels 2 and 3: whole gradients live until their bucket is packed, two buckets at most
        are on their way."""
        freed = whole = 0
        moving: Sequence[int] = ()
        owners = {bucket.owner: bucket.nbytes for bucket in self.buckets}
        for index in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[index]
            whole += block.gradients
            gathered = self._whole(index, -1)
            if self.zero == 3:
                yield Bytes(0, -freed, 2 * block.parameters + sum(moving), 0)
            yield Bytes(whole, -freed, gathered + sum(moving), block.workspace)
            freed += block.saved
            if index in owners:
                n = owners[index]
                moving = (*moving[-1:], n + ceil(n / self.shard))
                yield Bytes(whole, -freed, sum(moving), 0)
                whole = 0
