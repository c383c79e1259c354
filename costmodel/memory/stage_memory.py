"""What one stage keeps on a rank, and by how much that rises within an action, by category.

It follows `runtime.stage.stage`: a block's graph goes with its backward. Gradients and parameters
live as the stage's exchange says: from the first backward of a step or always, whole until they are
packed in flat tensors that live until they have arrived, gathered while a block runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple, Protocol

from meshwright.costmodel.stage.buckets import Bucket
from meshwright.forms.exchange import Exchange


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
_Rise = tuple[int, int, int, int]
"""The same where there are many."""


class Holding(Protocol):
    """What a stage holds over a step, as far as the course of it goes."""

    @property
    def always(self) -> Bytes: ...
    @property
    def saved(self) -> int: ...
    @property
    def halved(self) -> int: ...
    @property
    def begun(self) -> Bytes: ...
    @property
    def forward(self) -> Bytes: ...
    @property
    def halving(self) -> Bytes: ...
    @property
    def kept_saved(self) -> int: ...
    @property
    def keeping(self) -> Bytes: ...
    @property
    def remaking(self) -> Bytes: ...
    @property
    def kept_halving(self) -> Bytes: ...
    def backward(self, *, first: bool, last: bool, held: bool = False) -> Bytes: ...


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
    """Whole, as they are gathered."""
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
        more = self.workspace // 2 + self.largest
        return more if more > self.workspace else self.workspace


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One stage on a rank. What has been worked out is kept."""

    exchange: Exchange
    shard: int
    prefetch: int
    receives: bool = False
    """A rank receives the others' parts of a flat tensor before it adds them up
    (`ir.comm.p2p_collectives`, on Gloo); NCCL needs nothing beside."""
    parameters: int
    optimizer: int
    temporary: int
    """Of the optimizer's step."""
    summed: int = 0
    """Flat copy of the gradients that are summed over a model axis."""
    border: int
    entry: int
    blocks: tuple[BlockMemory, ...]
    buckets: tuple[Bucket, ...]
    kept: "StageMemory | None" = None
    """The same stage where it keeps all; None if it always does, or nothing asks for that."""
    _backwards: dict[tuple[bool, bool], Bytes] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def trained(self) -> int:
        return sum([bucket.nbytes for bucket in self.buckets])

    @property
    def part(self) -> int:
        """Of the trained bytes, this rank's."""
        return ceil(self.trained / self.shard)

    @cached_property
    def always(self) -> Bytes:
        """From one end of a step to the other."""
        flat = self.trained if self.exchange.sums_into_zeros else 0
        wholes, parts = self.exchange.under_way
        late = ceil(wholes * self.trained + parts * self.part)
        # A message each way that is under way, and one that is asked for ahead.
        return Bytes(
            gradients=flat + self._of_trained(self.exchange.kept),
            communication=2 * (self.border + self.entry) + late,
        )

    @cached_property
    def saved(self) -> int:
        """Per micro-batch in flight. What is sent is kept until its gradient is back."""
        return sum([block.saved for block in self.blocks]) + self.border

    @cached_property
    def halved(self) -> int:
        """Per micro-batch between the halves of its backward."""
        return sum([block.halved for block in self.blocks])

    @cached_property
    def begun(self) -> Bytes:
        """From the end of the first backward of a step to that of the last."""
        return Bytes(gradients=self._of_trained(self.exchange.begun))

    @cached_property
    def forward(self) -> Bytes:
        """Most within a forward, beside what is in flight before it."""
        return _most(self._forward())

    @cached_property
    def halving(self) -> Bytes:
        """Most within the first half of a backward, beside the same."""
        return Bytes(workspace=max([b.workspace for b in self.blocks], default=0))

    @property
    def kept_saved(self) -> int:
        """Per micro-batch in flight of which all is there."""
        return (self.kept or self).saved

    @property
    def keeping(self) -> Bytes:
        """Most within a forward that keeps all, beside what is in flight before it."""
        return (self.kept or self).forward

    @cached_property
    def remaking(self) -> Bytes:
        """Most while what a forward did not keep is made again, beside other micro-batches."""
        return _most(self._remaking())

    @property
    def kept_halving(self) -> Bytes:
        return (self.kept or self).halving

    def backward(self, *, first: bool, last: bool, held: bool = False) -> Bytes:
        """Most within a backward, beside what is in flight (itself included) and `begun`. `held`:
        all that it needs is there."""
        if held and self.kept is not None:
            return self.kept.backward(first=first, last=last)
        found = self._backwards.get((first, last))
        if found is None:
            every = self.exchange.every_backward
            found = _most(self._scattered() if every else self._backward(first, last))
            self._backwards[first, last] = found
        return found

    @cached_property
    def end(self) -> Bytes:
        """Most between the last backward and the next step, `always` left out."""
        own = self._of_trained(self.exchange.left)
        wholes, parts = self.exchange.moving_at_end
        if not wholes + parts:
            return Bytes(gradients=own, communication=self.summed,
                         workspace=max(0, self.temporary - self.summed))  # fmt: skip
        largest = max([b.nbytes for b in self.buckets], default=0)
        moving = wholes * largest + parts * self._part(largest)
        return Bytes(gradients=own, communication=max(moving, self.temporary, self.summed))

    def _of_trained(self, shares: tuple[int, int]) -> int:
        """Bytes of so many wholes and parts of all trained parameters."""
        wholes, parts = shares
        return wholes * self.trained + parts * self.part

    def _part(self, nbytes: int) -> int:
        """This rank's of a bucket."""
        return ceil(nbytes / self.shard)

    def _scattering(self, nbytes: int) -> int:
        """A bucket on its way: its flat tensor, which lives until somebody waits for it, and what
        this rank gets."""
        return nbytes + (nbytes if self.receives else self._part(nbytes))

    def _forward(self) -> list[_Rise]:
        found, saved, ahead = [], 0, self._gathered(1)
        for index, block in enumerate(self.blocks):
            whole = self._late
            if ahead:
                # While it is unpacked, the flat tensor is there beside the parameters.
                found.append((0, saved, 2 * block.parameters, 0))
                whole = ahead[index]
            workspace = block.forward - block.saved
            saved += block.saved
            found.append((0, saved, whole, workspace))
        return found

    @cached_property
    def _late(self) -> int:
        """Flat buckets on their way while the first forward of a step runs, at most; of later
        forwards it is too much."""
        if not self.exchange.late:
            return 0
        return sum(sorted([b.nbytes for b in self.buckets])[-1 - self.exchange.run_ahead :])

    def _remaking(self) -> list[_Rise]:
        found, made, ahead = [], self.saved, self._gathered(1)
        kept_blocks = (self.kept or self).blocks
        for index, (own, kept) in enumerate(zip(self.blocks, kept_blocks, strict=True)):
            if kept.saved > own.saved:
                made += kept.saved - own.saved
            whole = ahead[index] if ahead else 0
            found.append((0, made, whole, kept.forward - kept.saved))
        return found

    def _gathered(self, step: int) -> list[int]:
        """Parameters that are gathered while each block runs: its own, and those ahead, the next
        of which is a `step` away. None where nothing is gathered in that direction."""
        exchange = self.exchange
        if not (exchange.fetches_forward if step > 0 else exchange.fetches_backward):
            return []
        own, more = [block.parameters for block in self.blocks], self.prefetch
        if not more:
            return own
        if step > 0:
            return [sum(own[i : i + more + 1]) for i in range(len(own))]
        return [sum(own[i - more if i > more else 0 : i + 1]) for i in range(len(own))]

    def _backward(self, first: bool, last: bool) -> list[_Rise]:
        found: list[_Rise] = []
        freed = made = packed = 0
        newest = before = summed = 0  # of buckets: the two on their way, parts that have come
        for index in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[index]
            if first and not self.exchange.sums_into_zeros:
                made += block.gradients
                workspace = block.workspace
            else:
                workspace = block.adding
            moving = summed + self._scattering(newest) + self._scattering(before)
            found.append((made - packed, -freed, moving, workspace))
            freed += block.saved
            for nbytes in self._complete.get(index, ()) if last and self.exchange.packs else ():
                summed += self._part(before)
                before, newest = newest, nbytes
                moving = summed + self._scattering(newest) + self._scattering(before)
                found.append((made - packed, -freed, moving, 0))
                packed += newest
        return found

    @cached_property
    def _complete(self) -> dict[int, list[int]]:
        """Block -> bytes of each bucket that is complete after its backward."""
        found: dict[int, list[int]] = {}
        for bucket in self.buckets:
            found.setdefault(bucket.owner, []).append(bucket.nbytes)
        return found

    @cached_property
    def _owned(self) -> dict[int, int]:
        """The same of all of them."""
        return {owner: sum(sizes) for owner, sizes in self._complete.items()}

    def _scattered(self) -> list[_Rise]:
        """Where they go after every backward: whole gradients live until their bucket is packed,
        two buckets at most are on their way."""
        found, largest = (0, 0, 0, 0), -inf
        freed = whole = gathered = 0
        ahead = self._gathered(-1)
        newest = before = 0
        for index in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[index]
            whole += block.gradients
            moving = self._scattering(newest) + self._scattering(before)
            if ahead:
                gathered = ahead[index]
                unpacked = 2 * block.parameters + moving
                if unpacked - freed > largest:
                    largest, found = unpacked - freed, (0, -freed, unpacked, 0)
            total = whole - freed + gathered + moving + block.workspace
            if total > largest:
                largest, found = total, (whole, -freed, gathered + moving, block.workspace)
            freed += block.saved
            if index in self._owned:
                before, newest = newest, self._owned[index]
                sent = self._scattering(newest) + self._scattering(before)
                if whole - freed + sent > largest:
                    largest, found = whole - freed + sent, (whole, -freed, sent, 0)
                whole = 0
        return [found]


def _most(rises: Sequence[_Rise]) -> Bytes:
    """The first of the largest."""
    return Bytes(*max(rises, key=sum)) if rises else NOTHING
