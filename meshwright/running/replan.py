"""New plans for what is left of a cluster, searched when something is lost or ahead of it."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from meshwright.arguments.targets import Target
from meshwright.costmodel.estimate import estimate
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.remaining import without
from meshwright.ir.cluster.slower import slower
from meshwright.ir.deadline import SearchStopped, check_time, stopped_by
from meshwright.ir.errors import Infeasible, MeshwrightError, PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.fewer_devices import SmallerUse, smaller_uses
from meshwright.planner.search.options import SearchOptions
from meshwright.planner.search.search import search
from meshwright.runtime.job.compile import inputs_of

SEARCH_S, AHEAD_S = 10.0, 30.0
"""Of each search, and of each of those beside training."""
ALL_S = 15.0
"""Of all of them: where there is a plan, the next one is not begun if it might end later."""
USES = 2
"""Smaller uses of what is left that are searched beside the whole."""
_NICE = 10
"""Of threads that search beside training."""


@dataclass(frozen=True)
class NewPlan:
    """A plan for what is left."""

    plan: Plan
    resting: tuple[int, ...] = ()
    """Ranks of what is left that it does not use, as they cannot be shared out evenly."""


@dataclass(frozen=True)
class _Beside:
    """A search beside training, on a thread of its own."""

    wanted: str
    """Fingerprint of the cluster that it is for."""
    thread: threading.Thread
    stop: threading.Event


@dataclass
class Replanner:
    """Plans for what is left of a cluster, each searched once. Searches beside training give way
    to one that ranks wait for, unless it is for the same cluster."""

    plan: Plan
    cluster: Cluster
    target: Target
    slow: Mapping[int, float] = field(default_factory=dict)
    """Device -> how many times as long as its kind it takes."""
    _found: dict[str, NewPlan] = field(default_factory=dict)
    _graph: Graph | None = None
    _lock: Any = field(default_factory=threading.Lock)
    _beside: list[_Beside] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._found[self.cluster.fingerprint] = NewPlan(self.plan)

    def plan_without(self, lost: Sequence[int], limit_s: float = SEARCH_S) -> NewPlan:
        """The plan for all but the devices of these ranks, each search of `limit_s` at most;
        Infeasible or PlanError if there is none."""
        left = self._left(lost)
        if threading.current_thread() not in [one.thread for one in self._beside]:
            self._stop(but=left.fingerprint)
        if (known := self._found.get(left.fingerprint)) is not None:
            return known
        with self._lock:
            if left.fingerprint not in self._found:
                self._found[left.fingerprint] = self._search(left, limit_s)
            return self._found[left.fingerprint]

    def _left(self, lost: Sequence[int]) -> Cluster:
        return without(slower(self.cluster, self.slow), lost)

    def _search(self, left: Cluster, limit_s: float) -> NewPlan:
        """The fastest of plans for parts that divide better, those first, and for all that is left:
        a search of that takes longer, on a busy machine all the time that there is."""
        began = time.monotonic()
        longest_s = 0.0
        found: list[NewPlan] = []
        refused: MeshwrightError | None = None
        for use in (*self._uses(left), None):
            check_time()
            started = time.monotonic()
            if found and started + longest_s > began + ALL_S * limit_s / SEARCH_S:
                break
            where, pins, rest = (
                (left, (), ()) if use is None else (use.cluster, use.pins, use.resting)
            )
            try:
                found.append(NewPlan(self._checked(where, limit_s, pins), rest))
            except (Infeasible, PlanError) as error:
                refused = refused or error
            longest_s = max(longest_s, time.monotonic() - started)
        if not found:
            assert refused is not None
            raise refused
        return min(found, key=lambda item: _step_s(item.plan))

    def _uses(self, left: Cluster) -> Sequence[SmallerUse]:
        plan = self.plan
        if plan.objective != "throughput":
            return ()
        return smaller_uses(
            left, batch=plan.global_batch_size, num_blocks=plan.model.num_blocks,
            model_size=max(stage.model_size for stage in plan.stages), most=USES,
        )  # fmt: skip

    def _checked(self, cluster: Cluster, limit_s: float, more: Sequence[str] = ()) -> Plan:
        pins = tuple(self.plan.constraints)
        try:
            found = self._with_pins(cluster, limit_s, (*pins, *more))
        except (Infeasible, PlanError):
            if not pins or more:
                raise
            # They were pinned for another number of devices.
            found = self._with_pins(cluster, limit_s, ())
        if _trained(found) != _trained(self.plan):
            raise PlanError(
                f"for {cluster.name} only a plan was found that trains parameters in another way: "
                "pin what is to be trained how, so that it holds on fewer devices"
            )
        return found

    def _with_pins(self, left: Cluster, limit_s: float, pins: Sequence[str]) -> Plan:
        options = SearchOptions(
            optimizer=self.plan.optimizer, precision=self.plan.precision,
            max_grad_norm=self.plan.max_grad_norm, constraints=pins,
            objective=self.plan.objective, time_limit_s=limit_s, progress=False,
            routes=self.plan.routing,
        )  # fmt: skip
        try:
            return search(self.graph, left, options)
        except Infeasible:  # to fill devices is better than to stop
            return search(self.graph, left, options, memory_headroom=0.0)

    def dropped(self, found: Plan) -> tuple[str, ...]:
        """The pins of the first plan that another one does not keep."""
        return tuple(pin for pin in self.plan.constraints if pin not in found.constraints)

    @property
    def graph(self) -> Graph:
        """The model's step, as ranks trace it."""
        if self._graph is None:
            plan, given = self.plan, self.target.example_inputs
            self._graph = trace(
                self.target.model, given if given is not None else inputs_of(plan),
                self.target.loss_fn, global_batch_size=plan.global_batch_size,
                kernels=plan.kernels, precision=plan.precision,
            )  # fmt: skip
        return self._graph

    def gain(self, lost: Sequence[int], now: NewPlan) -> float:
        """How many times as long a step of the plan `now`, which was found without these devices,
        takes as one of a plan that knows which of the others are slow; Infeasible or PlanError."""
        found = self.plan_without(lost)
        left = [r for r in range(self.cluster.num_devices) if r not in lost]
        rest = [left[index] for index in now.resting]
        used = without(slower(self.cluster, self.slow), (*lost, *rest))
        prediction, _ = estimate(self.graph, used, now.plan)
        return prediction.step_s / _step_s(found.plan)

    def search_ahead(self, lost: Sequence[int]) -> None:
        """Beside training: finds the plan for one node less, or of a single node for one device
        less, whichever it will be."""
        left = [r for r in range(self.cluster.num_devices) if r not in lost]
        node_of = self.cluster.node_of
        last = node_of(left[-1])
        next_lost = (
            [r for r in left if node_of(r) == last] if node_of(left[0]) != last else left[-1:]
        )
        if len(left) > len(next_lost):
            soon = (*lost, *next_lost)
            self.beside(soon, lambda: self.plan_without(soon, AHEAD_S))

    def beside(self, lost: Sequence[int], what: Callable[[], object]) -> threading.Thread:
        """Does something beside training that needs the plan without these devices; what is refused
        there is said when it comes to that."""
        stop = threading.Event()

        def do() -> None:
            if hasattr(os, "setpriority"):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            with suppress(MeshwrightError, SearchStopped), stopped_by(stop):
                what()

        thread = threading.Thread(target=do, name="search beside training", daemon=True)
        self._beside = [one for one in self._beside if one.thread.is_alive()]
        self._beside.append(_Beside(self._left(lost).fingerprint, thread, stop))
        thread.start()
        return thread

    def close(self) -> None:
        """Ends searches that are under way: a process that ends within one aborts."""
        self._stop()
        for one in self._beside:
            one.thread.join()

    def _stop(self, but: str = "") -> None:
        for one in self._beside:
            if one.wanted != but:
                one.stop.set()


def _step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_s


def _trained(plan: Plan) -> set[tuple[str, str]]:
    """Which parameters are updated otherwise than by the plan's optimizer."""
    return {
        (path, choice.update)
        for stage in plan.stages for path, choice in stage.by_parameter.items() if choice.update
    }  # fmt: skip
