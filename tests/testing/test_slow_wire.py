"""A slow wire between processes: late averages on it wait for what their steps do not hide."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.slow_wire import SlowWire, slowed
from meshwright.testing.spawn import run_ranks
from tests.form_files.small import batches, graph, model

STEP_S, MESSAGE_S, ROUNDS = 0.06, 0.09, 3


def plan_of(delay: int | None) -> Plan:
    problem = make_problem(graph(), Cluster.local(2), precision="fp64", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=2), predict=False)
    form = FormChoice(form="dasgd", settings={"every": 3, "delay": delay or 0})
    sync = None if delay is None else form
    return replace(plan, stages=(replace(plan.stages[0], sync=sync),))


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def _waited(plans: list[Plan]) -> list[float]:
    """Seconds in a round of three steps, which take as long as the clock says."""
    found = []
    for plan in plans:
        job = compile_job(
            model(), plan, optimizer="sgd", lr=0.01, device="cpu", graph=graph(), check=False
        )
        clock = Clock()
        wire = SlowWire(lambda what: MESSAGE_S, clock.now, clock.sleep)
        with slowed(job, wire):
            for step in range(3 * ROUNDS + 2):
                if step == 2:
                    wire.waited.clear()
                clock.sleep(STEP_S)
                job.step(batches()[step % 5])
        found.append(sum(wire.waited) / ROUNDS)
        job.close()
    return found


def test_what_steps_do_not_hide_is_waited_for() -> None:
    """Sums of each step whole, an average less the steps until it is taken in."""
    delays: list[Any] = [None, 0, 1, 2]
    found = run_ranks(2, _waited, [plan_of(delay) for delay in delays])[0]
    wanted = [3 * MESSAGE_S, MESSAGE_S, MESSAGE_S - STEP_S, 0.0]
    for delay, waited, right in zip(delays, found, wanted, strict=True):
        assert waited == pytest.approx(right), delay
