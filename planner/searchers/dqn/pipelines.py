"""Decisions about a pipeline: micro-batches, cuts of the last stage, meshes, recompute, schedule.

An episode decides, in this order: the number of micro-batches; the order in which stages take
devices; again and again whether the last stage is cut in two, where, and how many devices its first
part gets (near the place where work is shared out by devices), or that it stays; the mesh of each
size of stage; what is recomputed; the schedule. The reward comes with the last of these: the log of
the reference over the simulated step, the reference being all work shared out evenly or what the
searcher gives; what does not fit gets less than all that fits.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import log2
from typing import NamedTuple

import numpy as np

from meshwright.planner.across.choice_space import with_shares
from meshwright.planner.across.refine import other_schedules
from meshwright.planner.problem.candidates import Choice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import divisors, microbatch_counts, pipeline_sizes, schedules
from meshwright.planner.searchers.dqn.decisions import WORST, Floats, Offered, Pruning, nothing
from meshwright.planner.searchers.dqn.drafts import FIT, SUMMARY, Draft, Sketches
from meshwright.planner.searchers.dqn.fit import fitted
from meshwright.planner.searchers.dqn.judge import Judge, Verdict, reward

MOST, UNPRUNED = 64, 512
"""Options of a decision, and without the radius around balanced cuts."""
FEW_DEVICES = 8
"""Up to here a stage may have any number of devices, above it divisors of all of them."""
LEVELS = (FIT, 0.0, 0.5, 1.0)
KINDS = ("count", "order", "stop", "cut", "mesh", "recompute", "schedule")


class Option(NamedTuple):
    """What a decision leads to."""

    kind: str
    draft: Draft
    choice: Choice | None
    """If nothing more were decided; None where a stage would have no mesh yet."""
    legal: bool


class Pipelines:
    """Of one problem; see the module."""

    context_names: tuple[str, ...] = (
        "log2 devices / 10", "log2 nodes / 6", "log2 batch / 12", "log2 blocks / 8",
        "4 x parameters, of all room, at most 4", "log of 1 + their exchange over the reference",
        "longest block, of the whole", "log2 micro-batches / 10", "stages cut off / 16",
        "devices taken, share", "work cut off, share",
    )  # fmt: skip
    option_names: tuple[str, ...] = (
        *(f"decides {kind}" for kind in KINDS),
        "is a whole plan",
        *SUMMARY,
    )
    """After the kinds: of the plan that it would be if nothing more were decided."""
    context_size, option_size = len(context_names), len(option_names)

    def __init__(
        self, problem: Problem, judge: Judge, pruning: Pruning, reference: float | None = None
    ) -> None:
        self.problem, self.judge, self.pruning = problem, judge, pruning
        self.sketches = Sketches(problem)
        self.reference = reference or self.sketches.reference_s
        self.most_options = MOST if pruning.radius is not None else UNPRUNED
        self.work = np.concatenate([[0.0], np.cumsum(self.sketches.block_s)])
        self.options: list[Option] = []
        self._known: dict[Draft, tuple[list[Option], Offered]] = {}
        self._whole = self._whole_features()
        self.restart()

    @property
    def states(self) -> int:
        """Different drafts that an agent was in."""
        return len(self._known)

    def restart(self) -> None:
        self._go(Draft())

    def offered(self) -> Offered:
        return self._offered if self.options else nothing(self)

    def take(self, option: int) -> tuple[float, bool]:
        taken = self.options[option]
        if taken.kind == "schedule":
            assert taken.choice
            self.options = []
            return reward(self._judged(taken.choice), self.reference), True
        self._go(taken.draft)
        return (0.0, False) if self.options else (WORST, True)

    def _judged(self, choice: Choice) -> Verdict:
        """With even and with balanced shares; where it is to fit, with as little recomputed."""
        found = [self.judge(each) for each in with_shares(self.problem, choice)]
        if self.draft.recompute == FIT:
            found += fitted(self.judge, self.sketches, choice)
        return min(found)

    def _go(self, draft: Draft) -> None:
        """On to a draft; without options if none of them is legal."""
        self.draft = draft
        if draft not in self._known:
            found = list(self._options(draft))[: self.most_options]
            rows = [self._features(option) for option in found]
            legal = np.array([option.legal for option in found], np.bool_)
            shape = np.stack(rows) if rows else np.zeros((0, self.option_size), np.float32)
            self._known[draft] = found, Offered(self._context(draft), shape, legal)
        found, self._offered = self._known[draft]
        self.options = found if self._offered.legal.any() else []

    # What may be decided --------------------------------------------------------------------------

    def _options(self, draft: Draft) -> Iterator[Option]:
        if not draft.count:
            for count in microbatch_counts(self.problem):
                yield self._open("count", replace(draft, count=count))
        elif draft.order is None:
            for order in range(len(self.sketches.places)):
                yield self._open("order", replace(draft, order=order))
        elif not draft.stopped:
            yield self._stop(draft)
            yield from self._cuts(draft)
        elif size := self._undecided(draft):
            for mesh in self.sketches.ranked(size, draft.count):
                yield self._closed("mesh", replace(draft, meshes=(*draft.meshes, (size, mesh))))
        elif draft.recompute is None:
            yield from self._levels(draft)
        else:
            yield from self._schedules(draft)

    def _open(self, kind: str, draft: Draft) -> Option:
        """Whatever it lacks may still be decided."""
        return Option(kind, draft, self.sketches.choice(draft), True)

    def _closed(self, kind: str, draft: Draft) -> Option:
        """Stages and devices are decided: it must be possible as it is."""
        choice = self.sketches.choice(draft)
        return Option(kind, draft, choice, choice is not None and self._may_fit(choice))

    def _stop(self, draft: Draft) -> Option:
        ranks = len(draft.ends) + 1
        option = self._closed("stop", replace(draft, stopped=True))
        known = any(True for _ in schedules(self.problem, ranks))
        legal = ranks in pipeline_sizes(self.problem) and known
        start = draft.ends[-1][0] if draft.ends else 0
        legal &= self._keeps_pins(ranks - 1, start, len(self.work) - 1)
        return option._replace(legal=option.legal and legal)

    def _cuts(self, draft: Draft) -> Iterator[Option]:
        """Pairs of an end and a number of devices, small numbers first."""
        blocks, ranks = len(self.work) - 1, len(draft.ends) + 2
        if ranks > max(pipeline_sizes(self.problem), default=0):
            return
        start = draft.ends[-1][0] if draft.ends else 0
        left = self.problem.cluster.num_devices - sum(size for _, size in draft.ends)
        for size in self._sizes(left):
            if self.sketches.short(size, draft.count):
                for end in self._near(start, blocks, size / left):
                    yield self._cut(replace(draft, ends=(*draft.ends, (end, size))), start)

    def _cut(self, draft: Draft, start: int) -> Option:
        option = self._open("cut", draft)
        index = len(draft.ends) - 1
        legal = self._keeps_pins(index, start, draft.ends[-1][0])
        if self.pruning.memory and legal:
            legal = self.sketches.least_state(start, draft.ends[-1][0], draft) <= 1
        return option._replace(legal=legal)

    def _sizes(self, left: int) -> list[int]:
        devices = self.problem.cluster.num_devices
        known = range(1, left) if devices <= FEW_DEVICES else divisors(devices)
        return [size for size in known if size < left]

    def _near(self, start: int, stop: int, share: float) -> range:
        """Ends of a stage that has this share of the work, or close to it."""
        if self.pruning.radius is None:
            return range(start + 1, stop)
        goal = self.work[start] + share * (self.work[stop] - self.work[start])
        middle = (
            start + 1 + int(np.abs(self.work[start + 1 : stop] - goal).argmin())
            if stop - start > 1
            else stop
        )
        radius = self.pruning.radius
        return range(max(start + 1, middle - radius), min(stop, middle + radius + 1))

    def _keeps_pins(self, index: int, start: int, stop: int) -> bool:
        """Whether blocks that are asked onto a stage are there and nowhere else."""
        pins = self.problem.stage_of_block.items()
        return all((stage == index) == (start <= block < stop) for block, stage in pins)

    def _undecided(self, draft: Draft) -> int:
        """The largest number of devices whose mesh is open; 0 if there is none."""
        sizes = [size for _, size in draft.ends]
        sizes.append(self.problem.cluster.num_devices - sum(sizes))
        return max(set(sizes) - {size for size, _ in draft.meshes}, default=0)

    def _levels(self, draft: Draft) -> Iterator[Option]:
        """Each set of recomputed blocks once."""
        seen: set[Choice | None] = set()
        for level in LEVELS:
            option = self._closed("recompute", replace(draft, recompute=level))
            if option.choice not in seen:
                seen.add(option.choice)
                yield option

    def _schedules(self, draft: Draft) -> Iterator[Option]:
        base = self.sketches.choice(draft)
        assert base
        known = {name for name, chunks in schedules(self.problem, base.num_ranks) if chunks == 1}
        for choice in (base, *other_schedules(self.problem, base)):
            legal = choice is not base or base.schedule in known
            yield Option("schedule", draft, choice, legal)

    def _may_fit(self, choice: Choice) -> bool:
        loads = self.sketches.loads(choice)
        return not self.pruning.memory or all(load.state <= 1 for load in loads)

    # What an agent sees ---------------------------------------------------------------------------

    def _features(self, option: Option) -> Floats:
        kind = np.array([option.kind == name for name in KINDS], np.float32)
        whole = option.choice is not None
        known = (
            self.sketches.summary(option.choice)
            if option.choice
            else np.zeros(len(SUMMARY), np.float32)
        )
        return np.concatenate([kind, [np.float32(whole)], known])

    def _whole_features(self) -> list[float]:
        """Of cluster, batch and model."""
        problem, sketches = self.problem, self.sketches
        cluster, blocks = problem.cluster, len(self.work) - 1
        stored = sum(tensor.nbytes for tensor in problem.graph.parameters)
        room = sum(problem.room_bytes((rank,)) for rank in range(cluster.num_devices))
        rate = cluster.tier(range(cluster.num_devices)).rate if cluster.num_devices > 1 else np.inf
        share = self.work[1:] - self.work[:-1]
        return [
            log2(cluster.num_devices) / 10, log2(cluster.num_nodes) / 6, log2(problem.batch) / 12,
            log2(blocks) / 8, min(4.0, 4 * stored / room),
            float(np.log1p(2 * stored / rate / sketches.reference_s)),
            float(share.max() / self.work[-1]),
        ]  # fmt: skip

    def _context(self, draft: Draft) -> Floats:
        devices = self.problem.cluster.num_devices
        taken = sum(size for _, size in draft.ends)
        start = draft.ends[-1][0] if draft.ends else 0
        return np.array([
            *self._whole, log2(draft.count or 1) / 10, len(draft.ends) / 16, taken / devices,
            self.work[start] / self.work[-1],
        ], np.float32)  # fmt: skip
