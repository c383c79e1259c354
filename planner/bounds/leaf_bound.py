"""A step time that a complete choice cannot beat, without simulating it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.forms.retention import AGAIN
from meshwright.ir.deadline import check_time
from meshwright.planner.across.run_costs import At, RunCosts
from meshwright.planner.problem.candidates import Choice, StageChoice
from meshwright.planner.problem.schedule_tools import traits
from meshwright.planner.problem.space import mesh_of


class LeafBound:
    """Bounds of one problem's choices; keeps what stages take."""

    def __init__(self, runs: RunCosts) -> None:
        self.runs, self.problem = runs, runs.problem
        self._busy: dict[tuple[StageChoice, bool], dict[int, _Busy]] = {}

    def exceeds(self, choice: Choice, limit_s: float) -> bool:
        """Whether the bound is above a limit; mostly that is seen without pricing blocks that make
        again what is cheap, or move it: they take no less than those that keep it."""
        return self.seconds(choice, rough=True) > limit_s or self.seconds(choice) > limit_s

    def seconds(self, choice: Choice, *, rough: bool = False) -> float:
        """Each rank works off all micro-batches, the first ranks beginning and ending before the
        last ones; and the first micro-batch goes all the way. `rough`: a lower bound that is
        quicker to get."""
        check_time()
        schedule = traits(choice.schedule)
        if schedule.early:
            # It may keep what the choice would make again.
            kept = tuple(replace(stage, recompute=(), saved=()) for stage in choice.stages)
            choice = replace(choice, stages=kept)
        count = choice.num_microbatches
        stages = [self._stage_s(stage, count, rough) for stage in choice.stages]
        whole = [busy.whole_s for busy in stages]
        path = sum(busy.input_s if schedule.halves else busy.whole_s for busy in stages)
        if len(stages) > choice.num_ranks:
            return self.runs.own_s + max(self._ranks_s(choice, whole), path)
        # Weight halves may wait until the end: then only forwards lie before a rank's work.
        parts = [busy.forward_s if schedule.halves else busy.whole_s for busy in stages]
        before = [0.0, *accumulate(parts)]
        ranks = (count * own + b for own, b in zip(whole, before, strict=False))
        return self.runs.own_s + max(path, *ranks)

    def _ranks_s(self, choice: Choice, busy: Sequence[float]) -> float:
        spent: dict[tuple[int, ...], float] = {}
        for stage, seconds in zip(choice.stages, busy, strict=True):
            spent[stage.devices] = spent.get(stage.devices, 0.0) + seconds
        return choice.num_microbatches * max(spent.values())

    def _stage_s(self, stage: StageChoice, count: int, rough: bool) -> "_Busy":
        """Of one micro-batch."""
        rough = rough and bool(stage.saved)
        held = self._busy.setdefault((stage, rough), {})
        if count not in held:
            held[count] = self._stage(stage, self.problem.batch // count, rough)
        return held[count]

    def _stage(self, stage: StageChoice, samples: int, rough: bool) -> "_Busy":
        names, size = self.problem.tables.device_names, len(stage.devices) // stage.dp
        levels = self.problem.tables.model_levels(stage.devices[:size], stage.model)
        dp_levels = self.problem.tables.levels(stage.devices[::size])
        own = mesh_of(self.problem, stage).own_levels(self.problem.tables, stage.devices)
        shares = stage.shares or (ceil(samples / stage.dp),)
        alike = len(self.problem.tables.devices) == 1
        spots = {
            BlockSpot(share, stage.dp, stage.model, name, dp_levels, levels, own_levels=own)
            for share, name in (
                {(share, names[0]) for share in shares}
                if alike
                else {
                    (share, names[rank])
                    for number, share in enumerate(shares)
                    for rank in stage.devices[number * size : (number + 1) * size]
                }
            )
        }
        return max(self._at(stage, At(spot, stage.variant), rough) for spot in spots)

    def _at(self, stage: StageChoice, at: At, rough: bool) -> "_Busy":
        costs = self.runs.block_costs(at)
        whole = forward = least = 0.0
        for (number, treated), count in self._treated(stage).items():
            block, cost = self.runs.blocks[number], costs[number]
            if treated == AGAIN:
                cost = cost.recomputed()
            elif treated and not rough:
                cost = self.runs.under(block, at, treated)
            whole += count * (cost.forward_s + cost.backward_s - cost.accumulate_s)
            forward += count * cost.forward_s
            least += count * (cost.forward_s + cost.backward_input_s)
        return _Busy(whole, forward, least)

    def _treated(self, stage: StageChoice) -> Counter[tuple[int, str]]:
        """How many blocks are like the first one of their kind, and in which mode."""
        again = dict.fromkeys(stage.recompute, AGAIN)
        said = dict(stage.saved) | again
        counts = self.runs.firsts_between(stage.start, stage.stop)
        blocks = self.runs.blocks
        found: Counter[tuple[int, str]] = Counter()
        if not said.keys().isdisjoint(self.runs.names):
            likes = self.runs.first_like
            for number in range(stage.start, stage.stop):
                name, pattern = blocks[number].name, blocks[number].pattern
                if name in said and pattern not in again:
                    first = likes[number]
                    found[first, said[name]] += 1
                    counts[first] -= 1
        for first, count in counts.items():
            if count:
                found[first, said.get(blocks[first].pattern, "")] += count
        return found


class _Busy(NamedTuple):
    """Of a stage and a micro-batch, at least."""

    whole_s: float
    forward_s: float
    input_s: float
    """Forward, and what the stages before wait for."""
