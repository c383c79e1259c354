"""Buckets that arrive under the first forward of the next step, or in a later step: what is hidden
of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.gathers import UNPACKED
from meshwright.costmodel.stage.program import IDLE, Do, Program, Step, play, run
from meshwright.costmodel.stage.sync import Sync
from meshwright.forms.exchange_rows import Event, Send


@dataclass(frozen=True, slots=True)
class Late:
    """Seconds of what goes under the next step's first forward."""

    exposed_s: float = 0.0
    """By which it makes that longer."""
    hidden_s: float = 0.0
    copied_s: float = 0.0
    """Of `exposed_s`: packing and unpacking, which processes that share cores slow down."""


def late_of(sync: Sync) -> Late:
    """Plays the first forward of a step with the gathers of the step before, and without."""
    arriving = [
        _LateBuckets(sync, group, number)
        for number, group in enumerate(sync.groups) if group.exchange.late
    ]  # fmt: skip
    if not arriving:
        return Late()
    steps = list(_forward(sync, arriving))
    longer_s = (
        play(steps, IDLE, sync.overlap)[0] - play(list(_forward(sync, ())), IDLE, sync.overlap)[0]
    )
    own = [step for group in arriving for step in group.begun_steps]
    program = Program(tuple(own))
    copied_s, exposed_s = program.own_by_what.get("gather", 0.0), max(0.0, longer_s)
    moved_s = sum(program.jobs_by_what.values()) + copied_s
    return Late(exposed_s, max(0.0, moved_s - exposed_s), min(copied_s, exposed_s))


def _forward(sync: Sync, arriving: Sequence["_LateBuckets"]) -> Iterator[Step]:
    """Buckets arrive before the first block that reads them; other groups' parameters are gathered
    beside them."""
    gathers = [own.steps(1) for own in sync.gathers if own.forward]
    for group in arriving:
        yield from group.first()
    for call, block in enumerate(sync.blocks):
        for group in arriving:
            yield from group.before(call)
        for own in gathers:
            yield from own[call]
        yield from sync.block_forward(block)


class _LateBuckets:
    """Buckets of a group, each begun `run_ahead` blocks before it is waited for."""

    def __init__(self, sync: Sync, group: FormGroup, number: int) -> None:
        self._sync, self._group, self._number = sync, group, number
        self._begun = set[int]()
        self.begun_steps: list[Step] = []
        """What has been played of it."""

    def first(self) -> Iterator[Step]:
        yield from self._begin(range(self._group.exchange.run_ahead))

    def before(self, call: int) -> Iterator[Step]:
        """Before a block runs."""
        yield from self._begin([call])
        for number, bucket in enumerate(self._group.owned.get(call, ())):
            yield Step(Do.WAIT, 0.0, self._job(call, number), "gather")
            for send in self._group.exchange.late:
                sync, pieces = self._sync, bucket.tensors * self._group.shards * send.unpacks
                moved = UNPACKED * send.times * bucket.nbytes * send.unpacks
                copies = run(sync.copy_s(moved) + sync.piece_s * pieces, "gather")
                self.begun_steps.append(copies)
                yield copies
        yield from self._begin(range(call + 1, call + 1 + self._group.exchange.run_ahead))

    def _begin(self, calls: Iterable[int]) -> Iterator[Step]:
        for call in calls:
            if call not in self._begun:
                self._begun.add(call)
                steps = list(self._starts(call))
                self.begun_steps += steps
                yield from steps

    def _starts(self, call: int) -> Iterator[Step]:
        sync = self._sync
        for number, bucket in enumerate(self._group.owned.get(call, ())):
            for send in self._group.exchange.late:
                if send.packs:
                    own = (
                        bucket.nbytes / self._group.shards
                        if send.packs == "part"
                        else bucket.nbytes
                    )
                    pieces = bucket.tensors * (1 if send.packs == "part" else self._group.shards)
                    yield run(sync.packed_s(own, pieces), "gather")
                seconds = sync.send_s(self._group, send, bucket.nbytes)
                yield Step(Do.START, seconds, self._job(call, number), "gather")

    def _job(self, call: int, number: int) -> int:
        """A number for the gather of a bucket; a block is the first to read fewer than 2^20."""
        return (((self._number + 1) << 40) + (call << 20)) + number


def lagging_s(sync: Sync) -> float:
    """Returns the seconds of what a stage sends in a step and waits for in a later one."""
    return sum([
        _seconds(sync, group, send) for group in sync.groups for send in group.exchange.lagging
    ])  # fmt: skip


def unhidden_s(syncs: Sequence[Sync], num_microbatches: int, step_s: float) -> float:
    """Returns by how much what a pipeline rank waits for steps later makes each step of `step_s`
    longer. It has that long every step, however late it is waited for, but for the time that
    its replicas' other messages take."""
    lagging, others = sum([lagging_s(sync) for sync in syncs]), 0.0
    for sync, group in [(own, group) for own in syncs for group in own.groups]:
        for send in group.exchange.sends:
            once = send.at in (Event.AFTER_LAST, Event.END, Event.UPDATED)
            if not send.lag:
                others += (1 if once else num_microbatches) * _seconds(sync, group, send)
    throughput_s = max(0.0, lagging + others - max(step_s, others))
    return max(throughput_s, _awaited_s(syncs, max(0.0, step_s - others)))


def _awaited_s(syncs: Sequence[Sync], free_s: float) -> float:
    """Of what goes in one of several steps only: seconds a step by which it takes longer than the
    steps until it is waited for, each of which has so much time for it."""
    found = 0.0
    for sync in syncs:
        for group in sync.groups:
            for send in group.exchange.lagging:
                whole_s = _seconds(sync, group, send) * send.every
                found += max(0.0, whole_s - send.lag * free_s) / send.every * (send.every > 1)
    return found


def _seconds(sync: Sync, group: FormGroup, send: Send) -> float:
    """Of all units of a group, in a step on average."""
    if send.unit == "block":
        return (
            sum([sync.send_s(group, send, nbytes) for nbytes in group.fetched(send)]) / send.every
        )
    sizes = [group.part_of(send, bucket.nbytes) for bucket in group.buckets]
    return sum([sync.send_s(group, send, nbytes) for nbytes in sizes]) / (
        send.every if send.lag else 1
    )
