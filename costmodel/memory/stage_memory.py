"""What one stage keeps on a rank, and by how much that rises within an action, by category.

It follows `runtime.stage.stage`: a block's graph goes with its backward. Gradients and parameters
live as the stage's exchange says: from the first backward of a step or always, whole until they are
packed in flat tensors that live until they have arrived, gathered while a block runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from typing import NamedTuple, Protocol

from meshwright.costmodel.memory.leaving import Way
from meshwright.costmodel.memory.memory_group import BackwardGradients, MemoryGroup
from meshwright.costmodel.memory.stack_bytes import NO_BYTES, StackBytes
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


@dataclass(frozen=True, slots=True)
class SlotBytes:
    """Of a stage whose calls are recorded (`Stage.capture`), what stays from step to step."""

    beside: int
    """Of each micro-batch that is in flight at once, beside what blocks save: gradients of what
    they read, and copies of what comes from other stages."""
    sums: int
    """Of all parameters, gradients as blocks make them."""


class Stops(NamedTuple):
    """How often a block waits for a collective, so that the action beside it goes on."""

    ahead: int
    again: int
    """In a forward that is made again."""
    back: int


class Holding(Protocol):
    """What a stage holds over a step, as far as the course of it goes."""

    @property
    def slots(self) -> SlotBytes | None: ...
    @property
    def landings(self) -> tuple[int, ...]: ...
    @property
    def entry(self) -> int: ...
    @property
    def border(self) -> int: ...
    @property
    def sent(self) -> int: ...
    @property
    def border_back(self) -> int: ...
    @property
    def entry_back(self) -> int: ...
    @property
    def shared(self) -> int: ...
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
    def backward(
        self, *, first: bool, last: bool, held: bool = False, second: bool = False
    ) -> Bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """One block on a rank."""

    saved: int
    """Of one micro-batch, freed by the block's backward."""
    forward: int
    """Most at once in forward beside what earlier blocks saved; at least `saved`."""
    workspace: int
    """Most at once in backward beside what is saved."""
    one_op: int
    """Of that, operands and results of one op at most, while all that is saved is there."""
    late: int = 0
    """By which `workspace` is less where gradients of its parameters come as its backward goes."""
    adding: int | None = None
    """By which it is more where they are added to others; None: not known."""
    halved: int = 0
    """Kept from the first to the second half of a split backward."""
    halving: int = 0
    """Most at once in the first half, beside what it keeps."""
    second: int = 0
    """Most at once in the second half, beside what is there as it begins."""
    second_adding: int | None = None
    """As `adding`, in the second half."""
    second_late: int = 0
    """As `late`, in the second half."""
    second_read: int = 0
    """What goes with its second half and counts as saved by an earlier block, less what counts as
    saved by it and goes with a later one's."""
    remakes: bool = False
    """Whether its backward makes something again."""
    given: int = 0
    """The gradients of what it makes, which are there when its backward begins."""
    waiting: int = 0
    """Gradients, there all through its backward, of values that an earlier block made and a later
    one has read."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """One stage on a rank. What has been worked out is kept."""

    groups: tuple[MemoryGroup, ...]
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
    """Of that stack."""
    host: int = 0
    """In the host's memory."""
    summed: int = 0
    """Flat copy of the gradients that are summed over a model axis."""
    border: int
    """Of a message to the next stage; of what goes nowhere where that is on its rank."""
    entry: int
    """Of one from the stage before."""
    border_back: int
    """Of the gradients that come back from the next stage."""
    entry_back: int
    """Of those that go back to the stage before."""
    shared: int = 0
    """Of what it saves of that, what the stage before on its rank has saved too: one memory, which
    is no part of `saved`."""
    sent_as_kept: int = 0
    """Of `border`, what its block has saved anyway."""
    blocks: tuple[BlockMemory, ...]
    slots: SlotBytes | None = None
    """What stays where calls are recorded: nothing that they save is given back then."""
    landings: tuple[int, ...] = ()
    """Room in its own memory where gradients arrive that are cast or added to others on the host,
    in steps of one micro-batch, of two, and of more; empty: none."""
    ways: tuple[Way, Way] | None = None
    """What is on its way to the host by the plan's times: in the first backward, and in others."""
    on_time: bool = False
    """Whether that is taken, and not all that may be."""
    stops: tuple[Stops, ...] = ()
    """Of each block, where actions run together with others."""
    kept: "StageMemory | None" = None
    """The same stage where it keeps all; None if it always does, or nothing asks for that."""
    _backwards: dict[tuple[bool, bool, bool], tuple[Bytes, int]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def expected(self) -> "StageMemory":
        """The same where copies to the host end when the plan's times say so."""
        return replace(self, on_time=True) if self.ways else self

    @cached_property
    def always(self) -> Bytes:
        """From one end of a step to the other."""
        flat = late = 0
        for group in self.groups:
            part = group.part(group.trained)
            flat += group.trained if group.exchange.sums_into_zeros else 0
            flat += self._of_trained(group, group.exchange.kept)
            wholes, parts = group.exchange.under_way
            late += ceil(wholes * group.trained + parts * part)
        return Bytes(gradients=flat, communication=late + self.stack.always)

    @cached_property
    def saved(self) -> int:
        """Per micro-batch in flight."""
        beside = self.slots.beside if self.slots else 0
        beside += self._sent_apart * self.habits.keeps_sent
        return sum([block.saved for block in self.blocks]) + beside

    @property
    def sent(self) -> int:
        """Of a message to the next stage on its way, beside what is saved."""
        return 0 if self.habits.keeps_sent else self._sent_apart

    @property
    def _sent_apart(self) -> int:
        """What is sent and not saved by its block; of recorded calls it is a copy."""
        return self.border - self.sent_as_kept * (self.slots is None)

    @cached_property
    def halved(self) -> int:
        """Per micro-batch between the halves of its backward, beside what it saved; less than 0 if
        first halves free more than they leave."""
        return sum([block.halved for block in self.blocks])

    @cached_property
    def begun(self) -> Bytes:
        """From the end of the first backward of a step to that of the last."""
        return Bytes(
            gradients=sum(
                [self._of_trained(g, g.exchange.begun) + sum(g.flying) for g in self.groups]
            )
        )

    @cached_property
    def forward(self) -> Bytes:
        """Most within a forward, beside what is in flight before it."""
        return _most([rise for _, rise in self.forward_rises()])

    @cached_property
    def halving(self) -> Bytes:
        """Most within the first half of a backward, beside the same and all that it leaves for the
        second: what blocks before leave is not there yet. Parameters are gathered as for a whole
        backward."""
        ahead, to_come = self._gathered(-1), 0
        found: list[_Rise] = [(0, 0, 0, 0)]
        for index, block in enumerate(self.blocks):
            arriving, gathered = ahead[index] if ahead else (0, 0)
            own = block.halving + block.waiting - to_come
            found.append((0, 0, gathered, own))
            to_come += block.halved
            if arriving:
                own = block.given + block.waiting - to_come
                found.append((0, 0, arriving, own))
        return _most(found)

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
        """The same where all is there, which leaves what a stage leaves that keeps all."""
        kept = self.kept or self
        return kept.halving.plus(Bytes(activations=kept.halved - self.halved))

    def backward(
        self, *, first: bool, last: bool, held: bool = False, second: bool = False
    ) -> Bytes:
        """Most within a backward, beside what is in flight (itself included) and `begun`. `held`:
        all that it needs is there; `second`: it is the half that is left, which makes gradients
        of parameters alone."""
        if held and self.kept is not None:
            return self.kept.backward(first=first, last=last, second=second)
        return self._backward(first, last, second)[0]

    def most_sent_bytes(self, first: bool) -> int:
        """Most on its way at once in the last backward of a step, whatever else is there."""
        return self._backward(first, last=True, second=False)[1] + self.always.communication

    def _backward(self, first: bool, last: bool, second: bool) -> tuple[Bytes, int]:
        """Most within it, and most on its way."""
        found = self._backwards.get((first, last, second))
        if found is None:
            rises = [rise for _, rise in self.backward_rises(first, last, second)]
            sent = max([moving for _, _, moving, _ in rises], default=0)
            found = self._backwards[first, last, second] = _most(rises), sent
        return found

    @cached_property
    def end(self) -> Bytes:
        """Most between the last backward and the next step, `always` left out."""
        own = moving = 0
        for group in self.groups:
            own += self._of_trained(group, group.exchange.left)
            if self.slots and not (group.exchange.sums_into_zeros or group.exchange.left[0]):
                own += ceil(group.exchange.read * group.trained)
            wholes, parts = (0.0, 0.0) if self.habits.in_place else group.exchange.moving_at_end
            sizes = [b.nbytes for b in group.buckets] if wholes + parts else []
            at_once = group.exchange.published_at_once * max(sizes, default=0)
            # Where the next forward waits for them, those of the first blocks begin together.
            largest = max(min(at_once, sum(sizes)), group.begins_late)
            part = group.part(largest)
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
        return ceil(wholes * group.trained + parts * group.part(group.trained))

    def _scattering(self, group: MemoryGroup, waits: bool, nbytes: int) -> int:
        """A bucket on its way: its flat tensor, which lives until somebody waits for it, and what
        this rank gets. An owner gets the parts of the others one after the other, when whole
        gradients have gone (`waits`)."""
        if self.habits.in_place:
            return group.part(nbytes)
        return nbytes + (group.part(nbytes) if waits else nbytes)

    def forward_rises(self) -> list[tuple[int, _Rise]]:
        """What it rises by within a forward, block by block."""
        found: list[tuple[int, _Rise]] = []
        saved = whole = 0
        under = self._under_forward()
        for index, block in enumerate(self.blocks):
            if under:
                arriving, whole = under[index]
                found.append((index, (0, saved, arriving, 0)))
            workspace = block.forward - block.saved
            saved += block.saved
            found.append((index, (0, saved, whole, workspace)))
        return found

    def _under_forward(self) -> Sequence[tuple[int, int]]:
        """Parameters that a forward gathers, and what goes under it, before each block and while it
        runs; none where nothing does."""
        lines = [each for each in (self._gathered(1), *[g.late for g in self.groups]) if each]
        if len(lines) < 2:
            return lines[0] if lines else ()
        return [(sum([n for n, _ in at]), sum([n for _, n in at]))
                for at in zip(*lines, strict=True)]  # fmt: skip

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
        lines = [(g.arriving(step, g.part, self.habits.in_place), ahead)
                 for g in self.groups
                 if (ahead := g.gathered(step, self.prefetch, self.habits.in_place))]  # fmt: skip
        if not lines:
            return []
        if len(lines) == 1:
            own, ahead = lines[0]
            return [(n or whole, whole) for n, whole in zip(own, ahead, strict=True)]
        return [
            (whole + max([own[i] - there[i] for own, there in lines if own[i]], default=0), whole)
            for i in range(len(self.blocks))
            for whole in [sum([there[i] for _, there in lines])]
        ]

    @property
    def _coming(self) -> Sequence[int]:
        """Parameters on their way when a block's gradients go; none where none come ahead."""
        lines = [g.coming(self.prefetch, self.habits.in_place) for g in self.groups]
        return [sum(at) for at in zip(*filter(None, lines), strict=True)]

    def backward_rises(
        self, first: bool, last: bool, second: bool = False
    ) -> list[tuple[int, _Rise]]:
        """What has been freed, and what each group's gradients and messages take meanwhile, block
        by block; `second`: of the second half of one that is split."""
        found: list[tuple[int, _Rise]] = []
        gives_back = self.slots is None
        freed = 0
        ahead = self._gathered(-1)
        groups = [
            BackwardGradients(
                group,
                group.part,
                partial(self._scattering, group, group.exchange.owns_whole or not self.receives),
                first,
                last,
                self.habits.holds_gradients,
                self.ways[not first] if self.on_time and self.ways else None,
            )
            for group in self.groups
        ]
        one = groups[0] if len(groups) == 1 else None
        come = self.slots is None
        there_before = [group for group in groups if not group.come]
        mixed = come and 0 < len(there_before) < len(groups)
        copied = [group for group in groups if group.adds_copies]
        opening = [group for group in groups if group.opens and not self.prefetch]
        reaching = [group for group in groups if group.goes_beside]
        coming = self._coming
        for index in range(len(self.blocks) - 1, -1, -1):
            block = self.blocks[index]
            # Of recorded calls all gradients of what they read are there at any time.
            # The second half begins when no gradient of a value waits any more.
            there = block.waiting * (gives_back and not second) - freed
            gathered = 0
            if ahead:
                arriving, gathered = ahead[index]
                whole, moving = (one.gradients, one.moving) if one else _sum(groups)
                found.append((index, (whole, there, arriving + moving, block.given)))
                for group in opening:
                    group.opened()
            if index == len(self.blocks) - 1 and not second:  # the gradient that has come
                whole, moving = (one.gradients, one.moving) if one else _sum(groups)
                found.append((index, (whole, there, gathered + moving, self.border_back)))
            needs, one_op, adding = block.workspace, block.one_op, block.adding
            if second:
                needs = one_op = block.second
                adding = block.second_adding
            late = (block.second_late if second else block.late) * come
            if late and there_before:
                late = max(0, late - sum([group.there_bytes(index) for group in there_before]))
            needs -= late
            for group in reaching:
                group.reaches(index)
            if one:
                workspace = one.run(index, needs, one_op, adding)
                whole, moving = one.gradients, one.moving
            else:
                workspace = max(
                    [group.run(index, needs, one_op, adding, mixed) for group in groups]
                )
                whole, moving = _sum(groups)
            if copied:
                workspace += sum([group.copies for group in copied])
            if workspace < 0:  # gradients that are still to come count as there until here
                whole, workspace = whole + workspace, 0
            found.append((index, (whole, there, gathered + moving, workspace)))
            freed += (block.saved + (block.halved + block.second_read) * second) * gives_back
            # Beside what goes now is the gradient that the block before is given.
            before = self.blocks[index - 1] if index else None
            given = before.given * (not second) if before else 0
            if copied and (copies := sum([group.ran(index) for group in copied])):
                whole, moving = (one.gradients, one.moving) if one else _sum(groups)
                found.append((index, (whole, -freed, moving, copies)))
            for group in groups:
                if index in group.going:
                    for _ in group.sent(index):
                        whole, moving = (one.gradients, one.moving) if one else _sum(groups)
                        moving += coming[index] if coming else 0
                        found.append((index, (whole, -freed, moving, given)))
                    if group.overtakes:
                        for other in groups:
                            other.overtaken()
        return found


def _sum(groups: Sequence[BackwardGradients]) -> tuple[int, int]:
    """Of all: whole gradients, and what is on its way."""
    return sum([group.gradients for group in groups]), sum([group.moving for group in groups])


def _most(rises: Sequence[_Rise]) -> Bytes:
    """The first of the largest."""
    return Bytes(*max(rises, key=sum)) if rises else NOTHING
