"""Memory of a pipeline rank over a step: the peak, and the curve by category for people.

The peak needs no times: a rank's actions come in a known order. Only where activations are copied
to the host and back does it matter when.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from meshwright.costmodel.memory.pair_memory import pair_rise
from meshwright.costmodel.memory.stage_memory import NOTHING, Bytes, Holding, StageMemory
from meshwright.costmodel.memory.under_way import UnderWay, under_way
from meshwright.costmodel.simulate.compiled_schedule import HELD, LAST, B, F, I, K, R, Table, W
from meshwright.costmodel.simulate.timeline import Timeline

Beside = tuple[int, int]
"""Of a forward that runs together with a backward: the place of that one's stage among the rank's,
and its kind; (0, -1): of that backward, when both are over."""
OVER: Beside = (0, -1)


class Moment(NamedTuple):
    """What a pipeline rank holds while it runs an action; several actions may be alike."""

    in_flight: tuple[int, ...]
    """Micro-batches of each of the rank's stages, that of the action included. If the schedule says
    where all is kept or made again: then, stage by stage, those of which all is there."""
    halved: tuple[int, ...]
    """Of these, at each place, between the halves of their backward: that of the action is."""
    begun: tuple[bool, ...]
    """Whether a backward of the stage has ended."""
    messages: tuple[int, ...]
    """Stage by stage, the counts of `UnderWay`."""
    stage: int
    """Index among the rank's stages."""
    kind: int
    first: bool
    """No backward of the stage has ended."""
    whole: bool
    """Of its micro-batch all was kept, or has been made again."""
    beside: "Beside" = (-1, -1)


_HOW = Moment._fields.index("stage")
"""Of a moment's fields, where those end that count what is there."""
_Counts = tuple[Sequence[int], ...]


class Point(NamedTuple):
    """From a point in time on."""

    time_s: float
    held: Bytes


_MOMENTS: dict[tuple[int, bool], tuple[Table, tuple[tuple[Moment, ...], ...]]] = {}
_MOST = 128


def moments(table: Table, *, freeing: bool = False) -> tuple[tuple[Moment, ...], ...]:
    """The moments of each pipeline rank that may be its peak. Those of the last tables are kept.
    `freeing`: a micro-batch between the halves of its backward may hold less than before them."""
    key = id(table), freeing
    kept = _MOMENTS.get(key)
    if kept is None:
        while len(_MOMENTS) >= _MOST:
            del _MOMENTS[next(iter(_MOMENTS))]
        ranks = range(len(table.rows))
        found = tuple([_undominated(_walk(table, rank), freeing) for rank in ranks])
        kept = _MOMENTS[key] = table, found
    return kept[1]


def _undominated(walked: Iterator[Moment], freeing: bool) -> tuple[Moment, ...]:
    """Those that no other of the same action holds as much as, of everything."""
    groups: dict[tuple[object, ...], list[tuple[Moment, _Counts]]] = {}
    for moment in dict.fromkeys(walked):
        counts = _counts(moment, freeing)
        kept = groups.setdefault(moment[_HOW:], [])
        if not any(_covers(other, counts) for _, other in kept):
            kept[:] = [pair for pair in kept if not _covers(counts, pair[1])]
            kept.append((moment, counts))
    return tuple(moment for kept in groups.values() for moment, _ in kept)


def _covers(more: _Counts, less: _Counts) -> bool:
    return all(
        a >= b
        for mine, theirs in zip(more, less, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def _counts(moment: Moment, freeing: bool) -> _Counts:
    """What a rank holds the more bytes for, the more of each there are."""
    in_flight = moment.in_flight
    if freeing:  # one between halves counts as that alone: it holds something, if less than others
        in_flight = tuple([n - half for n, half in zip(in_flight, moment.halved, strict=True)])
    return in_flight, moment.halved, moment.begun, moment.messages


def held_stages(table: Table, rank: int) -> tuple[int, ...]:
    """Stages of a pipeline rank."""
    return tuple(stage for stage, owner in enumerate(table.owners) if owner == rank)


def _walk(table: Table, rank: int) -> Iterator[Moment]:
    """The moment of each action in order."""
    place = {stage: i for i, stage in enumerate(held_stages(table, rank))}
    count, size = len(place), len(place) * (1 + table.early)
    in_flight, halved, begun = [0] * size, [0] * size, [False] * size
    whole: set[tuple[int, int]] = set()
    for position, messages in zip(table.rows[rank], under_way(table, rank), strict=True):
        _, stage, kind, microbatch, *_ = table.items[position]
        at, plain = place[stage], kind & (LAST - 1)
        if plain in (K, R):
            in_flight[at] -= plain == R
            in_flight[at + count] += 1
            whole.add((stage, microbatch))
        in_flight[at] += plain == F
        there = (stage, microbatch) in whole
        halved[at + count * there] += plain & 3 == I
        first, beside = not begun[at], (-1, -1)
        if position in table.together:
            other = table.items[position + 1]
            beside = place[other.stage], other.kind
            first = not begun[beside[0]]
        elif position - 1 in table.together:
            beside = OVER
        yield Moment(
            tuple(in_flight), tuple(halved), tuple(begun), tuple(chain.from_iterable(messages)),
            at, kind, first, there, beside,
        )  # fmt: skip
        halved[at + count * there] -= plain == W
        if plain in (B, B + HELD, W):
            in_flight[at + count * there] -= 1
            begun[at] = True


def peak(table: Table, rank: int, stages: Sequence[StageMemory]) -> Bytes:
    """The most that a rank holds beside parameters and optimizer state."""
    return largest(held_then(table, rank, stages))


def held_then(table: Table, rank: int, stages: Sequence[StageMemory]) -> tuple[Bytes, ...]:
    """What a rank holds beside parameters and optimizer state at the moments that may be its
    peak."""
    return tuple(_held(table, rank, stages))


def largest(held: Sequence[Bytes]) -> Bytes:
    """The most at one time."""
    return max(held, key=sum)


def of_each_kind(held: Sequence[Bytes]) -> Bytes:
    """The most of each kind, at whatever time."""
    return Bytes(*map(max, zip(*held, strict=True)))


def _held(table: Table, rank: int, stages: Sequence[StageMemory]) -> Iterator[Bytes]:
    own = [stages[s] for s in held_stages(table, rank)]
    there = _there(stages, table, rank)
    sums = sum([s.slots.sums for s in own if s.slots])
    yield end(own).plus(there)
    always = _sum(s.always for s in own).plus(there)
    begun = [s.begun.gradients for s in own]
    saved, halved = [0 if s.slots else s.saved for s in own], [s.halved for s in own]
    if table.early:
        saved += [s.kept_saved for s in own]
        begun, halved = begun + [0] * len(own), halved * 2
    rises: dict[tuple[object, ...], Bytes] = {}
    of_messages = _message_bytes(own)
    for moment in moments(table, freeing=min(halved) < 0)[rank]:
        in_flight, between, on, messages, *_ = moment
        key = moment[_HOW:]
        if key not in rises:
            rises[key] = _rise(own, moment).plus(always)
        gradients, activations, communication, workspace = rises[key]
        for place, count in enumerate(in_flight):
            activations += count * saved[place] + between[place] * halved[place]
            gradients += on[place] * begun[place]
        communication += _dot(messages, of_messages)
        yield Bytes(max(gradients, sums), activations, communication, workspace)


def most_under_way(table: Table, rank: int, stages: Sequence[Holding]) -> int:
    """The most bytes of messages between stages that a rank has at once."""
    of_messages = _message_bytes([stages[s] for s in held_stages(table, rank)])
    return max([_dot(moment.messages, of_messages) for moment in moments(table)[rank]])


def _message_bytes(own: Sequence[Holding]) -> tuple[int, ...]:
    """What each message that `Moment.messages` counts takes."""
    sizes = [UnderWay(s.entry, s.border_back, s.sent, s.entry_back, s.shared) for s in own]
    return tuple(chain.from_iterable(sizes))


def _dot(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum([count * nbytes for count, nbytes in zip(counts, sizes, strict=True)])


def _there(stages: Sequence[Holding], table: Table, rank: int) -> Bytes:
    own = [i for i in held_stages(table, rank) if stages[i].slots or stages[i].landings]
    return _sum(stays(stages[index], table, index) for index in own) if own else NOTHING


def stays(stage: Holding, table: Table, index: int) -> Bytes:
    """Returns what is there of stage `index` at any time, by its schedule: what recorded calls save
    of all micro-batches that are in flight at once, and room where gradients arrive."""
    gradients = 0
    if stage.landings:
        gradients = stage.landings[min(table.schedule.num_microbatches, len(stage.landings)) - 1]
    if stage.slots is None:
        return Bytes(gradients)
    rank = table.owners[index]
    place = held_stages(table, rank).index(index)
    in_flight = max([moment.in_flight[place] for moment in moments(table)[rank]])
    return Bytes(gradients, in_flight * stage.saved)


def end(own: Sequence[StageMemory]) -> Bytes:
    """The most after the schedule: gradients are completed, and the optimizer steps."""
    ends = [s.end for s in own]
    busiest = max(ends, key=lambda b: b.communication + b.workspace, default=NOTHING)
    gradients = sum(b.gradients for b in ends) + sum(s.always.gradients for s in own)
    return Bytes(gradients, 0, busiest.communication, busiest.workspace)


def _rise(own: Sequence[StageMemory], moment: Moment) -> Bytes:
    """Most within an action, or a pair, beside what is in flight."""
    stage, (other, kind) = own[moment.stage], moment.beside
    if moment.beside == OVER:
        return Bytes(activations=-stage.saved)
    if kind < 0:
        return rise(stage, moment.kind, moment.first, moment.whole)
    both = pair_rise(stage, own[other], first=moment.first, last=kind >= LAST)
    return both.plus(Bytes(activations=-stage.saved))


def rise(stage: Holding, kind: int, first: bool, whole: bool) -> Bytes:
    """Most within an action, beside what is in flight with its own micro-batch and gradients.
    `whole`: of its micro-batch all was kept, or has been made again."""
    plain = kind & (LAST - 1)
    # In a forward its own micro-batch counts as in flight, but is not all there yet.
    if plain == F:
        return stage.forward.plus(Bytes(activations=-stage.saved))
    if plain == K:
        return stage.keeping.plus(Bytes(activations=-stage.kept_saved))
    if plain == R:
        return stage.remaking.plus(Bytes(activations=-stage.kept_saved))
    if plain & 3 == I:
        return stage.kept_halving if whole else stage.halving
    return stage.backward(first=first, last=kind >= LAST, held=whole, second=plain == W)


def over_time(timeline: Timeline, rank: int, stages: Sequence[Holding]) -> tuple[Point, ...]:
    """What a rank holds beside parameters and optimizer state: most within each action, and after
    it. Offloaded bytes are there but for the time they are away."""
    table, ran = timeline.table, timeline.ran
    own = [stages[s] for s in held_stages(table, rank)]
    there = _there(stages, table, rank)
    points = []
    for position, moment in zip(table.rows[rank], _walk(table, rank), strict=True):
        stage, plain = own[moment.stage], moment.kind & (LAST - 1)
        held = _between(own, moment).plus(there)
        inside = held.plus(rise(stage, moment.kind, moment.first, moment.whole))
        points.append(Point(ran.starts[position], inside))
        if plain in (B, B + HELD, W):
            halved = stage.halved if plain == W else 0
            freed = stage.kept_saved if moment.whole else stage.saved
            held = held.plus(Bytes(activations=0 if stage.slots else -freed - halved))
            held = held.plus(Bytes(communication=-_let_go(moment, len(own)) * stage.shared))
            if moment.first:
                held = held.plus(stage.begun)
        points.append(Point(ran.ends[position], held))
    return tuple(_offloaded(timeline, rank, points))


def _let_go(moment: Moment, stages: int) -> int:
    """Micro-batches that outlive those of the stage before no more when the action is over: no more
    do so than are in flight."""
    size = len(UnderWay._fields)
    counts = UnderWay(*moment.messages[moment.stage * size : (moment.stage + 1) * size])
    left = sum(moment.in_flight[moment.stage :: stages]) - 1
    return max(0, counts.outlived - left)


def _between(own: Sequence[Holding], moment: Moment) -> Bytes:
    held = _sum(s.always for s in own)
    count = len(own)
    held = held.plus(_sum(s.begun for s, on in zip(own, moment.begun[:count], strict=True) if on))
    halved = [sum(moment.halved[place::count]) for place in range(count)]
    counts = zip(moment.in_flight[:count], halved, own, strict=True)
    kept = sum(n * s.saved + half * s.halved for n, half, s in counts if not s.slots)
    whole = moment.in_flight[count:]
    kept += sum(n * s.kept_saved for n, s in zip(whole, own, strict=False))
    messages = _dot(moment.messages, _message_bytes(own))
    return held.plus(Bytes(activations=kept, communication=messages))


def _offloaded(timeline: Timeline, rank: int, points: Sequence[Point]) -> Iterator[Point]:
    """The points without what is away at their time, and new ones where that changes."""
    changes = _changes(timeline, rank)
    if not changes:
        yield from points
        return
    away, at = 0, 0
    held = NOTHING
    for point in points:
        while at < len(changes) and changes[at][0] <= point.time_s:
            away += changes[at][1]
            yield Point(changes[at][0], held.plus(Bytes(activations=-away)))
            at += 1
        held = point.held
        yield Point(point.time_s, held.plus(Bytes(activations=-away)))


def _changes(timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    """(time, bytes that leave for the host, or come back if negative) in order."""
    table, ran = timeline.table, timeline.ran
    found = []
    for position in table.rows[rank]:
        nbytes = timeline.offload_bytes[table.items[position].stage]
        if position in ran.gone:
            found.append((ran.gone[position], nbytes))
        if position in ran.back:
            found.append((ran.back[position], -nbytes))
    return sorted(found, key=lambda change: (change[0], -change[1]))


def _sum(parts: Iterator[Bytes]) -> Bytes:
    total = NOTHING
    for part in parts:
        total = total.plus(part)
    return total
