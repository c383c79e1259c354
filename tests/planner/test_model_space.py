"""Which model meshes are tried at all."""

import pytest

from meshwright.planner.across.model_space import expert_forms, forms
from meshwright.planner.problem.problem import Problem
from tests.planner.problems import TINY


@pytest.mark.parametrize("make", TINY.values(), ids=TINY)
def test_models_without_experts_have_no_axis_for_them(make: type[Problem]) -> None:
    problem = make()
    assert not expert_forms(problem)
    assert not [mesh for mesh in forms(problem) if "ep" in dict(mesh)]
