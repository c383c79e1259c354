"""What the files of `planner/schedules` share: finding them, stage placements, rows of actions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files
from meshwright.ir.plan.plan import ScheduleTable
from meshwright.ir.plan.schedule import (
    Action,
    Schedule,
    Work,
    halves_backwards,
    in_flight,
    kept_beside_others,
    says_when_to_recompute,
)
from meshwright.planner import schedules

F, B, I, W = Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT  # noqa: E741

_FILES = Files(schedules, "schedule")
SCHEDULES = _FILES.names
"""Keys of the schedules: the file names."""
MADE = "synthesised"
"""Name of schedules that a solver makes for the stages of a plan."""
K, R = Work.FORWARD_KEEPING, Work.RECOMPUTE


USUAL = "one_f_one_b"
"""The schedule that searchers begin with, and that stays where others gain nothing."""
RANKS, COUNTS = (1, 2, 3, 4), (1, 2, 3, 4, 6, 12)
"""Pipeline ranks and micro-batches of the tables from which a schedule's traits are read."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a schedule may do, as far as its tables of small cases show."""

    halves: bool
    """Whether it takes backwards in two halves."""
    early: bool
    """Whether it says when stages recompute: equal to another where none does."""
    kept: int | None
    """Micro-batches, at most, that a stage keeps though it makes others again; None: any number."""
    pairs: bool = False
    """Whether actions run together, so that collectives of each have the other beside them."""


def _module(name: str) -> Any:
    _FILES.check(name)
    if name == MADE:
        raise PlanError(
            f"a schedule file cannot be called {MADE!r}: that is the name of schedules that are "
            "made for a plan; give the file another name"
        )
    return _FILES.load(name)


def stages_per_rank(name: str) -> tuple[int, ...]:
    """How many stages a pipeline rank may hold under the schedule, the usual one first."""
    found: tuple[int, ...] = _module(name).STAGES_PER_RANK
    return found


@cache
def traits(name: str) -> Traits:
    """What bounds and searchers must know of a schedule, read from its tables."""
    tables = [table for table in _small_tables(name) if table]
    if not tables:
        raise PlanError(
            f"schedule {name!r} has no table for {RANKS[0]} to {RANKS[-1]} ranks and "
            f"{COUNTS[0]} to {COUNTS[-1]} micro-batches; it needs at least one"
        )
    kept = {table.num_microbatches: 0 for table in tables}
    for table in tables:
        count = table.num_microbatches
        kept[count] = max(kept[count], kept_beside_others(table))
    grows = len(kept) > 1 and kept[max(kept)] > max(kept[n] for n in kept if n < max(kept))
    return Traits(
        halves=any(map(halves_backwards, tables)),
        early=any(map(says_when_to_recompute, tables)),
        kept=None if grows else max(kept.values()),
        pairs=any(table.pairs for table in tables),
    )


def recomputes_early(name: str) -> bool:
    """Whether the schedule says when stages recompute."""
    return traits(name).early


@cache
def _small_tables(name: str) -> tuple[Schedule | None, ...]:
    """Of all small cases in one order; None where the schedule refuses one."""
    module, found = _module(name), []
    for chunks, ranks, count in product(stages_per_rank(name), RANKS, COUNTS):
        try:
            found.append(module.schedule(ranks * chunks, count, ranks))
        except PlanError:
            found.append(None)
    return tuple(found)


@cache
def twin(name: str, other: str) -> bool:
    """Whether two schedules are the same under two names."""
    if stages_per_rank(name) != stages_per_rank(other):
        return False
    pairs = zip(_small_tables(name), _small_tables(other), strict=True)
    return all(a and b and (a.ranks, a.pairs) == (b.ranks, b.pairs) for a, b in pairs)


def fits(name: str, num_stages: int, num_microbatches: int, num_ranks: int) -> bool:
    """Whether the schedule has a table of that size; one that has all small ones has it."""
    if all(_small_tables(name)):
        return True
    try:
        make_schedule(name, num_stages, num_microbatches, num_ranks)
    except PlanError:
        return False
    return True


@cache
def most_held(name: str, num_ranks: int, num_microbatches: int) -> tuple[int, ...]:
    """Micro-batches that each stage of one per rank holds at most."""
    if num_microbatches > MANY * num_ranks and _is_bounded(name):
        num_microbatches = MANY * num_ranks
    return in_flight(make_schedule(name, num_ranks, num_microbatches, num_ranks))


MANY = 3
"""Micro-batches per rank beyond which more of them leave the number in flight as it is, if they do
so on a few ranks."""


@cache
def _is_bounded(name: str) -> bool:
    ranks = RANKS[-1]
    few, many = (make_schedule(name, ranks, n * ranks, ranks) for n in (MANY, 2 * MANY))
    return in_flight(few) == in_flight(many)


@cache
def make_schedule(name: str, num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """The schedule of file `planner/schedules/<name>.py`; PlanError if it does not fit."""
    if min(num_stages, num_microbatches, num_ranks) < 1:
        raise PlanError(
            f"schedule {name!r}: {num_stages} stages, {num_microbatches} micro-batches and "
            f"{num_ranks} ranks must each be at least 1"
        )
    found: Schedule = _module(name).schedule(num_stages, num_microbatches, num_ranks)
    _check_traits(found, traits(name), f"{num_ranks} ranks and {num_microbatches} micro-batches")
    return found


def _check_traits(found: Schedule, known: Traits, where: str) -> None:
    """Bounds hold for what small cases show: a table that does more has none."""
    more = ""
    if not known.halves and halves_backwards(found):
        more = "takes backwards in halves"
    if not known.pairs and found.pairs:
        more = "has pairs of actions"
    if not known.early and says_when_to_recompute(found):
        more = "says when stages recompute"
    if known.kept is not None and kept_beside_others(found) > known.kept:
        more = f"keeps {kept_beside_others(found)} micro-batches beside others made again"
    if more:
        raise PlanError(
            f"schedule {found.name!r} {more} with {where}, but not so with {RANKS[0]} to "
            f"{RANKS[-1]} ranks and {COUNTS[0]} to {COUNTS[-1]} micro-batches, from which the "
            "search learns what it may do; give small cases the same form"
        )


def plan_table(name: str, schedule: Schedule) -> ScheduleTable:
    """A schedule as a plan holds it."""
    return ScheduleTable(name=name, rows=tuple(str(schedule).splitlines()))


def chunks_of(name: str, num_stages: int, num_ranks: int, only: int | None = None) -> int:
    """Stages per rank, after checking that ranks share the stages equally (`only`: exactly so)."""
    if num_stages % num_ranks or (only and num_stages != only * num_ranks):
        wanted = only or max(1, num_stages // num_ranks)
        raise PlanError(
            f"schedule {name!r} needs {only or 'as many'} stages on each of {num_ranks} ranks, "
            f"given {num_stages} stages; nearest is {wanted * num_ranks}"
        )
    return num_stages // num_ranks


def early_backward(name: str, num_microbatches: int, warm_ups: tuple[int, ...]) -> Schedule:
    """One stage per rank: `warm_ups[stage]` forwards, then backward and forward in turn."""
    return Schedule(
        name, tuple(tuple(_early_row(s, num_microbatches, k)) for s, k in enumerate(warm_ups))
    )


def _early_row(stage: int, num_microbatches: int, warm_up: int) -> Iterator[Action]:
    yield from (Action(stage, F, m) for m in range(warm_up))
    for done in range(num_microbatches):
        yield Action(stage, B, done)
        if warm_up + done < num_microbatches:
            yield Action(stage, F, warm_up + done)


def recomputing_early(
    name: str, num_stages: int, num_microbatches: int, kept: tuple[int, ...] = ()
) -> Schedule:
    """1F1B in which a stage recomputes before it waits for the gradient; stages of `kept` do not
    recompute at all."""
    rows = []
    for stage in range(num_stages):
        row = _early_row(stage, num_microbatches, min(num_stages - stage, num_microbatches))
        rows.append(tuple(_kept(row) if stage in kept else _made_before(row)))
    return Schedule(name, tuple(rows))


def _kept(row: Iterator[Action]) -> Iterator[Action]:
    for action in row:
        yield Action(action.stage, K, action.microbatch) if action.work is F else action


def _made_before(row: Iterator[Action]) -> Iterator[Action]:
    for action in row:
        if action.work is B:
            yield Action(action.stage, R, action.microbatch)
        yield action


def greedy(
    name: str,
    num_microbatches: int,
    placement: tuple[int, ...],
    cap: int,
    rank_key: Callable[[Action], tuple[int, ...]],
) -> Schedule:
    """List scheduling in unit times with F, I and W: each rank takes the ready action of least key.

    A rank admits a micro-batch to its first stage only while fewer than `cap` others are unfinished
    there. Micro-batches go in order, so an admitted one never waits for a later one.
    """
    num_ranks, num_stages = 1 + max(placement), len(placement)
    held = [tuple(s for s, r in enumerate(placement) if r == rank) for rank in range(num_ranks)]
    count = {(stage, work): 0 for stage in range(num_stages) for work in (F, I, W)}
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]

    def ready(action: Action, first: int) -> bool:
        stage, work, m = action.stage, action.work, action.microbatch
        if m == num_microbatches or (work is F and stage == first and m - count[stage, W] >= cap):
            return False
        if work is F:
            return not stage or count[stage - 1, F] > m
        if work is I and stage + 1 < num_stages:
            return count[stage + 1, I] > m
        return count[stage, F if work is I else I] > m

    while sum(map(len, rows)) < 3 * num_stages * num_microbatches:
        picks = []
        for stages in held:
            heads = [Action(s, work, count[s, work]) for s in stages for work in (F, I, W)]
            picks += sorted((a for a in heads if ready(a, stages[0])), key=rank_key)[:1]
        for action in picks:
            rows[placement[action.stage]].append(action)
            count[action.stage, action.work] += 1
    return Schedule(name, tuple(map(tuple, rows)))
