"""Pins of single parameters: texts, searches that keep them, and what is said of them."""

from dataclasses import replace

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.plan.parameters import stage_for
from meshwright.ir.plan.plan import FormChoice, ParameterChoice
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.planner.pins.constraints import broken, parse_constraint, parse_constraints
from meshwright.planner.pins.parameter_pins import ParametersAs
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.tools.diff.rows import structure
from tests.form_files.small import graph


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("parameters head.* zero=0", ParameterChoice()),
        ("parameters * zero=3", ParameterChoice(zero=3)),
        (
            "parameters layers.0.* sync=dear,update=sgd,zero=1",
            ParameterChoice(zero=1, sync=FormChoice(form="dear"), update="sgd"),
        ),
    ],
)
def test_texts(text: str, choice: ParameterChoice) -> None:
    found = parse_constraint(text)
    assert isinstance(found, ParametersAs) and found.choice == choice and str(found) == text
    assert parse_constraints([text], graph()) == (found,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parameters head.* zreo=0", "nearest is 'zero'"),
        ("parameters head.* zero=4", "zero must be 0 or 1 or 2 or 3; nearest is"),
        ("parameters head.* zero=1,zero=2", "said twice"),
        ("parameters head.* sync=deer", "or sketch; nearest is 'dear'"),
        ("parameters head.* sync=dear,zero=3", "goes with zero=0 or zero=1"),
        ("parameters head.* update=adamv", "nearest is 'adam"),
        (
            "parameters head.* store=host",
            "store must be on_host or shards_on_host or sums_on_host or update_on_host",
        ),
        ("parameters haed.weight zero=0", "no such parameter; nearest is 'head.weight'"),
        ("parameters head.*", "none that exists"),
    ],
)
def test_what_is_none_is_refused_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said.replace("*", r"\*")):
        parse_constraints([text], graph())


PIN = "parameters head.* zero=0,update=sgd"


@pytest.mark.parametrize("searcher", ["ilp", "exhaustive", "dqn"])
def test_searches_keep_it(searcher: str) -> None:
    cluster = Cluster.local(4)
    pins = (PIN, "parameters layers.1.up.weight sync=dear,zero=1", "zero=1", "pp in 1,2")
    problem = make_problem(graph(), cluster, precision="fp64", constraints=pins)
    plan = search_problem(problem, searcher, progress=False, time_limit_s=20)
    found = loads(dumps(plan))
    own = [s for s in found.stages if "head.*" in s.by_parameter]
    assert own and stage_for(own[0], "head.weight").zero == 0
    assert not broken(problem.constraints, found, graph())
    assert found.evidence and found.evidence.gap is None and not found.evidence.exhausted
    assert "parameters" in str(found) and "head.*: zero 0, update sgd" in str(found)
    stages = tuple(replace(s, by_parameter={}) if s is own[0] else s for s in found.stages)
    assert broken(problem.constraints, replace(found, stages=stages), graph())
    rows = structure(found, replace(found, stages=stages))
    assert any("zero 0, update sgd" in row.first and "parameters" in row.what for row in rows)


def test_what_fits_no_memory_names_it() -> None:
    """Whole on every rank, as pinned, it is too much; in shards it fits."""
    cluster = Cluster.local(2)
    pins = ("zero=3", "pp=1", "num_microbatches=1")
    free = make_problem(graph(), cluster, precision="fp64", constraints=pins, objective="memory")
    least = search_problem(free, progress=False)
    assert least.predicted
    cap = f"memory<={int(least.predicted.peak_bytes * 1.01)}B"
    pins = (*pins, cap, "parameters layers.* zero=0")
    asked = make_problem(graph(), cluster, precision="fp64", constraints=pins)
    with pytest.raises(Infeasible, match=r"parameters layers"):
        search_problem(asked, progress=False)
