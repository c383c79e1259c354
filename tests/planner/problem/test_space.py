"""Meshes that a search tries are priced as the stages that plans have."""

from dataclasses import fields, replace

import pytest

from meshwright.forms.sync import chosen, exchange_of, suits
from meshwright.ir.plan.plan import FormChoice
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.space import Mesh
from tests.planner.problems import cluster, mlp, problem


@pytest.mark.parametrize(("copies", "shards"), [(4, 1), (1, 4), (2, 2)])
def test_a_form_does_the_same_in_both(copies: int, shards: int) -> None:
    """Among copies of owners only those of dp_shard own something."""
    asked, known = problem(mlp(), cluster(4)), 0
    for zero in (0, 1) if shards > 1 else (0,):
        choice = uniform_choice(asked, dp_replicate=copies, dp_shard=shards, zero=zero)
        (stage,) = build_plan(asked, choice, predict=False).stages
        for form in chosen():
            if suits(form, zero):
                known += 1
                found = exchange_of(replace(stage, sync=FormChoice(form=form)))
                tried = Mesh(copies, shards, (), zero, sync=form).exchange
                for field in fields(found):
                    got, wanted = (getattr(each, field.name) for each in (tried, found))
                    assert got == wanted, (form, field.name)
    assert known > 5
