"""Two plans side by side."""

import json
from dataclasses import replace

import pytest

from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.plan.show import printed
from meshwright.tools.diff.show import as_data, difference, render
from tests.ir.plans import plan as toy
from tests.tools.report.plans import piped

PLAN = piped(4, 2, 8, 6)


def rows(a, b):
    return {(r.section, r.what): (r.first, r.second) for r in difference(a, b).structure}


def figure(a, b, what):
    return next(f for f in difference(a, b).figures if f.what == what)


def test_equal_plans_say_so():
    found = difference(PLAN, PLAN)
    assert not found.structure and as_data(found)["equal"]
    assert printed(render(found)) == "the plans are equal"


def test_plans_that_do_the_same_say_so():
    other = rehash(replace(PLAN, notes=("another note",), evidence=None))
    found = difference(PLAN, other)
    assert found.same.startswith("the plans do the same") and not as_data(found)["equal"]


def test_stages_are_compared_one_by_one():
    stages = (*PLAN.stages[:1], replace(PLAN.stages[1], zero=2, recompute={"h.*": "full"}))
    found = rows(PLAN, replace(PLAN, stages=(*stages, *PLAN.stages[2:])))
    assert found == {("stages", "1: zero"): ("0", "2"), ("stages", "1: recompute"): ("-", "h.*")}


def test_a_stage_that_is_not_there_is_one_row():
    found = rows(PLAN, piped(2, 4, 8, 6))
    assert found["stages", "stages"] == ("4", "2")
    assert found["stages", "3"] == ("h.6 .. h.7, 6-7, dp_replicate 2, h.*", "-")
    assert found["schedule", "pipeline ranks"] == ("4", "2")


def test_schedules_differ_from_one_action_on():
    first = PLAN.schedule.rows[0].replace("0F1 0F2", "0F2 0F1")
    schedule = replace(PLAN.schedule, rows=(first, *PLAN.schedule.rows[1:]))
    found = rows(PLAN, replace(PLAN, schedule=schedule))
    ((section, what), (a, b)) = next(iter(found.items()))
    assert (section, what) == ("schedule", "rank 0, from action 1")
    assert a.startswith("0F1 0F2") and b.startswith("0F2 0F1")


def test_placements_and_ops_that_differ_are_named():
    layouts = list(PLAN.layouts)
    placed = {**layouts[0].parameters, "mlp.up.weight": {"tp": "S(1)"}}
    layouts[0] = replace(layouts[0], parameters=placed, ops={"mlp.up/linear": {}})
    found = rows(PLAN, replace(PLAN, layouts=tuple(layouts)))
    assert found["layouts", "h.* mlp.up.weight"] == ("tp S(0)", "tp S(1)")
    assert ("layouts", "h.*: 1 ops split otherwise") in found


def test_figures_have_their_change():
    other = piped(2, 4, 8, 6)
    assert figure(PLAN, other, "step").change == pytest.approx(7 / 9 - 1)
    assert figure(PLAN, other, "fullest rank").change == 0
    assert figure(PLAN, other, "all ranks").first == 8 * 4 * 2**30
    bare = figure(PLAN, toy(), "all ranks")
    assert (bare.second, bare.change) == (None, None)


def test_data_and_tables_have_the_same():
    found = difference(PLAN, toy(), ("one", "two"))
    data = json.loads(json.dumps(as_data(found)))
    text = printed(render(found), width=120)
    assert data["verdict"] == "the plans differ" and "one" in text and "two" in text
    assert len(data["structure"]) == len(found.structure)
    for row in data["figures"]:
        assert row["what"] in text
