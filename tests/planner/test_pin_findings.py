"""What `meshwright check` warns of in a plan, as files of pins say it."""

from dataclasses import replace

import pytest

from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.tools.check import Checked, check_plan
from tests.planner.problems import cluster, mlp, problem


def planned(**sizes: int) -> Plan:
    asked = problem(mlp(2), cluster(2))
    return build_plan(asked, uniform_choice(asked, **sizes), predict=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "changed", "rule", "says"),
    [
        ({"dp_replicate": 2}, {"zero": 2}, "zero", "dp_shard, which is 1; nearest: zero 0"),
        ({"dp_shard": 2, "zero": 2}, {"prefetch": 1}, "prefetch", "has no effect with zero2"),
        ({"dp_shard": 2, "zero": 3}, {"prefetch": 1}, "", ""),
        ({"dp_shard": 2, "zero": 2}, {}, "", ""),
    ],
)  # fmt: skip
def test_keys_without_effect(
    sizes: dict[str, int], changed: dict[str, int], rule: str, says: str
) -> None:
    plan = planned(**sizes)
    stage = replace(plan.stages[0], **changed)  # type: ignore[arg-type]
    checked = check_plan(Checked(replace(plan, stages=(stage,)), ()))
    found = [f for f in checked.findings if f.rule in ("zero", "prefetch")]
    assert [f.rule for f in found] == [rule] * bool(rule), found
    assert all(says in str(f) and f.severity == "warning" for f in found)
