"""The exact model, for CP-SAT: a start for every action, in ticks.

minimise    the end of the last action
no overlap  of the actions of a rank                                        -> _take_turns
order       forward from stage to stage, backward back, messages between;
            micro-batches first in, first out                               -> _precedences
memory      of what ranks hold from forward to weight half                  -> _memory
whole       where two halves take longer than one whole backward, or hold
            more, a weight half may follow its input half at once           -> _join

Where part of an order is given (`Labels`) only the rest of it is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from meshwright.costmodel.simulate.compiled_schedule import WORKS, B, F, I, W
from meshwright.costmodel.simulate.simulate import simulate
from meshwright.ir.plan.schedule import Work
from meshwright.planner.synthesis.bound import bound_s
from meshwright.planner.synthesis.task import Row, Task, to_schedule

TICKS, ROUGH_TICKS = 10_000, 1000
"""Of the longest action; rough where only an order is looked for. Seconds are rounded down, so that
the model's bound is one."""

Key = tuple[int, int, int]
"""Kind (F, I or W), stage, micro-batch."""
Labels = Sequence[Sequence[int]]
"""Per rank and action of its row: 0 if it keeps its place; neighbours of one other number may
change places."""


@dataclass(frozen=True, slots=True)
class SolvedSchedule:
    """What the solver found."""

    rows: list[Row] | None
    bound_s: float
    """Of the task, if all actions were free."""


def solve(
    task: Task,
    rows: list[Row],
    *,
    effort: float,
    cores: bool,
    free: Labels | None = None,
    relaxed: bool = False,
) -> SolvedSchedule:
    """An order no worse than `rows`, if one is found within `effort`, the solver's own measure.

    `cores`: raise the bound until a schedule is found, rather than improve the schedule.
    `relaxed`: halves are as quick and small as a whole backward: only the bound counts.
    """  # fmt: skip
    model = _ScheduleModel(task, rows, relaxed, ROUGH_TICKS if free else TICKS)
    model.build(free)
    solver = cp_model.CpSolver()
    known = solver.parameters
    known.num_workers = 1
    known.random_seed = 0
    known.max_deterministic_time = effort
    known.linearization_level = 0
    known.optimize_with_core = cores
    status = solver.solve(model.cp)
    bound_s = max(0.0, solver.best_objective_bound) * model.tick_s - model.rounded_s()
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return SolvedSchedule(None, bound_s)
    starts = {key: solver.value(start) for key, start in model.starts.items()}
    joined = {key for key, one in model.joined.items() if solver.value(one)}
    return SolvedSchedule(_rows(task, starts, joined), bound_s)


def _rows(task: Task, starts: dict[Key, int], joined: set[tuple[int, int]]) -> list[Row]:
    """In order of start; of equal starts, no action before one that it needs."""
    last, found = len(task.stages), []
    depth = {F: lambda s: s, I: lambda s: 2 * last - s, W: lambda s: 3 * last - s}
    order = sorted((at, m, depth[kind](s), kind, s) for (kind, s, m), at in starts.items())
    for own in task.held:
        row: Row = []
        for _, m, _, kind, stage in order:
            if stage in own and not (kind == W and (stage, m) in joined):
                row.append((stage, B if kind == I and (stage, m) in joined else kind))
        found.append(row)
    return found


class _ScheduleModel:
    """Variables and constraints."""

    def __init__(self, task: Task, rows: list[Row], relaxed: bool, ticks: int) -> None:
        self.task, self.rows, self.relaxed = task, rows, relaxed
        self.cp = cp_model.CpModel()
        self.tick_s = max(max(seconds) for seconds in task.seconds) / ticks
        self.timeline = simulate(to_schedule("given", rows), task.stages, offsets=task.release)
        self.most = self.ticks(self.timeline.step_s) + 1
        self.counts = range(task.num_microbatches)
        self.starts: dict[Key, cp_model.IntVar] = {}
        self.joined: dict[tuple[int, int], cp_model.IntVar] = {}
        """(stage, micro-batch) -> whether its backward is whole."""
        self.length: dict[Key, int | cp_model.LinearExpr] = {}
        self.ends: dict[Key, cp_model.IntVar] = {}
        """Of actions whose length is not fixed."""

    def ticks(self, seconds: float) -> int:
        return int(seconds / self.tick_s * (1 + 1e-12))

    def rounded_s(self) -> float:
        """By how much a bound may be too high, as actions that are followed by no other of their
        stage, or find the channel at work, may be shorter than their like."""
        count, found = self.task.num_microbatches, 0.0
        for stage, seconds, least in zip(
            self.task.stages, self.task.seconds, self.task.least_s, strict=True
        ):
            for kind in (F, I, W):
                usual = stage.program(kind).own_s
                found += count * max(0.0, seconds[kind] - usual) + usual - least[kind]
        return found

    def build(self, free: Labels | None) -> None:
        for kind, stage, m in self._order():
            earliest = self.ticks(self.task.release[self.task.placement[stage]])
            self.starts[kind, stage, m] = self.cp.new_int_var(
                min(earliest, self.most), self.most, ""
            )
            self.length[kind, stage, m] = self.ticks(self._seconds(kind, stage))
        for stage in range(len(self.task.stages)):
            self._join(stage)
        self.intervals = {key: self._interval(key) for key in self.starts}
        self._precedences()
        self._take_turns(free)
        for rank in range(self.task.num_ranks):
            self._memory(rank)
        self._hint()

    def _order(self) -> list[Key]:
        """All variables as they come in time: the solver branches on them in that order."""
        starts = self.timeline.ran.starts
        rows = zip(self.rows, self.timeline.table.rows, strict=True)
        found = [
            (starts[position], key)
            for row, positions in rows
            for keys, position in zip(_keys(row), positions, strict=True)
            for key in keys
        ]
        return [key for _, key in sorted(found)]

    def _seconds(self, kind: int, stage: int) -> float:
        seconds = self.task.seconds[stage]
        if kind == W and self.relaxed:
            return max(0.0, min(seconds[W], seconds[B] - seconds[I]))
        return seconds[kind]

    def _end(self, key: Key) -> cp_model.LinearExpr:
        length = self.length[key]
        return self.starts[key] + length if isinstance(length, int) else self.ends[key]

    def _interval(self, key: Key) -> cp_model.IntervalVar:
        length = self.length[key]
        if isinstance(length, int):
            return self.cp.new_fixed_size_interval_var(self.starts[key], length, "")
        return self.cp.new_interval_var(self.starts[key], length, self.ends[key], "")

    def _join(self, stage: int) -> None:
        seconds = self.task.seconds[stage]
        saved_s = seconds[I] + seconds[W] - seconds[B]
        costly = saved_s > 1e-9 * seconds[B] or self.task.halved[stage]
        if self.relaxed or not costly:
            return
        shorter = min(self.ticks(max(0.0, saved_s)), self.ticks(seconds[W]))
        for m in self.counts:
            one = self.joined[stage, m] = self.cp.new_bool_var("")
            if shorter:
                self.length[W, stage, m] = self.ticks(seconds[W]) - shorter * one
                self.ends[W, stage, m] = self.cp.new_int_var(0, self.most, "")
            start = self.starts[W, stage, m]
            self.cp.add(start == self._end((I, stage, m))).only_enforce_if(one)
            if stage:  # its message leaves after the whole of it
                sent = self._end((W, stage, m)) + self.ticks(self.task.sends_s[stage - 1])
                self.cp.add(self.starts[I, stage - 1, m] >= sent).only_enforce_if(one)

    def _precedences(self) -> None:
        last = len(self.task.stages) - 1
        sends = [self.ticks(send_s) for send_s in self.task.sends_s]
        end = self.cp.new_int_var(min(self.ticks(bound_s(self.task)), self.most), self.most, "")
        for stage in range(last + 1):
            for m in self.counts:
                if stage < last:
                    self._after((F, stage, m), (F, stage + 1, m), sends[stage])
                    self._after((I, stage + 1, m), (I, stage, m), sends[stage])
                else:
                    self._after((F, stage, m), (I, stage, m))
                self._after((I, stage, m), (W, stage, m))
                if m:
                    for kind in (F, I, W):
                        self._after((kind, stage, m - 1), (kind, stage, m))
            self.cp.add(end >= self._end((W, stage, self.task.num_microbatches - 1)))
        self.cp.minimize(end)

    def _after(self, first: Key, second: Key, sent: int = 0) -> None:
        self.cp.add(self.starts[second] >= self._end(first) + sent)

    def _take_turns(self, free: Labels | None) -> None:
        for rank, row in enumerate(self.rows):
            if free is None:
                own = self.task.held[rank]
                self.cp.add_no_overlap([x for k, x in self.intervals.items() if k[1] in own])
                continue
            before: list[Key] = []
            for group in _groups(_keys(row), free[rank]):
                if len(group) > 1:
                    self.cp.add_no_overlap([self.intervals[key] for key in group])
                for first in _ends(before, 1):
                    for second in _ends(group, -1):
                        self._after(first, second)
                before = group

    def _memory(self, rank: int) -> None:
        own, room = self.task.held[rank], self.task.capacity[rank]
        count = self.task.num_microbatches
        most = sum(self.task.stages[s].saved_bytes + self.task.halved[s] for s in own) * count
        if most <= room:
            return
        for stage in own:
            saved = self.task.stages[stage].saved_bytes
            fit = int(room // saved) if saved else count
            for m in range(fit, count):
                self._after((W, stage, m - fit), (F, stage, m))
        if len(own) > 1 or (self.task.halved[own[0]] and not self.relaxed):
            self._cumulative(own, int(room))

    def _cumulative(self, own: Sequence[int], room: int) -> None:
        held: list[cp_model.IntervalVar] = []
        demands: list[int | cp_model.LinearExpr] = []
        for stage in own:
            halved = 0 if self.relaxed else self.task.halved[stage]
            for m in self.counts:
                end = self._end((W, stage, m))
                held.append(self._until((F, stage, m), end))
                demands.append(self.task.stages[stage].saved_bytes)
                if halved:
                    held.append(self._until((I, stage, m), end))
                    demands.append(halved - halved * self.joined[stage, m])
        self.cp.add_cumulative(held, demands, room)

    def _until(self, key: Key, end: cp_model.LinearExpr) -> cp_model.IntervalVar:
        return self.cp.new_interval_var(
            self.starts[key], self.cp.new_int_var(0, self.most, ""), end, ""
        )

    def _hint(self) -> None:
        ran, table = self.timeline.ran, self.timeline.table
        codes = {work: code for code, work in enumerate(WORKS)}
        for position in range(len(table.items)):
            action = table.action(position)
            kind, at = codes[action.work], self.ticks(ran.starts[position])
            where = action.stage, action.microbatch
            if where in self.joined and action.work is not Work.FORWARD:
                self.cp.add_hint(self.joined[where], kind == B)
            if kind == B:
                first = at + self.ticks(self.task.seconds[action.stage][I])
                self.cp.add_hint(self.starts[W, *where], min(first, self.most))
            self.cp.add_hint(self.starts[I if kind == B else kind, *where], min(at, self.most))


def _keys(row: Row) -> list[tuple[Key, ...]]:
    """Of each action of a row; a whole backward has two."""
    seen: dict[tuple[int, int], int] = {}
    found = []
    for stage, kind in row:
        keys = []
        for half in (I, W) if kind == B else (kind,):
            number = seen.get((stage, half), 0)
            seen[stage, half] = number + 1
            keys.append((half, stage, number))
        found.append(tuple(keys))
    return found


def _groups(keys: Sequence[tuple[Key, ...]], labels: Sequence[int]) -> list[list[Key]]:
    """Runs of actions that may change places, and those that may not, one by one."""
    found: list[list[Key]] = []
    before = 0
    for own, label in zip(keys, labels, strict=True):
        if label and label == before:
            found[-1] += own
        else:
            found += [list(own)] if label else [[key] for key in own]
        before = label
    return found


def _ends(group: Sequence[Key], step: int) -> list[Key]:
    """The last (step 1) or first (-1) of each stage and kind: others come before, or after."""
    found: dict[tuple[int, int], Key] = {}
    for key in group[::step]:
        found[key[:2]] = key
    return list(found.values())
