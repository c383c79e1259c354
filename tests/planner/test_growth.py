"""What a plan's prediction costs for each further block: equal blocks are priced once."""

import cProfile
import pstats

import pytest

from meshwright.planner.problem.candidates import build_plan, uniform_choice
from tests.planner.problems import cluster, mlp, problem

MOST = 110
"""Function calls for each further block of a plan that nobody has seen yet: 74 to 87. They were 325
to 563 while parameters, steps of programs and memory were gone through tensor by tensor."""


def calls(layers: int, **asked: object) -> int:
    """Function calls of the first plan of a problem whose graph has been planned before."""
    facts = problem(mlp(layers), cluster(1))
    build_plan(facts, uniform_choice(facts))  # what is kept with the graph, whoever asks first
    fresh = problem(mlp(layers), cluster(2))
    choice = uniform_choice(fresh, **asked)  # type: ignore[arg-type]
    fresh.layouts(choice.stages[0].model)
    profile = cProfile.Profile()
    profile.runcall(build_plan, fresh, choice)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "asked",
    [
        {"dp_replicate": 2},
        {"dp_shard": 2, "zero": 1, "num_microbatches": 2},
        {"dp_shard": 2, "zero": 3, "recompute": "full", "num_microbatches": 2},
        {"pp": 2, "num_microbatches": 4},
    ],
    ids=str,
)
def test_a_further_block_is_cheap(asked: dict[str, object]) -> None:
    calls(8, **asked)  # what is kept for the whole process
    few, many = calls(24, **asked), calls(120, **asked)
    assert (many - few) / 96 <= MOST
