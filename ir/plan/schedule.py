"""A pipeline schedule as data: for each pipeline rank, the actions it takes in order.

The text form is that of torch's pipelining runtime: `0F1` is the forward of micro-batch 1 on stage
0; `B` is a full backward, `I` its input half and `W` its weight half. Two more are of stages that
recompute: `K` is a forward that keeps all that the backward needs, `R` makes it again, so that the
backward after it need not. Without them each block is made again within the backward. `0F3+3B1` are
a pair: the two run together, and collectives of each have work of the other beside them.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from meshwright.ir.errors import PlanError
from meshwright.ir.text.plain_text import shown


class Work(StrEnum):
    """What an action computes."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    FORWARD_KEEPING = "K"
    RECOMPUTE = "R"


FORWARDS = frozenset({Work.FORWARD, Work.FORWARD_KEEPING})
EARLY = frozenset({Work.FORWARD_KEEPING, Work.RECOMPUTE})
"""After these a backward finds all that it needs."""


_ENDS = frozenset({Work.BACKWARD, Work.BACKWARD_WEIGHT})
_ACTION = re.compile(r"([0-9]{1,7})([FBIWKR])([0-9]{1,7})")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work of one stage on one micro-batch."""

    stage: int
    work: Work
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.work}{self.microbatch}"


def parse_action(text: str) -> Action:
    """The action that `str` prints as `text`."""
    match = _ACTION.fullmatch(text)
    if not match:
        rule = "<stage><F|B|I|W|K|R><micro-batch>, such as 0F1"
        raise PlanError(f"action {shown(text)} is not {rule}")
    return Action(int(match[1]), Work(match[2]), int(match[3]))


Pair = tuple[Action, Action]
PAIRED = "+"
"""Between two actions that run together."""


@dataclass(frozen=True)
class Schedule:
    """Actions per pipeline rank: a group of devices that runs the same stages."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    pairs: frozenset[Pair] = frozenset()
    """Actions that run together; in their row one comes right after the other."""

    def __str__(self) -> str:
        return "\n".join(self.rows)

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """Each row as text; one table is that of many plans of a search."""
        rows = [[PAIRED.join(map(str, unit)) for unit in self.units(row)] for row in self.ranks]
        return tuple(map(" ".join, rows))

    def units(self, row: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        """What a row takes one after the other: single actions, and pairs."""
        index = 0
        while index < len(row):
            size = 1 + (row[index : index + 2] in self.pairs)
            yield row[index : index + size]
            index += size

    @cached_property
    def num_stages(self) -> int:
        return 1 + max(a.stage for row in self.ranks for a in row)

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max(a.microbatch for row in self.ranks for a in row)

    @cached_property
    def works(self) -> frozenset[Work]:
        """The kinds of work that it has."""
        return frozenset([action.work for row in self.ranks for action in row])

    @cached_property
    def paired(self) -> frozenset[int]:
        """Stages with an action that runs together with another."""
        return frozenset([action.stage for pair in self.pairs for action in pair])

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs `stage`."""
        return self._ranks[stage]

    @cached_property
    def _ranks(self) -> dict[int, int]:
        rows = reversed([*enumerate(self.ranks)])
        return {stage: rank for rank, row in rows for stage in {a.stage for a in row}}


def parse_schedule(name: str, rows: tuple[str, ...]) -> Schedule:
    """The schedule whose rows print as `rows`."""
    units = [[tuple(map(parse_action, text.split(PAIRED))) for text in row.split()] for row in rows]
    pairs: set[Pair] = set()
    for unit in (unit for row in units for unit in row if len(unit) > 1):
        if len(unit) > 2:
            said = PAIRED.join(map(str, unit))
            raise PlanError(f"{shown(said)}: two actions may run together, not {len(unit)}")
        pairs.add((unit[0], unit[1]))
    ranks = tuple(tuple(action for unit in row for action in unit) for row in units)
    return Schedule(name, ranks, frozenset(pairs))


def halves_backwards(schedule: Schedule) -> bool:
    """Whether some backward is taken in two halves."""
    return Work.BACKWARD_INPUT in schedule.works


def says_when_to_recompute(schedule: Schedule) -> bool:
    """Whether some forward keeps all, or something is made again ahead of its backward."""
    return not schedule.works.isdisjoint(EARLY)


def kept_beside_others(schedule: Schedule) -> int:
    """Micro-batches that a stage keeps whole though it makes others again, at most."""
    if Work.FORWARD_KEEPING not in schedule.works:
        return 0
    held = Counter(a.stage for row in schedule.ranks for a in row if a.work is Work.FORWARD_KEEPING)
    count = schedule.num_microbatches
    return max((kept for kept in held.values() if kept < count), default=0)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most micro-batches whose forward is begun and whose backward is not over."""
    held, most = [0] * schedule.num_stages, [0] * schedule.num_stages
    for row in schedule.ranks:
        for action in row:
            if action.work in FORWARDS:
                held[action.stage] += 1
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.work in _ENDS:
                held[action.stage] -= 1
    return tuple(most)


def dependencies(action: Action, last_stage: int) -> tuple[Action, ...]:
    """The actions that must be over before `action` starts, besides the order of its own rank."""
    stage, microbatch = action.stage, action.microbatch
    match action.work:
        case Work.FORWARD | Work.FORWARD_KEEPING:
            return (Action(stage - 1, Work.FORWARD, microbatch),) if stage else ()
        case Work.BACKWARD | Work.BACKWARD_INPUT:
            own = Action(stage, Work.FORWARD, microbatch)
            if stage == last_stage:
                return (own,)
            # A whole backward of the next stage includes its input half.
            return (own, Action(stage + 1, Work.BACKWARD_INPUT, microbatch))
        case Work.BACKWARD_WEIGHT:
            return (Action(stage, Work.BACKWARD_INPUT, microbatch),)
        case Work.RECOMPUTE:
            return (Action(stage, Work.FORWARD, microbatch),)


_WHOLE = frozenset({Work.BACKWARD})
_SPLIT = frozenset({Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT})
_LEGAL = frozenset(
    frozenset(begun | ended)
    for begun in ({Work.FORWARD}, {Work.FORWARD_KEEPING}, {Work.FORWARD, Work.RECOMPUTE})
    for ended in (_WHOLE, _SPLIT)
)


def check_schedule(schedule: Schedule) -> None:
    """PlanError unless every stage does each micro-batch once and the order cannot deadlock."""
    where = f"schedule {schedule.name!r}"
    if not schedule.ranks or not all(schedule.ranks):
        raise PlanError(f"{where}: every pipeline rank needs at least one action")
    seen: dict[Action, int] = {}
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if action in seen:
                raise PlanError(f"{where}: {action} appears twice")
            if action.work is Work.RECOMPUTE and not seen.keys().isdisjoint(_backwards(action)):
                raise PlanError(f"{where}: {action} comes after the backward that it is for")
            seen[action] = rank
    microbatches = range(schedule.num_microbatches)
    owners: dict[int, set[int]] = {}
    works: dict[tuple[int, int], set[Work]] = {}
    for action, rank in seen.items():
        owners.setdefault(action.stage, set()).add(rank)
        works.setdefault((action.stage, action.microbatch), set()).add(action.work)
    for stage in range(schedule.num_stages):
        if len(own := owners.get(stage, set())) != 1:
            raise PlanError(f"{where}: stage {stage} runs on ranks {sorted(own)[:8]}, not one")
        for microbatch in microbatches:
            kinds = works.get((stage, microbatch), set())
            if kinds not in _LEGAL:
                raise PlanError(
                    f"{where}: stage {stage} micro-batch {microbatch} has {sorted(kinds)}; "
                    "it needs F and B, or F, I and W; K may stand for F, or R follow it"
                )
    for pair in sorted(schedule.pairs):
        _check_pair(schedule, pair, seen)
    order_of(schedule)


def _check_pair(schedule: Schedule, pair: Pair, ranks: Mapping[Action, int]) -> None:
    """PlanError unless the two may run together, whatever the rest of the schedule does."""
    first, second = pair
    where = f"schedule {schedule.name!r}: {first} and {second} cannot be a pair: "
    if not {first, second} <= ranks.keys() or ranks[first] != ranks[second]:
        raise PlanError(f"{where}they are not on one pipeline rank")
    row = schedule.ranks[ranks[first]]
    if row[row.index(first) + 1 : row.index(first) + 2] != (second,):
        raise PlanError(f"{where}{second} does not come right after {first}")
    if first.work is not Work.FORWARD or second.work is not Work.BACKWARD:
        raise PlanError(f"{where}a pair is an F and a whole B after it")
    if first.microbatch == second.microbatch:
        raise PlanError(f"{where}of one micro-batch one waits for the other")
    if first.stage == second.stage:
        raise PlanError(f"{where}both are of stage {first.stage}; a pair is of two stages")


def _backwards(action: Action) -> set[Action]:
    works = (Work.BACKWARD, Work.BACKWARD_INPUT)
    return {Action(action.stage, work, action.microbatch) for work in works}


_STANDS_FOR = {Work.BACKWARD: Work.BACKWARD_INPUT, Work.FORWARD_KEEPING: Work.FORWARD}
"""What others wait for is done by these too: a whole backward includes its input half."""


def order_of(schedule: Schedule) -> tuple[Action, ...]:
    """All actions in one order that respects rows and dependencies; PlanError names a deadlock."""
    last = schedule.num_stages - 1
    done: set[Action] = set()
    rows = [[*schedule.units(row)] for row in schedule.ranks]
    heads = [0] * len(rows)
    order: list[Action] = []
    while len(order) < sum(map(len, schedule.ranks)):
        before = len(order)
        for rank, row in enumerate(rows):
            # Of a pair both must have what they need.
            while heads[rank] < len(row) and all(
                done.issuperset(dependencies(action, last)) for action in row[heads[rank]]
            ):
                for action in row[heads[rank]]:
                    done.add(action)
                    if action.work in _STANDS_FOR:
                        done.add(Action(action.stage, _STANDS_FOR[action.work], action.microbatch))
                    order.append(action)
                heads[rank] += 1
        if len(order) == before:
            heads_of = zip(rows, heads, strict=True)
            stuck = [
                f"rank {r} at {PAIRED.join(map(str, row[h]))}"
                for r, (row, h) in enumerate(heads_of)
                if h < len(row)
            ]
            raise PlanError(f"schedule {schedule.name!r} deadlocks: {', '.join(stuck[:8])}")
    return tuple(order)
