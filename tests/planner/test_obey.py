"""What is pinned for single stages and blocks is kept by the plans that searchers find."""

from dataclasses import replace

import pytest

from meshwright.ir.errors import Infeasible
from meshwright.ir.plan.plan import Plan
from meshwright.planner.pins.constraints import broken
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import uniform_choice
from meshwright.planner.search.search import search_problem
from tests.planner.mixed import mixed
from tests.planner.problems import cluster, mlp, problem


def found(*constraints: str, devices: int = 4) -> Plan:
    asked = problem(mlp(), cluster(devices), constraints=constraints)
    plan = search_problem(asked)
    assert not broken(asked.constraints, plan, asked.graph)
    return plan


PIPELINE = ("pp=2", "num_microbatches=2", "schedule=gpipe", "recompute=none")


@pytest.mark.parametrize(
    "constraints",
    [
        (*PIPELINE, "stage 0 mesh tp=2", "stage 1 mesh dp_shard=2"),
        (*PIPELINE, "stage 0 devices 2-3", "stage 1 dp=2"),
        (*PIPELINE, "stage 0 mesh dp_replicate=2", "stage 0 shares 3,1"),
        ("pp=2", "num_microbatches=2", "schedule=gpipe", "block layers.2 recompute=full",
         "block layers.[01] recompute=none"),
        (*PIPELINE, "block layers.1 starts stage 1", "stage 1 zero=3"),
        (*PIPELINE, "stage 1 tp>=2", "dp_shard=1"),
    ],
)  # fmt: skip
def test_plans_that_are_found_keep_them(constraints: tuple[str, ...]) -> None:
    found(*constraints)


def test_stages_on_device_types() -> None:
    pins = (*PIPELINE, "stage 0 device_type=slow", "tp=1")
    asked = problem(mlp(), mixed(), constraints=pins)
    plan = search_problem(asked)
    assert set(plan.stages[0].devices) <= {2, 3} and not broken(
        asked.constraints, plan, asked.graph
    )


def test_a_choice_without_such_pins_stays() -> None:
    asked = problem(mlp(), cluster(4), constraints=("tp=2",))
    choice = uniform_choice(asked, pp=2, tp=2)
    assert obey(asked, choice) is choice


def test_as_little_as_possible_is_changed() -> None:
    asked = problem(
        mlp(),
        cluster(4),
        constraints=("stage 1 tp=2", "block layers.1 recompute=full", "stage 1 devices 1,0"),
    )
    choice = uniform_choice(asked, pp=2, dp_shard=2, zero=2, num_microbatches=2, cuts=(1,))
    first, last = obey(asked, choice).stages
    assert first == replace(choice.stages[0], devices=(2, 3))
    assert last.model == (("tp", 2),) and last.devices == (1, 0)
    assert last.recompute == ("layers.1",)


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(Infeasible, match="stage 0 tp=3"):
        found("pp=1", "stage 0 tp=3", devices=2)
