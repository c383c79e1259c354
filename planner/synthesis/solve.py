"""A schedule for a task: list schedules, then CP-SAT on all of it, or on how it begins and ends.

Small tasks are solved as a whole, often to a proof. In larger ones the middle of a list schedule is
as good as it can be most of the time, and what is lost is lost on the way in and out: there the
order is made anew. A schedule for few micro-batches that is solved as a whole, with its middle
repeated, is another candidate. The simulator judges all; limits are the solver's own measure of
work, so that equal tasks give equal schedules.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from meshwright.costmodel.simulate.compiled_schedule import B, I, W
from meshwright.costmodel.simulate.simulate import simulate
from meshwright.ir.deadline import TimeUp, check_time
from meshwright.ir.plan.schedule import Schedule, check_schedule
from meshwright.planner.problem.schedule_tools import MADE as NAME
from meshwright.planner.synthesis.bound import bound_s
from meshwright.planner.synthesis.greedy import RULES, Rules, list_schedule
from meshwright.planner.synthesis.model import SolvedSchedule, solve
from meshwright.planner.synthesis.repeat import extended
from meshwright.planner.synthesis.task import (
    Row,
    Task,
    excess_bytes,
    step_s,
    to_rows,
    to_schedule,
)

WHOLE = 400
"""Actions up to which a task is solved as a whole."""
ENDS = (120, 180, 240)
"""Actions that are free at both ends of a larger one: more and more."""
LARGE = 1000
"""Actions from which the ends are left as they are."""
FEW = 6
"""Rules that are tried on large tasks: those that are best for few micro-batches."""
CLOSE = 1e-3
"""Steps this close to the bound need no better."""


@dataclass(frozen=True, slots=True)
class Synthesis:
    """A legal schedule that holds no more than it may."""

    schedule: Schedule
    step_s: float
    """By the event simulator."""
    bound_s: float
    """No schedule takes less."""

    @property
    def gap(self) -> float:
        """By how much a better schedule could be quicker."""
        return self.step_s / self.bound_s - 1 if self.bound_s else 0.0


def synthesise(task: Task, hints: Iterable[Schedule] = (), *, effort: float = 1.0) -> Synthesis:
    """The best schedule found: never worse than any of `hints` that fits.

    `effort`: about the seconds that CP-SAT takes on an idle core. Infeasible where a rank cannot
    hold one micro-batch.
    """
    least_s = bound_s(task)
    best = _Best(task)
    try:
        for hint in hints:
            check_schedule(hint)
            best.offer(hint)
        for rows in _greedy(task):
            best.offer_rows(rows)
        if best.step_s > least_s * (1 + CLOSE):
            least_s = max(least_s, _improve(task, best, least_s, effort))
    except TimeUp:
        if best.schedule is None:
            raise
    assert best.schedule is not None, "list schedules fit"
    best.join()
    return Synthesis(best.schedule, best.step_s, min(least_s, best.step_s))


class _Best:
    """The best schedule so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.schedule: Schedule | None = None
        self.step_s = float("inf")

    def offer(self, schedule: Schedule) -> bool:
        """Keeps it if it fits and is better."""
        check_time()
        if excess_bytes(self.task, schedule) > 0:
            return False
        found_s = step_s(self.task, schedule)
        better = found_s < self.step_s * (1 - 1e-9)
        if better:
            self.schedule, self.step_s = schedule, found_s
        return better

    def offer_rows(self, rows: list[Row]) -> bool:
        return self.offer(to_schedule(NAME, rows))

    @property
    def rows(self) -> list[Row]:
        assert self.schedule is not None
        return to_rows(self.schedule)

    def join(self) -> None:
        """Halves that follow each other become one where nothing is lost: fewer actions."""
        if self.schedule is None or self.schedule.name != NAME:
            return
        joined = to_schedule(NAME, [_joined(row) for row in self.rows])
        if excess_bytes(self.task, joined) <= 0:
            found_s = step_s(self.task, joined)
            if found_s <= self.step_s:
                self.schedule, self.step_s = joined, found_s


def _joined(row: Row) -> Row:
    """Only where the weight half is that of the input half: none of its stage is put off."""
    found: Row = []
    put_off: dict[int, int] = {}
    for stage, kind in row:
        put_off[stage] = put_off.get(stage, 0) + {I: 1, W: -1}.get(kind, 0)
        if kind == W and found[-1] == (stage, I) and not put_off[stage]:
            found[-1] = (stage, B)
        else:
            found.append((stage, kind))
    return found


def _greedy(task: Task) -> Iterator[list[Row]]:
    """List schedules, best first: a few, as the simulator may see them differently."""
    rules = RULES
    few = _few(task)
    if task.num_microbatches > few:
        small = replace(task, num_microbatches=few)
        rules = tuple(rule for _, rule in _fewest(small, RULES))
    yield from [rows for rows, _ in _fewest(task, rules)]


def _fewest(task: Task, rules: tuple[Rules, ...]) -> list[tuple[list[Row], Rules]]:
    """The `FEW` shortest list schedules; others are given up as soon as that is seen."""
    best: list[tuple[float, list[Row], Rules]] = []
    for rule in rules:
        check_time()
        made = list_schedule(task, rule, best[-1][0] if len(best) == FEW else inf)
        if made:
            insort(best, (*made, rule), key=lambda entry: entry[0])
            del best[FEW:]
    return [(rows, rule) for _, rows, rule in best]


def _improve(task: Task, best: _Best, least_s: float, effort: float) -> float:
    """Offers better schedules; the best bound that is proven on the way."""
    actions = 3 * len(task.stages) * task.num_microbatches
    if actions <= WHOLE:
        return _whole(task, best, effort)
    if actions <= LARGE:
        _ends(task, best, effort)
        return least_s
    few = _few(task)
    if task.num_microbatches <= few:
        return least_s  # there is nothing shorter to extend
    small = replace(task, num_microbatches=few)
    solved = synthesise(small, effort=effort / 2)
    for rows in extended(small, to_rows(solved.schedule), task.num_microbatches - few):
        best.offer_rows(rows)
    return least_s


def _few(task: Task) -> int:
    """Micro-batches that fill a pipeline and let it come to rest."""
    return task.num_ranks + (task.num_ranks + 1) // 2


def _whole(task: Task, best: _Best, effort: float) -> float:
    """From below first, which ends soonest; then from above, from the best schedule known."""
    bound = 0.0
    for cores in (True, False):
        answer = solve(task, best.rows, effort=effort / 2, cores=cores)
        bound = max(bound, _counted_s(task, answer))
        if answer.rows:
            best.offer_rows(answer.rows)
        if best.step_s <= bound * (1 + CLOSE):
            return bound
    if _costly(task):
        answer = solve(task, best.rows, effort=effort / 2, cores=True, relaxed=True)
        bound = max(bound, answer.bound_s)
    return bound


def _counted_s(task: Task, answer: SolvedSchedule) -> float:
    """The bound, where halves cost nothing: else the model leaves some schedules out."""
    return 0.0 if _costly(task) else answer.bound_s


def _costly(task: Task) -> bool:
    return any(task.halved) or any(s[I] + s[W] > s[B] * (1 + 1e-9) for s in task.seconds)


def _ends(task: Task, best: _Best, effort: float) -> None:
    """Orders the first and the last actions anew, and more of them while that helps."""
    for free in ENDS:
        rows = best.rows
        labels = _labels(task, rows, free)
        answer = solve(task, rows, effort=effort / len(ENDS), cores=True, free=labels)
        if not answer.rows:
            return
        best.offer_rows(answer.rows)


def _labels(task: Task, rows: list[Row], free: int) -> list[list[int]]:
    """1 for early actions and 2 for late ones, as many as may be free."""
    timeline = simulate(to_schedule(NAME, rows), task.stages, offsets=task.release)
    step_s = timeline.step_s
    near = sorted(min(at, step_s - at) for at in timeline.ran.starts)
    early, late = near[free - 1], step_s - near[free - 1]
    found = []
    for row in timeline.table.rows:
        begins = [timeline.ran.starts[position] for position in row]
        found.append([1 if at <= early else 2 * (at >= late) for at in begins])
    return found
