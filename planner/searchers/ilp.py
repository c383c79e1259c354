"""Best-first branch and bound over the whole space; the simulator judges what may be best.

A frame fixes pipeline ranks and micro-batches. `planner.bounds.relaxation` says what no choice of a
frame can beat; frames are taken in that order, and those that cannot come near the best plan found
are left out unseen. `planner.across.frame_search` finds the best stages of a frame: layouts come
from the solver inside blocks, cuts, devices, meshes and recomputed blocks from a dynamic programme
over tables. What comes out best is simulated, and improved by small steps as long as that helps.
Small frames that are still open are then gone through choice by choice, so that nothing is left
open.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from meshwright.ir.plan.plan import Plan
from meshwright.planner.across.choice_space import ChoiceSpace, with_shares
from meshwright.planner.across.first_plans import first_choices
from meshwright.planner.across.frame_search import MESHES, Finalist, FrameSearch
from meshwright.planner.across.ladder import Treatment
from meshwright.planner.across.pinned_meshes import pinned_choices
from meshwright.planner.across.refine import neighbours, other_schedules, treated
from meshwright.planner.across.run_classes import DEEP
from meshwright.planner.across.uniform_choices import plain_choices
from meshwright.planner.bounds.bound import relaxed
from meshwright.planner.bounds.frames import Frame, frames
from meshwright.planner.bounds.leaf_bound import LeafBound
from meshwright.planner.bounds.relaxation import Bound
from meshwright.planner.pins.constraints import allowed, broken
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import Choice, build_plan
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import Mesh
from meshwright.planner.search.objectives import rating
from meshwright.planner.search.offers import TIE, Offer
from meshwright.planner.search.plan_comparison import forms_of

SURE = 1.002
"""Bounds must exceed the best step by so much: simulated steps are rounded, and exact to 0.1 %."""
PLAIN, PLAYED = 64, 40_000
"""Plain choices that are simulated, and the work of that."""
QUICK, FIRST = 12, 4
"""Frames with the least to simulate, and those of them whose best plain choices come first."""
LARGE = 512
"""Blocks times devices of problems that are large: their tables may take longer than there is."""
JUDGED, CLOSE, WORSE = 32, 1.1, 1.2
"""Finalists that are simulated: so many, and those within this factor of the best step. Pipelines
whose busiest stage alone takes longer than the other factor are not put together."""
POLISHED, STEPS, IMPROVING = 3, 400, 25_000
"""Plans that are improved, simulations spent on that, and the work of these."""
LEAVES, WORK = 20_000, 60_000
"""Choices of a frame that are gone through one by one, and the work of simulating them: about the
blocks, devices and actions in all of them."""
HOPEFUL = 8
"""Frames with more choices than so many times those that can be simulated are left open."""

KINDS, TRIED = 12, 2
"""Kinds of plans of which the best is looked for, and in how many frames."""

Value = tuple[float, ...]
Family = tuple[bool, tuple[str, ...], int]
"""Pipeline or not, forms of model parallelism, ZeRO level."""


@dataclass(slots=True)
class IlpState:
    """What the search has seen."""

    seen: set[Choice] = field(default_factory=set)
    judged: list[tuple[Value, Choice]] = field(default_factory=list)
    short: dict[Choice, float] = field(default_factory=dict)
    """Of choices that tables say are best, memory that is missing however much is recomputed."""
    best_s: float = np.inf
    """The shortest step of a choice that fits."""

    def limit(self) -> float:
        """Bounds above this are of no use."""
        return self.best_s * (1 + TIE) * SURE


class _Search:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices = ChoiceSpace(problem)
        self.relaxation = relaxed(problem)
        self.runs = self.relaxation.rates.runs
        self.solvers = [FrameSearch(self.runs, p, self.choices.sets) for p in self.choices.places]
        self.leaf = LeafBound(self.runs)
        self.state = IlpState()
        self.timed = problem.objective != "memory"
        self.mixed = len(problem.tables.devices) > 1
        self.bounds: list[tuple[Frame, Bound]] = []

    def run(self) -> Iterator[Offer]:
        found = [(frame, self.relaxation.bound(frame)) for frame in frames(self.problem)]
        self.bounds = sorted(found, key=lambda item: (item[1].seconds, item[0]))
        finite = [item for item in self.bounds if np.isfinite(item[1].seconds)]
        if finite:
            least = self.bounds[0][1].seconds
            yield Offer(
                candidates=0, pruned={"memory": len(self.bounds) - len(finite)}, bound_s=least
            )
            self.bounds = finite
        if self.timed:
            yield from self._first()
            yield from self._fastest()
            yield from self._other_kinds()
            yield from self._plain()
            yield from self._rescheduled()
        if np.isinf(self.state.best_s):
            yield from self._pinned()
        if np.isinf(self.state.best_s) or not self.timed:
            yield from self._smallest()
        yield from self._polish_best()
        yield from self._close()

    # Finalists ------------------------------------------------------------------------------------

    def _pinned(self) -> Iterator[Offer]:
        """Where nothing has met the pins: stages on the meshes that these say, the most promising
        first. Small steps from there change the rest."""
        found = [(self.leaf.seconds(choice), number, choice)
                 for number, choice in enumerate(pinned_choices(self.problem))]  # fmt: skip
        for _, _, choice in sorted(found, key=lambda item: item[:2])[:PLAIN]:
            yield from self._offer(choice)

    def _first(self) -> Iterator[Offer]:
        """The most promising plain choice of some frames that are quickly simulated: something good
        to hold from the start, whatever happens, and to measure others by. Where there is much to
        search, the most promising choices of equal stages too."""
        large = len(self.problem.graph.blocks) * self.problem.cluster.num_devices >= LARGE
        for choice in islice(first_choices(self.problem), FIRST if large else 0):
            if choice not in self.state.seen:
                yield self._judge(choice, self.state.judged)
        quick = sorted(self.bounds, key=lambda item: (self._work(item[0]), item[1].seconds))
        for frame, _ in sorted(quick[:QUICK], key=lambda item: item[1].seconds)[:FIRST]:
            found = [(self.leaf.seconds(choice), number, choice)
                     for number, choice in enumerate(plain_choices(self.runs, frame))]  # fmt: skip
            for _, _, choice in sorted(found, key=lambda item: item[:2])[:1]:
                for each in self._starts(choice):
                    yield self._judge(each, self.state.judged)

    def _fastest(self) -> Iterator[Offer]:
        """Simulates what tables say is best, best first; then what else may be close. What is the
        best so far is simulated at once: a good plan early is there if time is up, and tells frames
        of mixed devices apart, which bounds hardly do."""
        queue: list[tuple[float, int, Choice]] = []
        for own in self._by_frame():
            if own[0].value < (CLOSE if self.mixed else 1.0) * self.state.best_s:
                yield from self._offer_once(own[0].choice)
            queue += [(f.value, len(queue) + number, f.choice) for number, f in enumerate(own)]
        queue.sort(key=lambda item: item[:2])
        firsts = {choice: (value, number) for value, number, choice in reversed(queue)}
        queue = [(*key, choice) for choice, key in reversed(firsts.items())]
        again: set[Frame] = set()
        for number in range(JUDGED):
            if not queue or queue[0][0] > CLOSE * self.state.best_s:
                break
            choice = heappop(queue)[2]
            yield from self._offer_once(choice)
            frame = Frame(choice.num_ranks, choice.num_microbatches)
            excess = self.state.short[choice]
            if excess and frame not in again:
                again.add(frame)
                for more in self._within(frame, 1.02 * excess):
                    heappush(queue, (more.value, -1 - number, more.choice))

    def _offer_once(self, choice: Choice) -> Iterator[Offer]:
        """Simulates a choice, and notes what memory is missing then."""
        if choice not in self.state.short:
            yield from self._offer(choice)
            self.state.short[choice] = self._excess(choice)

    def _plain(self) -> Iterator[Offer]:
        """Simulates plain choices that may be better, the most promising first."""
        found = [
            (self.leaf.seconds(choice), number, choice)
            for number, (frame, bound) in enumerate(self.bounds)
            if bound.seconds <= self.state.limit()
            for choice in plain_choices(self.runs, frame)
        ]
        left = float(PLAYED)
        for least, _, choice in sorted(found, key=lambda item: item[:2])[:PLAIN]:
            left -= self._work(Frame(choice.num_ranks, choice.num_microbatches))
            if least < self.state.limit() and left > 0:
                for each in self._starts(choice):
                    if each not in self.state.seen:
                        yield self._judge(each, self.state.judged)

    def _excess(self, choice: Choice) -> float:
        """Memory that is missing however much is recomputed, as simulated last."""
        value, last = self.state.judged[-1] if self.state.judged else ((0.0,), choice)
        same = (last.num_ranks, last.num_microbatches) == (
            choice.num_ranks,
            choice.num_microbatches,
        )
        return value[0] if same else 0.0

    def _within(self, frame: Frame, spare: float) -> list[Finalist]:
        """The best choice of a frame with that much less memory."""
        bound = dict(self.bounds)[frame]
        limit_s = CLOSE * self.state.best_s
        found = [f for s in self.solvers for f in s.fastest(frame, bound, limit_s, spare)]
        return sorted(found, key=lambda item: item.value)[:1]

    def _by_frame(self) -> Iterator[list[Finalist]]:
        """Of all frames that may be best by what tables say of the others; tables are of plain
        schedules. Frames of one stage come first: they are quickly known, and pipelines that
        cannot come near them are then left out early."""
        least = np.inf
        for frame, bound in sorted(self.bounds, key=_one_stage_first):
            if _plain_s(bound) > CLOSE * least:
                continue
            found: list[Finalist] = []
            for solver in self.solvers:
                limit_s = min(WORSE * least, CLOSE * self.state.best_s)
                own = solver.fastest(frame, bound, limit_s)
                least = min([least, *(finalist.value for finalist in own)])
                found += own
            if found:
                yield sorted(found, key=lambda item: item.value)

    def _other_kinds(self) -> Iterator[Offer]:
        """The best of each kind of plan, by bounds and tables: ties and runners-up."""
        frames_of: dict[Family, list[tuple[float, Frame]]] = {}
        meshes_of: dict[tuple[Family, Frame], list[Mesh]] = {}
        for frame, bound in self.bounds:
            for value, mesh in bound.meshes:
                family = frame.num_ranks > 1, forms_of(mesh.model), mesh.zero
                if (family, frame) not in meshes_of:
                    frames_of.setdefault(family, []).append((max(value, bound.plain_s), frame))
                meshes_of.setdefault((family, frame), []).append(mesh)
        for family in sorted(frames_of, key=lambda kind: (min(frames_of[kind]), kind))[:KINDS]:
            found = [
                finalist
                for _, frame in sorted(frames_of[family])[:TRIED]
                for finalist in self.solvers[0].of_meshes(frame, meshes_of[family, frame][:MESHES])
            ]
            if found:
                best = min(found, key=lambda item: item.value).choice
                yield from self._offer(best, even_far=True)

    def _rescheduled(self) -> Iterator[Offer]:
        """The best pipelines, of several numbers of ranks, under other schedules: tables are of
        plain ones."""
        ranked = sorted(self.state.judged, key=lambda item: item[0])
        firsts = {choice.num_ranks: choice for _, choice in reversed(ranked)}
        found = [c for _, c in ranked if c.num_ranks > 1 and c is firsts[c.num_ranks]]
        for best in found[:POLISHED]:
            for choice in other_schedules(self.problem, best):
                if choice not in self.state.seen and not self._hopeless(choice):
                    yield self._judge(choice, self.state.judged)
                    yield from self._fit(choice)

    def _smallest(self) -> Iterator[Offer]:
        found = [
            finalist
            for frame, bound in self.bounds
            for solver in self.solvers
            for finalist in solver.smallest(frame, bound)
        ]
        for finalist in sorted(found, key=lambda item: item.value)[:48]:
            yield from self._offer(finalist.choice)

    def _offer(self, choice: Choice, *, even_far: bool = False) -> Iterator[Offer]:
        for start in self._starts(choice):
            for each in with_shares(self.problem, start):
                if each not in self.state.seen:
                    yield self._judge(each, self.state.judged)
                    yield from self._fit(each, even_far=even_far)

    def _fit(self, choice: Choice, *, even_far: bool = False) -> Iterator[Offer]:
        """As few recomputed blocks as fit by the simulator: tables only estimate memory.
        `even_far`: saves memory too where that cannot make it the best."""
        held = self.state.judged[-1:]
        if not held or held[0][1] != choice:
            return
        value = held[0][0]
        if self._is_far(value) and not (even_far and value[0]):
            return
        bad, good = (0, None) if held[0][0][0] else (None, 0)
        step = 1 if bad == 0 else -1
        while bad is None or good is None or abs(good - bad) > 1:
            if bad is None or good is None:
                change, step = step, 2 * step
            else:
                change = (good + bad) // 2
            other = self._shifted(choice, change)
            if other is None or other in self.state.seen:
                if bad is None or good is None:
                    return
                break
            before = len(self.state.judged)
            yield self._judge(other, self.state.judged)
            fits = len(self.state.judged) > before and not self.state.judged[-1][0][0]
            bad, good = (bad, change) if fits else (change, good)

    def _is_far(self, value: Value) -> bool:
        """Whether it is so slow that saving less memory would not make it the best, nor more."""
        usual = self.problem.objective in ("throughput", "batch")
        return usual and value[1] > CLOSE * self.state.best_s

    def _shifted(self, choice: Choice, change: int) -> Choice | None:
        """With every stage treated so many steps further; None if none changes."""
        stages = []
        for stage in choice.stages:
            now = Treatment.of(stage)
            new = self.choices.sets.near(stage.start, stage.stop, now, change)
            stages.append(treated(stage, new))
        found = replace(choice, stages=tuple(stages))
        return None if found == choice else found

    def _starts(self, choice: Choice) -> Iterator[Choice]:
        """The choice, or under the schedules that pins leave."""
        if allowed(self.problem.constraints, "schedule", (choice.schedule,)):
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
                self.choices.fits.add(choice)
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
        work = max((self._work(Frame(c.num_ranks, c.num_microbatches)) for c in firsts.values()),
                   default=1.0)  # fmt: skip
        starts = [item for item in ranked if item[1] in firsts.values()][:POLISHED]
        most = len(self.state.seen) + min(STEPS, int(IMPROVING / work))
        for left, (value, start) in zip(range(len(starts), 0, -1), starts, strict=True):
            # None takes what the others need: the best start need not have the best end.
            share = (most - len(self.state.seen)) // left
            yield from self._polish(value, start, len(self.state.seen) + share)

    def _polish(self, value: Value, start: Choice, most: int) -> Iterator[Offer]:
        """Moves to the best neighbour while that is better."""
        current, better = start, True
        while better:
            held: list[tuple[Value, Choice]] = []
            tight = bool(value[0]) or not self.timed
            for choice in neighbours(self.problem, current, self.choices.sets, tight=tight):
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
        return self.timed and self.leaf.exceeds(obey(self.problem, choice), limit_s)

    # What is still open ---------------------------------------------------------------------------

    def _close(self) -> Iterator[Offer]:
        """Goes through small frames that may still hold the best choice."""
        left, open_s, pruned = float(WORK), np.inf, 0
        for frame, bound in self.bounds:
            if self.timed and bound.seconds > self.state.limit():
                pruned += 1
                continue
            most = int(left / self._work(frame))
            small = min(LEAVES, HOPEFUL * most)
            if self.choices.count(frame, small) <= small:
                before = len(self.state.seen)
                yield from self._go_through(frame, before + most)
                left -= (len(self.state.seen) - before) * self._work(frame)
                if len(self.state.seen) < before + most:
                    continue
            open_s = min(open_s, bound.seconds)
        left_out = sum(solver.left_out for solver in self.solvers)
        yield Offer(
            candidates=0, pruned={"bound": pruned, "dominance": left_out}, open_s=float(open_s)
        )

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


def _one_stage_first(item: tuple[Frame, Bound]) -> tuple[bool, float, Frame]:
    frame, bound = item
    return frame.num_ranks > 1, _plain_s(bound), frame


def _plain_s(bound: Bound) -> float:
    return max(bound.seconds, bound.plain_s)


def search(problem: Problem) -> Iterator[Offer]:
    """Offers whatever may be best, then what is left open. Of models too deep for tables only plans
    of equal stages."""
    if len(problem.graph.blocks) <= DEEP:
        yield from _Search(problem).run()
        return
    for choice in islice(first_choices(problem), PLAIN):
        yield Offer(plan=build_plan(problem, obey(problem, choice)))
    yield Offer(candidates=0, open_s=0.0)
