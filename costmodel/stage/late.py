"""Buckets that arrive under the first forward of the next step, or in a later step: what is hidden
of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.costmodel.stage.program import IDLE, Do, Program, Step, play, run
from meshwright.costmodel.stage.sync import UNPACKED, Sync
from meshwright.forms.exchange import Event, Send


@dataclass(frozen=True, slots=True)
class Late:
    """Seconds of what goes under the next step's first forward."""

    exposed_s: float = 0.0
    """By which it makes that longer."""
    hidden_s: float = 0.0


def late_of(sync: Sync) -> Late:
    """Plays the first forward of a step with the gathers of the step before, and without."""
    if not sync.exchange.late:
        return Late()
    steps = list(_forward(sync))
    alone = [step for block in sync.blocks for step in sync.block_forward(block)]
    longer_s = play(steps, IDLE, sync.overlap)[0] - play(alone, IDLE, sync.overlap)[0]
    program = Program(tuple(steps))
    moved_s = sum(program.jobs_by_what.values()) + program.own_by_what.get("gather", 0.0)
    return Late(max(0.0, longer_s), max(0.0, moved_s - max(0.0, longer_s)))


def _forward(sync: Sync) -> Iterator[Step]:
    """Buckets arrive before the first block that reads them, each begun `run_ahead` blocks
    earlier."""
    ahead, begun = sync.exchange.run_ahead, set[int]()

    def begin(calls: Iterable[int]) -> Iterator[Step]:
        for call in calls:
            if call not in begun:
                begun.add(call)
                yield from _begin(sync, call)

    yield from begin(range(ahead))
    for call, block in enumerate(sync.blocks):
        yield from begin([call])
        for number, bucket in enumerate(sync.owned.get(call, ())):
            yield Step(Do.WAIT, 0.0, _job(call, number), "gather")
            for send in sync.exchange.late:
                yield run(sync.copy_s(UNPACKED * bucket.nbytes * send.unpacks), "gather")
        yield from begin(range(call + 1, call + 1 + ahead))
        yield from sync.block_forward(block)


def _begin(sync: Sync, call: int) -> Iterator[Step]:
    for number, bucket in enumerate(sync.owned.get(call, ())):
        for send in sync.exchange.late:
            if send.packs:
                own = bucket.nbytes / sync.shard if send.packs == "part" else bucket.nbytes
                yield run(sync.copy_s(sync.packed_bytes(own)), "gather")
            seconds = sync.send_s(send, bucket.nbytes)
            yield Step(Do.START, seconds, _job(call, number), "gather")


def _job(call: int, number: int) -> int:
    """A number for the gather of a bucket; a block is the first to read fewer than 2^20."""
    return (call << 20) + number


def lagging_s(sync: Sync) -> float:
    """Returns the seconds of what a stage sends in a step and waits for in a later one."""
    return sum([_seconds(sync, send) for send in sync.exchange.lagging])


def unhidden_s(syncs: Sequence[Sync], num_microbatches: int, step_s: float) -> float:
    """Returns by how much what a pipeline rank waits for steps later makes each step of `step_s`
    longer. It has that long every step, however late it is waited for, but for the time that
    its replicas' other messages take."""
    lagging, others = sum([lagging_s(sync) for sync in syncs]), 0.0
    for sync in syncs:
        for send in sync.exchange.sends:
            once = send.at in (Event.AFTER_LAST, Event.END, Event.UPDATED)
            if not send.lag:
                others += (1 if once else num_microbatches) * _seconds(sync, send)
    return max(0.0, lagging + others - max(step_s, others))


def _seconds(sync: Sync, send: Send) -> float:
    """Of all units of a stage."""
    if send.unit == "block":
        return sum([sync.send_s(send, block.gathered_bytes) for block in sync.blocks])
    part = sync.shard if send.of_part else 1
    return sum([sync.send_s(send, bucket.nbytes / part) for bucket in sync.buckets])
