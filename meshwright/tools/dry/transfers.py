"""Whether what one rank sends is what another one waits for, and when, over all pairs of ranks."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod

from meshwright.codegen.lower.program import BorderValue
from meshwright.ir.layout.border import Transfer, forward_transfers, gradient_transfers
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.lines import Pair, in_order, side
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.messages.messages import plan_messages
from meshwright.runtime.messages.ordering import doings, standstill
from meshwright.tools.dry.classes import RankClass

Sent = Mapping[tuple[int, int], Mapping[str, BorderValue]]
"""(rank, stage) -> values by name."""


def check_transfers(plan: Plan, classes: Iterable[RankClass]) -> Iterator[Finding]:
    """A finding for each piece whose two ends differ, of one micro-batch: all are alike."""
    sends, receives = _values(classes)
    for border, name, transfer in _transfers(plan, sends):
        yield from _differences(plan, border, name, transfer, sends, receives)


def check_order(plan: Plan, classes: Iterable[RankClass]) -> Iterator[Finding]:
    """A finding for each rank that waits for ever, and each pair whose ends disagree, where a
    pair's messages have nothing but their order."""
    schedule = plan.schedule.parse()
    done = {}
    for group in classes:
        row = schedule.ranks[schedule.rank_of(group.programs[0].index)]
        pairs = {row.index(first) for first, _ in schedule.pairs if first in row}
        for rank in group.ranks:
            messages = plan_messages(plan, schedule, group.programs, rank)
            done[rank] = doings(messages, rank, len(row), pairs)
    for text in standstill(done):
        yield Finding("message order", f"schedule {plan.schedule.name!r}: {text}")


def count_transfers(plan: Plan, classes: Iterable[RankClass]) -> int:
    """Pieces of one micro-batch between different ranks."""
    sends, _ = _values(classes)
    return sum(one.source != one.target for _, _, one in _transfers(plan, sends))


def pairs_of_all(plan: Plan, classes: Iterable[RankClass]) -> tuple[Pair, ...]:
    """Source and target of all messages between different ranks, in the order of the job."""
    sends, _ = _values(classes)
    return in_order((one.source, one.target) for _, _, one in _transfers(plan, sends))


def _transfers(plan: Plan, sends: Sent) -> Iterator[tuple[int, str, Transfer]]:
    """(border, value, piece) of values and their gradients."""
    for border in range(len(plan.stages) - 1):
        for name, value in sends[plan.stages[border].devices[0], border].items():
            left, right = (side(plan, stage, value.apart) for stage in (border, border + 1))
            found = list(forward_transfers(value.dp, left, right))
            if value.requires_grad:
                found += gradient_transfers(value.dp, left, right)
            yield from ((border, name, transfer) for transfer in found)


def _values(classes: Iterable[RankClass]) -> tuple[Sent, Sent]:
    """What every rank sends up and receives from below, stage by stage."""
    sends, receives = {}, {}
    for group in classes:
        for program in group.programs:
            out = {value.name: value for value in program.sends}
            into = {value.name: value for value in program.receives}
            for rank in group.ranks:
                sends[rank, program.index] = out
                receives[rank, program.index] = into
    return sends, receives


def _differences(
    plan: Plan, border: int, name: str, transfer: Transfer, sends: Sent, receives: Sent
) -> Iterator[Finding]:
    forward = (transfer.source, border) in sends
    lower, upper = (transfer.source, transfer.target)[:: 1 if forward else -1]
    spans = (transfer.source_span, transfer.target_span)[:: 1 if forward else -1]
    made, wanted = sends[lower, border][name], receives[upper, border + 1].get(name)
    where = f"rank {transfer.source} sends {name} to rank {transfer.target}"
    if wanted is None:
        yield Finding("transfer", f"{where}, which does not expect it")
        return
    ours = _numel(made, spans[0], _samples(plan, border, lower) // made.parts)
    theirs = _numel(wanted, spans[1], _samples(plan, border + 1, upper) // wanted.parts)
    if (ours, made.dtype) != (theirs, wanted.dtype):
        what = f"{ours} elements of {made.dtype} against {theirs} of {wanted.dtype}"
        yield Finding("transfer", f"{where}: {what}", f"{theirs} of {wanted.dtype}")


def _samples(plan: Plan, stage: int, rank: int) -> int:
    found = plan.stages[stage]
    return found.batch_shares[found.coordinates(rank)["dp"]]


def _numel(value: BorderValue, span: tuple[int, int] | None, samples: int) -> int:
    whole = prod(value.shape)
    return whole if span is None else whole // samples * (span[1] - span[0])
