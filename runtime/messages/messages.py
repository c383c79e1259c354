"""Every message of a step, known before it starts: who sends what to whom, and in which order."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from meshwright.codegen.lower.program import BorderValue, StageProgram
from meshwright.ir.layout.border import Transfer, forward_transfers, gradient_transfers
from meshwright.ir.plan.lines import Pair, side
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import FORWARDS, Action, Schedule, Work


@dataclass(frozen=True, slots=True)
class Message:
    """One piece of a value (or of its gradient) of one micro-batch."""

    border: int
    """Between stage `border` and `border + 1`."""
    value: str
    gradient: bool
    microbatch: int
    transfer: Transfer
    number: int
    """Position among all messages from its source to its target in a step."""
    made_at: int
    """Index of the action in the source's row that makes it."""
    needed_at: int
    """Index of the action in the target's row that needs it."""

    @property
    def source(self) -> int:
        return self.transfer.source

    @property
    def target(self) -> int:
        return self.transfer.target


def plan_messages(
    plan: Plan,
    schedule: Schedule,
    programs: tuple[StageProgram, ...],
    rank: int,
    *,
    backward: bool = True,
) -> tuple[Message, ...]:
    """All messages from or to `rank` (those to itself too), grouped by source and target.

    With `backward` False only forwards run, as in evaluation.
    """
    works = set(Work) if backward else FORWARDS
    rows = [[action for action in row if action.work in works] for row in schedule.ranks]
    at = {action: index for row in rows for index, action in enumerate(row)}
    found: list[Message] = []
    for border, values in _borders(programs):
        own = [
            [t for t in _transfers(plan, border, values, gradient) if _has_end(t[1], rank)]
            for gradient in (False, True)[: 1 + backward]
        ]
        for microbatch in range(plan.num_microbatches):
            for gradient, transfers in zip((False, True), own, strict=False):
                made = _action(at, border + gradient, gradient, microbatch)
                needed = _action(at, border + 1 - gradient, gradient, microbatch)
                ends = at[made], at[needed]
                found += (
                    Message(border, value, gradient, microbatch, transfer, 0, *ends)
                    for value, transfer in transfers
                )
    return _numbered(found)


def pairs_of(plan: Plan, programs: tuple[StageProgram, ...], rank: int) -> set[Pair]:
    """Source and target of all messages that `rank` has with others in a step."""
    return {
        (transfer.source, transfer.target)
        for border, values in _borders(programs)
        for gradient in (False, True)
        for _, transfer in _transfers(plan, border, values, gradient)
        if _has_end(transfer, rank) and transfer.source != transfer.target
    }


def _has_end(transfer: Transfer, rank: int) -> bool:
    return rank in (transfer.source, transfer.target)


def _action(at: dict[Action, int], stage: int, gradient: bool, microbatch: int) -> Action:
    """The action of `stage` that makes or needs a message."""
    if not gradient:
        plain = Action(stage, Work.FORWARD, microbatch)
        return plain if plain in at else Action(stage, Work.FORWARD_KEEPING, microbatch)
    whole = Action(stage, Work.BACKWARD, microbatch)
    return whole if whole in at else Action(stage, Work.BACKWARD_INPUT, microbatch)


def _borders(programs: tuple[StageProgram, ...]) -> Iterator[tuple[int, tuple[BorderValue, ...]]]:
    """The borders that the rank's stages have; one between two of its own stages comes once."""
    values = {}
    for program in programs:
        if program.receives:
            values[program.index - 1] = program.receives
        if program.sends:
            values[program.index] = program.sends
    yield from sorted(values.items())


def _transfers(
    plan: Plan, border: int, values: tuple[BorderValue, ...], gradient: bool
) -> Iterator[tuple[str, Transfer]]:
    for value in values:
        sides = side(plan, border, value.apart), side(plan, border + 1, value.apart)
        if gradient and not value.requires_grad:
            continue
        transfers = gradient_transfers if gradient else forward_transfers
        for transfer in transfers(value.dp, *sides):
            yield value.name, transfer


def _numbered(found: list[Message]) -> tuple[Message, ...]:
    """Numbers each pair's messages in the order in which the source makes them."""

    def pair(message: Message) -> tuple[int, int]:
        return message.source, message.target

    ordered = sorted(found, key=lambda m: (*pair(m), m.made_at))  # stable within an action
    return tuple(
        replace(m, number=number)
        for _, group in groupby(ordered, pair)
        for number, m in enumerate(group)
    )
