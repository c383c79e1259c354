"""Simulates choices, each once, and keeps the plans that a driver has not seen yet."""

from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.ir.plan.plan import Plan
from meshwright.planner.pins.constraints import broken
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import Choice, build_plan
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.objectives import rating
from meshwright.planner.searchers.dqn.decisions import SLOWEST, reward_of


class Verdict(NamedTuple):
    """What came out; smaller is better."""

    excess: float
    """Memory that is missing, as a share of what there is; infinite where pins are broken."""
    value: float
    """What the objective makes small."""

    @property
    def fits(self) -> bool:
        return not self.excess


@dataclass(slots=True)
class Judge:
    """Of one problem."""

    problem: Problem
    seen: dict[Choice, Verdict] = field(default_factory=dict)
    fresh: list[Plan] = field(default_factory=list)
    """Plans since the last `drained`."""
    best: tuple[Verdict, Choice] | None = None
    """The first of the best."""
    work: float = 0.0
    """Of all simulations: about the blocks, devices and actions in them."""

    def __call__(self, choice: Choice) -> Verdict:
        if choice not in self.seen:
            verdict = self.seen[choice] = self._verdict(choice)
            if self.best is None or verdict < self.best[0]:
                self.best = verdict, choice
        return self.seen[choice]

    def _verdict(self, choice: Choice) -> Verdict:
        problem = self.problem
        self.work += len(problem.graph.blocks) * (1 + problem.cluster.num_devices / 16)
        self.work += 2 * choice.num_ranks * choice.num_microbatches
        plan = build_plan(problem, obey(problem, choice))
        self.fresh.append(plan)
        value = rating(problem.objective, problem.cluster, plan)[0]
        if broken(problem.constraints, plan, problem.graph):
            return Verdict(float("inf"), value)
        room = min(problem.room_bytes(stage.devices) for stage in plan.stages)
        return Verdict(excess_bytes(problem, plan) / room, value)

    def drained(self) -> list[Plan]:
        """What is new since it was last asked for."""
        found, self.fresh = self.fresh, []
        return found


def reward(verdict: Verdict, reference: float) -> float:
    """Log of the reference over the value; what does not fit is worse than all that fits."""
    if verdict.fits:
        return reward_of(verdict.value, reference)
    return SLOWEST - min(1.0, verdict.excess)
