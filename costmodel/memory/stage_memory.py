"""What one stage keeps on a rank, and by how much that rises within an action, by category.

It follows `runtime.stage.stage`: a block's graph goes with its backward. Gradients and parameters
live as the stage's exchange says: from the first backward of a step or always, whole until they are
packed in flat tensors that live until they have arrived, gathered while a block runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import NamedTuple, Protocol

from meshwright.costmodel.memory.stack_bytes import NO_BYTES, StackBytes
from meshwright.costmodel.stage.buckets import Bucket
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Send
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.stack_memory import NOTHING_MORE, StackMemory


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
    halved: int = 0
    """Kept from the first to the second half of a split backward."""


@dataclass(frozen=True)
class MemoryGroup:
    """Parameters of a stage that one form keeps and synchronises, on a rank."""

    exchange: Exchange
    buckets: tuple[Bucket, ...]
    parameters: tuple[int, ...]
    """Per block: its own, whole, as they are gathered."""
    gradients: tuple[int, ...]
    """Per block: whole, of the parameters that it is the last to add to."""
    largest: tuple[int, ...]
    """Per block: largest gradient of one parameter."""
    frozen: tuple[int, ...] = ()
    """Per block: of `parameters`, those that are not trained; empty: none."""
    still: frozenset[int] = frozenset()
    """Blocks that have no backward."""

    @cached_property
    def trained(self) -> int:
        return sum([bucket.nbytes for bucket in self.buckets])

    @cached_property
    def complete(self) -> dict[int, list[int]]:
        """Block -> bytes of each bucket that is complete after its backward."""
        found: dict[int, list[int]] = {}
        for bucket in self.buckets:
            found.setdefault(bucket.owner, []).append(bucket.nbytes)
        return found

    def arriving(self, step: int, part: Callable[[int], int], in_place: bool) -> Sequence[int]:
        """Per block, on the way forward (`step` 1) or back: its parameters, and the flat tensor out
        of which they come; what is not trained comes after the rest. `part`: a rank's of a bucket,
        which is there too where it is cast."""
        if not self.exchange.fetches:
            return [0] * len(self.parameters)
        own = self.parameters if step > 0 else self._backward
        if in_place:
            return own
        frozen = self.frozen or (0,) * len(own)
        if self.exchange.copied and not self.exchange.copies_on_host:
            moving = [2 * (n - still) + part(n - still)
                      for n, still in zip(own, frozen, strict=True)]  # fmt: skip
        else:
            moving = [2 * (n - still) for n, still in zip(own, frozen, strict=True)]
        return [
            (more if more > n + still else n + still) if n else 0
            for n, still, more in zip(own, frozen, moving, strict=True)
        ]

    @cached_property
    def late(self) -> int:
        """Flat buckets on their way while the first forward of a step runs, at most; of later
        forwards it is too much."""
        if not self.exchange.late:
            return 0
        flying = sorted([b.nbytes for b in self.buckets])[-1 - self.exchange.run_ahead :]
        return ceil(sum(flying) * max([send.times for send in self.exchange.late]))

    def gathered(self, step: int, prefetch: int) -> Sequence[int]:
        """Parameters that are gathered while each block runs: its own, and those ahead, the next
        of which is a `step` away. None where nothing is gathered in that direction."""
        exchange = self.exchange
        if not (exchange.fetches_forward if step > 0 else exchange.fetches_backward):
            return ()
        own = self.parameters if step > 0 else self._backward
        if not prefetch:
            return own
        if step > 0:
            return [sum(own[i : i + prefetch + 1]) for i in range(len(own))]
        return [sum(own[i - prefetch if i > prefetch else 0 : i + 1]) for i in range(len(own))]

    @cached_property
    def _backward(self) -> Sequence[int]:
        """Of `parameters`, what is gathered for a backward."""
        if not self.still:
            return self.parameters
        return [n * (i not in self.still) for i, n in enumerate(self.parameters)]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One stage on a rank. What has been worked out is kept."""

    groups: tuple[MemoryGroup, ...]
    shard: int
    prefetch: int
    receives: bool = False
    """A rank receives the others' parts of a flat tensor before it adds them up
    (`ir.comm.p2p_collectives`, on Gloo); NCCL needs nothing beside."""
    parameters: int
    optimizer: int
    temporary: int
    """Of the optimizer's step."""
    stack: StackBytes = NO_BYTES
    """What the software stack holds beside all of this."""
    habits: StackMemory = NOTHING_MORE
    host: int = 0
    """In the host's memory."""
    summed: int = 0
    """Flat copy of the gradients that are summed over a model axis."""
    border: int
    entry: int
    blocks: tuple[BlockMemory, ...]
    kept: "StageMemory | None" = None
    """The same stage where it keeps all; None if it always does, or nothing asks for that."""
    _backwards: dict[tuple[bool, bool], Bytes] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def always(self) -> Bytes:
        """From one end of a step to the other."""
        flat = late = 0
        for group in self.groups:
            part = self._part(group.exchange, group.trained)
            flat += group.trained if group.exchange.sums_into_zeros else 0
            flat += self._of_trained(group, group.exchange.kept)
            wholes, parts = group.exchange.under_way
            late += ceil(wholes * group.trained + parts * part)
        # A message each way that is under way, and one that is asked for ahead.
        late += self.stack.always
        return Bytes(gradients=flat, communication=2 * (self.border + self.entry) + late)

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
        return Bytes(gradients=sum([self._of_trained(g, g.exchange.begun) for g in self.groups]))

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
            found = self._backwards[first, last] = _most(self._backward(first, last))
        return found

    @cached_property
    def end(self) -> Bytes:
        """Most between the last backward and the next step, `always` left out."""
        own = moving = 0
        for group in self.groups:
            own += self._of_trained(group, group.exchange.left)
            wholes, parts = (0.0, 0.0) if self.habits.in_place else group.exchange.moving_at_end
            sizes = [b.nbytes for b in group.buckets] if wholes + parts else []
            at_once = group.exchange.published_at_once * max(sizes, default=0)
            largest = min(at_once, sum(sizes))
            part = self._part(group.exchange, largest)
            moving = max(moving, ceil(wholes * largest + parts * part))
        if self.habits.in_place or not any(
            [sum(group.exchange.moving_at_end) for group in self.groups]
        ):
            return Bytes(gradients=own, communication=self.summed,
                         workspace=max(0, self.temporary - self.summed))  # fmt: skip
        return Bytes(gradients=own, communication=max(moving, self.temporary, self.summed))

    def _of_trained(self, group: MemoryGroup, shares: tuple[float, float]) -> int:
        """Bytes of so many wholes and parts of all trained parameters of a group."""
        wholes, parts = shares
        return ceil(wholes * group.trained + parts * self._part(group.exchange, group.trained))

    def _part(self, exchange: Exchange, nbytes: int) -> int:
        """This rank's of a bucket."""
        return ceil(nbytes / exchange.ways(self.shard))

    def _scattering(self, exchange: Exchange, waits: bool, nbytes: int) -> int:
        """A bucket on its way: its flat tensor, which lives until somebody waits for it, and what
        this rank gets. An owner gets the parts of the others one after the other, when whole
        gradients have gone (`waits`)."""
        if self.habits.in_place:
            return self._part(exchange, nbytes)
        return nbytes + (self._part(exchange, nbytes) if waits else nbytes)

    def _forward(self) -> list[_Rise]:
        found, saved, late = [], 0, sum([group.late for group in self.groups])
        ahead = self._gathered(1)
        for index, block in enumerate(self.blocks):
            whole = late
            if ahead:
                arriving, whole = ahead[index][0] + late, ahead[index][1] + late
                found.append((0, saved, arriving, 0))
            workspace = block.forward - block.saved
            saved += block.saved
            found.append((0, saved, whole, workspace))
        return found

    def _remaking(self) -> list[_Rise]:
        found, made, ahead = [], self.saved, self._gathered(1)
        kept_blocks = (self.kept or self).blocks
        for index, (own, kept) in enumerate(zip(self.blocks, kept_blocks, strict=True)):
            if kept.saved > own.saved:
                made += kept.saved - own.saved
            whole = ahead[index][1] if ahead else 0
            found.append((0, made, whole, kept.forward - kept.saved))
        return found

    def _gathered(self, step: int) -> list[tuple[int, int]]:
        """Parameters that are gathered before each block, at most, and while it runs; the flat
        tensor is there beside the parameters while it is unpacked, and a rank's part of it where
        that is cast. None where nothing is gathered in that direction."""
        lines = [(g.arriving(step, partial(self._part, g.exchange), self.habits.in_place), ahead)
                 for g in self.groups if (ahead := g.gathered(step, self.prefetch))]  # fmt: skip
        if not lines:
            return []
        if len(lines) == 1:
            own, ahead = lines[0]
            return [(n or whole, whole) for n, whole in zip(own, ahead, strict=True)]
        return [
            (max([own[i] for own, _ in lines]) + sum([a[i] for _, a in lines]),
             sum([a[i] for _, a in lines]))
            for i in range(len(self.blocks))
        ]  # fmt: skip

    def _backward(self, first: bool, last: bool) -> list[_Rise]:
        """What has been freed, and what each group's gradients and messages take meanwhile."""
        found: list[_Rise] = []
        freed = 0
        ahead = self._gathered(-1)
        groups = [
            _Gradients(
                group,
                partial(self._part, group.exchange),
                partial(
                    self._scattering, group.exchange, group.exchange.owns_whole or not self.receives
                ),
                first,
                last,
                self.habits.holds_gradients,
            )
            for group in self.groups
        ]
        one = groups[0] if len(groups) == 1 else None
        for index in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[index]
            gathered = 0
            if ahead:
                arriving, gathered = ahead[index]
                whole, moving = (one.gradients, one.moving) if one else _sum(groups)
                found.append((whole, -freed, arriving + moving, 0))
            if one:
                workspace = one.run(index, block.workspace)
                whole, moving = one.gradients, one.moving
            else:
                workspace = max([group.run(index, block.workspace) for group in groups])
                whole, moving = _sum(groups)
            found.append((whole, -freed, gathered + moving, workspace))
            freed += block.saved
            for group in groups:
                if index in group.going:
                    for _ in group.sent(index):
                        whole, moving = (one.gradients, one.moving) if one else _sum(groups)
                        found.append((whole, -freed, moving, 0))
        return found


def _sum(groups: "Sequence[_Gradients]") -> tuple[int, int]:
    """Of all: whole gradients, and what is on its way."""
    return sum([group.gradients for group in groups]), sum([group.moving for group in groups])


class _Gradients:
    """Those of a group within a backward: whole until their bucket is packed, and two buckets at
    most on their way."""

    def __init__(
        self,
        group: MemoryGroup,
        part: Callable[[int], int],
        scattering: Callable[[int], int],
        first: bool,
        last: bool,
        holds: bool,
    ) -> None:
        exchange = group.exchange
        self._group, self._part, self._scattering = group, part, scattering
        self._begins = first
        self._every = bool(exchange.every_backward)
        adds = not self._every and not (first and last)
        each = exchange.gradients_leave_each
        self._adds = bool(exchange.copied) and (adds or exchange.copies_apart) and not each
        """Gradients of copies are added to others as soon as a block has run."""
        self._made = exchange.summed if self._adds else exchange.read
        """Bytes that are there of a gradient after its block, per byte of what is stepped."""
        self._summed = exchange.summed
        """They go after every backward, so that there are none to which to add."""
        self._grows = self._every or each or (first and not exchange.sums_into_zeros)
        self._leaves = exchange.gradients_are_freed and not exchange.packs
        """They go to the host, a block's together."""
        self._freed = exchange.gradients_are_freed
        goes = self._every or each or (last and (exchange.packs or self._leaves))
        self.going: Mapping[int, list[int]] = group.complete if goes else {}
        """Block -> bytes of each bucket that goes after it."""
        self._newest = self._before = self._arrived = 0
        self.gradients = 0
        """Whole ones that are there now, beside those that were before."""
        self._holds = holds and bool(exchange.copied)
        self._beside = 0
        if last and exchange.last_forward:
            largest = max([bucket.nbytes for bucket in group.buckets], default=0)
            self._beside = self._shares(exchange.last_forward, largest)
        self.moving = self._beside
        """On the way, or arrived while others are."""
        self._besides = exchange.beside_gradients if last else ()

    def _shares(self, sends: Sequence[Send], nbytes: int) -> int:
        """Flat tensors of what goes of a bucket beside its gradients, and what a rank gets."""
        found = 0.0
        for send in sends if nbytes else ():
            got = send.primitive is not Primitive.ALL_REDUCE and self._part(nbytes) / nbytes
            found += self._group.exchange.sent(send, nbytes) * (1 + got)
        return ceil(found)

    def run(self, index: int, nbytes: int) -> int:
        """A block that needs so much beside what it saved; what it needs in all: more, where
        gradients are added to those that are there. The op that makes the largest gradient is taken
        to have half of the most that any op of the block has."""
        if self._grows:
            own = self._group.gradients[index]
            self.gradients += own if self._made == 1.0 else ceil(self._made * own)
            if not self._adds:
                return nbytes
        if self._holds:
            self.gradients += ceil(self._group.exchange.read * self._group.gradients[index])
            return nbytes
        if self._adds:
            made = ceil(self._group.exchange.read * self._group.gradients[index])
            return max(nbytes, nbytes // 2 + made)
        more = nbytes // 2 + self._group.largest[index]
        return more if more > nbytes else nbytes

    def sent(self, index: int) -> Iterator[None]:
        """A block has run: each time, something has been packed and goes."""
        sizes = self.going[index]
        for nbytes in [sum(sizes)] if self._every or self._leaves else sizes:
            share = self._made if self._leaves else self._summed
            sent = nbytes if share == 1.0 else ceil(share * nbytes)
            if not self._freed and (self._begins or not self._every):
                self._arrived += self._part(self._before)
            self._before, self._newest = self._newest, sent
            if self._leaves:
                before = 0 if self._group.exchange.comes_from_host else self._before
                self.moving = self._newest + before
                self.gradients -= sent
                yield
                continue
            self.moving = (
                self._arrived + self._scattering(self._newest) + self._scattering(self._before)
            )
            self.moving += self._beside
            yield
            gone = nbytes if self._made == 1.0 else ceil(self._made * nbytes)
            self.gradients -= self.gradients if self._every else gone
            if self._besides and (more := self._shares(self._besides, nbytes)):
                # While an owner waits for all of it, another rank's part is there.
                self.moving += more + self._part(nbytes) * self._group.exchange.owns_whole
                yield


def _most(rises: Sequence[_Rise]) -> Bytes:
    """The first of the largest."""
    return Bytes(*max(rises, key=sum)) if rises else NOTHING
