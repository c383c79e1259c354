"""Goodput by simulation: the share of time that trains, with failures, saves and ways to go on.

What a job does when nodes fail is said by the plans that it may take. With one plan for all nodes
it waits until a node is back; with plans for fewer it goes on by them, and grows again; with one
plan for fewer nodes than there are the others are spares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random

from meshwright.ir.errors import PlanError
from meshwright.ir.faults.mix import FaultMix
from meshwright.ir.faults.saving import SavingCost


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """A plan for so many nodes."""

    nodes: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyCluster:
    """A job's machines, and how long what is to be done after a failure takes."""

    mix: FaultMix
    nodes: int
    devices_per_node: int
    held_s: float
    write_s: float
    """Of a save, as in `SavingCost`."""
    back_s: float
    """From a failure until the job trains again where it has nodes for a plan: to detect it, to
    find a plan, to start, to load."""
    repair_s: float
    """Until a node that was lost is back."""

    def cost(self, nodes: int) -> SavingCost:
        """What saving costs a job on so many of the nodes."""
        return SavingCost(
            held_s=self.held_s, write_s=self.write_s, back_s=self.back_s,
            between_s=self.mix.between_s(nodes * self.devices_per_node),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Goodput:
    """What became of a run. Shares are of its time and make 1 with `goodput`."""

    goodput: float
    """Training that stayed, at the speed of the fastest plan on all nodes."""
    slower: float
    """Less than that speed."""
    saving: float
    lost: float
    """Trained, and lost with a failure."""
    back: float
    """Detecting, starting, loading."""
    waiting: float
    """Without enough nodes for any plan."""
    failures: int


class _FaultyRun:
    """One run; time passes in `_spend` and `_add` alone."""

    def __init__(
        self, at: FaultyCluster, plans: Sequence[NodesPlan], best_s: float, random: Random
    ) -> None:
        self.at, self.plans, self.best_s, self.random = at, plans, best_s, random
        self.up, self.now_s = at.nodes, 0.0
        self.repairs: list[float] = []
        self.spent = dict.fromkeys(("kept", "slower", "saving", "lost", "back", "waiting"), 0.0)
        self.failures = 0

    def run(self, seconds: float) -> None:
        while self.now_s < seconds:
            self._mend()
            plan = self._plan()
            if plan is None:
                self._spend("waiting", self.repairs[0] - self.now_s)
            else:
                self._train(plan, seconds)

    def _plan(self) -> NodesPlan | None:
        fits = [plan for plan in self.plans if plan.nodes <= self.up]
        return min(fits, key=lambda plan: plan.step_s, default=None)

    def _mend(self) -> None:
        while self.repairs and self.repairs[0] <= self.now_s:
            heappop(self.repairs)
            self.up += 1

    def _spend(self, what: str, seconds: float) -> None:
        self.spent[what] += seconds
        self.now_s += seconds

    def _train(self, plan: NodesPlan, until_s: float) -> None:
        """Until the job is interrupted, or it has nodes for a faster plan and has saved."""
        cost = self.at.cost(plan.nodes)
        interval, turn = cost.interval_s, cost.interval_s + cost.held_s
        begun = self.now_s
        fails = begun + self.random.expovariate(1 / cost.between_s)
        grows = self._grows(plan)
        if grows < min(fails, until_s):
            self._add(plan, grows - begun, (grows - begun) * interval / turn)
            self._spend("saving", cost.held_s + cost.write_s)
            self._spend("back", self._way_back())
            return
        if fails >= until_s:
            self._add(plan, until_s - begun, (until_s - begun) * interval / turn)
            return
        # The newest save that is whole is the last one that began so long before.
        lasted = fails - begun
        saves = max(0, int((lasted - cost.write_s) // turn))
        trained = lasted - int(lasted // turn) * cost.held_s
        kept = saves * interval
        self._add(plan, lasted, trained, kept)
        self._fail()
        self._spend("back", self._way_back())

    def _add(
        self, plan: NodesPlan, seconds: float, trained_s: float, kept_s: float | None = None
    ) -> None:
        kept_s = trained_s if kept_s is None else min(kept_s, trained_s)
        speed = self.best_s / plan.step_s
        self.spent["kept"] += kept_s * speed
        self.spent["slower"] += kept_s * (1 - speed)
        self.spent["lost"] += trained_s - kept_s
        self.spent["saving"] += seconds - trained_s
        self.now_s += seconds

    def _grows(self, plan: NodesPlan) -> float:
        """When there will be nodes for a faster plan."""
        faster = [p.nodes for p in self.plans if p.step_s < plan.step_s]
        missing = min((nodes - self.up for nodes in faster), default=0)
        back = sorted(self.repairs)
        return back[missing - 1] if 0 < missing <= len(back) else float("inf")

    def _fail(self) -> None:
        self.failures += 1
        if self.random.random() < self.at.mix.takes_node:
            self.up -= 1
            heappush(self.repairs, self.now_s + self.at.repair_s)

    def _way_back(self) -> float:
        """Seconds until it trains, with what fails meanwhile: then it begins anew."""
        taken, back_s = 0.0, self.at.back_s
        between = self.at.cost(self.at.nodes).between_s
        while (fails := self.random.expovariate(1 / between)) < back_s and taken < 1e9:
            taken += fails
            self._fail()
        return taken + back_s


def goodput(
    at: FaultyCluster, plans: Sequence[NodesPlan], best_s: float, *, seconds: float, seed: int = 0
) -> Goodput:
    """Simulates a run that saves as often as is best, and takes the fastest of `plans` that it has
    nodes for. `best_s`: a step of the fastest plan on all nodes, by which speed is measured.

    Failures come at random, as often as `at.mix` says, and hit nodes that the job uses; spare ones
    are taken to be whole. PlanError for plans that have no nodes or take no time.
    """
    if not plans or min(plan.nodes for plan in plans) > at.nodes:
        raise PlanError(f"no plan is for {at.nodes} nodes or fewer")
    if min(best_s, seconds, *(plan.step_s for plan in plans)) <= 0:
        raise PlanError("seconds and step times must be above 0")
    if at.held_s + at.write_s <= 0:
        raise PlanError("held_s and write_s are both 0; a save that takes no time has no interval")
    run = _FaultyRun(at, plans, best_s, Random(seed))
    run.run(seconds)
    share = {name: spent / run.now_s for name, spent in run.spent.items()}
    kept = share.pop("kept")
    return Goodput(goodput=kept, **share, failures=run.failures)
