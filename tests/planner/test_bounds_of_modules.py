"""Bounds where modules differ in precision: below each plan, in as much memory as it takes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.choice_space import ChoiceSpace
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.bounds.frames import frames
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import build_plan
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.search import search_problem
from tests.planner.problems import cluster

WIDTH, SAMPLES, FEW = 64, 16, 3
PINS: list[tuple[int, tuple[str, ...]]] = [
    (1, ("num_microbatches=2",)),
    (2, ("zero=1", "num_microbatches=2")),
    (2, ("zero=3", "num_microbatches=4")),
    (2, ("pp=2", "num_microbatches=4")),
    (2, ("tp=2",)),
]


class Layers(nn.Module):
    """Equal ones, of which some may have another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.mse_loss(self.head(x), y)


@cache
def traced(precision: str) -> Graph:
    return trace(
        Layers(), (torch.zeros(SAMPLES, WIDTH), torch.zeros(SAMPLES, 4)), precision=precision
    )


def asked(precision: str, devices: int, pins: tuple[str, ...]) -> Problem:
    machine = cluster(devices)
    peaks = {"float32": 1e9, "bfloat16": 2e9}
    device = replace(machine.device_types[0], peak_flops=peaks)
    machine = replace(machine, device_types=(device,))
    return make_problem(
        traced(precision), machine, precision=precision, constraints=pins, optimizer="adam"
    )


def plans(problem: Problem) -> Iterator[Plan]:
    """A few, taken evenly."""
    choices = ChoiceSpace(problem)
    every = [choice for frame in frames(problem) for choice in choices.of(frame)]
    for choice in every[:: max(1, len(every) // FEW)]:
        yield build_plan(problem, obey(problem, choice))


@pytest.mark.parametrize(
    "precision", ["bf16-sums, layers.1=fp32", "bf16, head=fp32, layers.*=fp32"]
)
def test_no_plan_is_below(precision: str) -> None:
    count = 0
    for devices, pins in PINS:
        problem = asked(precision, devices, pins)
        for plan in plans(problem):
            assert plan.predicted
            most = max(stage.memory.total_bytes for stage in plan.predicted.stages)
            tight = asked(precision, devices, (*pins, f"memory<={most}B"))
            assert not excess_bytes(tight, plan)
            for fits, waits in ((problem, True), (problem, False), (tight, True)):
                bound_s = lower_bound(fits, waits=waits)
                assert 0 < bound_s <= plan.predicted.step_s * (1 + 1e-5), plan
            count += 1
    assert count >= FEW * len(PINS)


def test_a_search_says_how_far_its_plan_is_from_it() -> None:
    plan = search_problem(asked("bf16, layers.1=fp32", 2, ()), time_limit_s=3)
    assert plan.predicted and plan.evidence
    assert 0 < plan.evidence.bound_s <= plan.predicted.step_s
    assert not plan.evidence.exhausted
