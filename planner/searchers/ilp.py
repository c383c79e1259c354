"""Best-first branch and bound over the whole space; the simulator judges what may be best.

A frame fixes pipeline ranks and micro-batches. `planner.relaxation` says what no choice of a frame
can beat; frames are taken in that order, and those that cannot come near the best plan found are
left out unseen. `planner.frame_search` finds the best stages of a frame: layouts come from the
solver inside blocks, cuts, devices, meshes and recomputed blocks from a dynamic programme over
tables. What comes out best is simulated, and improved by small steps as long as that helps. Small
frames that are still open are then gone through choice by choice, so that nothing is left open.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from meshwright.ir.plan import Plan
from meshwright.planner.candidates import Choice, build_plan
from meshwright.planner.choice_space import Choices
from meshwright.planner.constraints import broken, pinned
from meshwright.planner.frame_search import Finalist, FrameSearch
from meshwright.planner.leaf_bound import LeafBound
from meshwright.planner.obey import obey
from meshwright.planner.objectives import rating
from meshwright.planner.offers import TIE, Offer
from meshwright.planner.predict import excess_bytes
from meshwright.planner.problem import Problem
from meshwright.planner.refine import neighbours, other_schedules
from meshwright.planner.relaxation import Bound, Frame, Relaxation, frames
from meshwright.planner.run_costs import RunCosts

SURE = 1.002
"""Bounds must exceed the best step by so much: simulated steps are rounded, and exact to 0.1 %."""
CLOSE = 1.1
"""Finalists within this factor of the best step are simulated."""
FRUITLESS = 12
"""After so many frames without a better plan no more are looked at closer."""
POLISHED, STEPS, ACTIONS = 3, 400, 150_000
"""Plans that are improved, simulations spent on that, and schedule actions in all of them."""
LEAVES, WORK = 20_000, 60_000
"""Choices of a frame that are gone through one by one, and the work of simulating them: about the
blocks, devices and actions in all of them."""

Value = tuple[float, ...]


@dataclass(slots=True)
class State:
    """What the search has seen."""

    seen: set[Choice] = field(default_factory=set)
    judged: list[tuple[Value, Choice]] = field(default_factory=list)
    best_s: float = np.inf
    """The shortest step of a choice that fits."""

    def limit(self) -> float:
        """Bounds above this are of no use."""
        return self.best_s * (1 + TIE) * SURE


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices = Choices(problem)
        self.runs = RunCosts(problem)
        self.relaxation = Relaxation(self.runs, self.choices.places)
        self.solvers = [FrameSearch(self.runs, p, self.choices.sets) for p in self.choices.places]
        self.leaf = LeafBound(self.runs, self.choices.sets)
        self.state = State()
        self.timed = problem.objective != "memory"
        self.bounds: list[tuple[Frame, Bound]] = []

    def run(self) -> Iterator[Offer]:
        found = [(frame, self.relaxation.bound(frame)) for frame in frames(self.problem)]
        self.bounds = sorted(found, key=lambda item: (item[1].seconds, item[0]))
        finite = [item for item in self.bounds if np.isfinite(item[1].seconds)]
        if finite:
            yield Offer(candidates=0, pruned={"memory": len(self.bounds) - len(finite)})
            self.bounds = finite
        if self.timed:
            yield from self._fastest()
        if np.isinf(self.state.best_s) or not self.timed:
            yield from self._smallest()
        yield from self._polish_best()
        yield from self._close()

    # Finalists ------------------------------------------------------------------------------------

    def _fastest(self) -> Iterator[Offer]:
        fruitless = 0
        for frame, bound in self.bounds:
            if bound.seconds > self.state.limit() or fruitless == FRUITLESS:
                break
            before = self.state.best_s
            for finalist in self._finalists(frame, bound):
                if finalist.value > CLOSE * self.state.best_s:
                    break
                yield from self._offer(finalist.choice)
            better = self.state.best_s < before or np.isinf(before)
            fruitless = 0 if better else fruitless + 1

    def _finalists(self, frame: Frame, bound: Bound) -> list[Finalist]:
        limit_s = CLOSE * self.state.best_s
        found = [f for solver in self.solvers for f in solver.fastest(frame, bound, limit_s)]
        return sorted(found, key=lambda item: item.value)

    def _smallest(self) -> Iterator[Offer]:
        found = [
            finalist
            for frame, bound in self.bounds
            for solver in self.solvers
            for finalist in solver.smallest(frame, bound)
        ]
        for finalist in sorted(found, key=lambda item: item.value)[:48]:
            yield from self._offer(finalist.choice)

    def _offer(self, choice: Choice) -> Iterator[Offer]:
        for each in self._starts(choice):
            if each not in self.state.seen:
                yield self._judge(each, self.state.judged)

    def _starts(self, choice: Choice) -> Iterator[Choice]:
        """The choice, or under the schedule that is pinned."""
        pin = pinned(self.problem.constraints, "schedule")
        if pin is None or pin == choice.schedule:
            yield choice
        else:
            yield from other_schedules(self.problem, choice)

    def _judge(self, choice: Choice, held: list[tuple[Value, Choice]]) -> Offer:
        self.state.seen.add(choice)
        plan = build_plan(self.problem, obey(self.problem, choice))
        if not broken(self.problem.constraints, plan, self.problem.graph):
            assert plan.predicted
            value = self._value(plan)
            held.append((value, choice))
            if not value[0]:
                self.state.best_s = min(self.state.best_s, plan.predicted.step_s)
        return Offer(plan=plan)

    def _value(self, plan: Plan) -> Value:
        problem = self.problem
        return float(excess_bytes(problem, plan)), *rating(problem.objective, problem.cluster, plan)

    # Small steps ----------------------------------------------------------------------------------

    def _polish_best(self) -> Iterator[Offer]:
        """Improves the best choices of several numbers of ranks."""
        ranked = sorted(self.state.judged, key=lambda item: item[0])
        firsts = {choice.num_ranks: choice for _, choice in reversed(ranked)}
        size = max((2 * len(c.stages) * c.num_microbatches for _, c in ranked), default=1)
        most = len(self.state.seen) + min(STEPS, ACTIONS // size)
        for value, start in [item for item in ranked if item[1] in firsts.values()][:POLISHED]:
            yield from self._polish(value, start, most)

    def _polish(self, value: Value, start: Choice, most: int) -> Iterator[Offer]:
        """Moves to the best neighbour while that is better."""
        current, better = start, True
        while better:
            held: list[tuple[Value, Choice]] = []
            for choice in neighbours(self.problem, current):
                if choice in self.state.seen or self._hopeless(choice):
                    continue
                if len(self.state.seen) >= most:
                    return
                yield self._judge(choice, held)
            better = bool(held) and min(held, key=lambda item: item[0])[0] < value
            if better:
                value, current = min(held, key=lambda item: item[0])

    def _hopeless(self, choice: Choice) -> bool:
        limit_s = self.state.limit()
        return self.timed and self.leaf.seconds(obey(self.problem, choice)) > limit_s

    # What is still open ---------------------------------------------------------------------------

    def _close(self) -> Iterator[Offer]:
        """Goes through small frames that may still hold the best choice."""
        left, open_s, pruned = float(WORK), np.inf, 0
        for frame, bound in self.bounds:
            if self.timed and bound.seconds > self.state.limit():
                pruned += 1
                continue
            most = int(left / self._work(frame))
            if most and self.choices.count(frame, LEAVES) <= LEAVES:
                before = len(self.state.seen)
                yield from self._go_through(frame, before + most)
                left -= (len(self.state.seen) - before) * self._work(frame)
                if len(self.state.seen) < before + most:
                    continue
            open_s = min(open_s, bound.seconds)
        yield Offer(candidates=0, pruned={"bound": pruned}, open_s=float(open_s))

    def _work(self, frame: Frame) -> float:
        blocks, devices = len(self.problem.graph.blocks), self.problem.cluster.num_devices
        return blocks * (1 + devices / 16) + 2 * frame.num_ranks * frame.num_microbatches

    def _go_through(self, frame: Frame, most: int) -> Iterator[Offer]:
        pruned = 0
        for choice in self.choices.of(frame):
            if choice in self.state.seen:
                continue
            if self._hopeless(choice):
                pruned += 1
                continue
            if len(self.state.seen) >= most:
                break
            yield self._judge(choice, self.state.judged)
        yield Offer(candidates=0, pruned={"bound": pruned})


def search(problem: Problem) -> Iterator[Offer]:
    """Offers whatever may be best, then what is left open."""
    yield from _Search(problem).run()
