"""Names of layers in a row are one in plan files and tables, and each again when they are read."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import dumps, loads, rehash
from meshwright.ir.plan.runs import MOST, from_runs, in_runs
from meshwright.ir.plan.show import printed, render
from tests.tools.report.plans import piped


def _plan() -> Plan:
    """Of whose first stage many layers are recomputed, but for one in between."""
    plan = piped(2, 2, 8, 4)
    again = {f"h.{i}": "full" for i in range(40) if i != 12}
    saved = {f"h.{i}": {"mlp/gelu": "offload"} for i in range(10)}
    first = replace(plan.stages[0], recompute=again, saved=saved)
    return replace(plan, stages=(first, *plan.stages[1:]))


def test_a_file_has_runs_and_the_plan_each_name() -> None:
    plan = rehash(_plan())
    text = dumps(plan)
    (first, *_) = json.loads(text)["stages"]
    assert first["recompute"] == {"h.0..11": "full", "h.13..39": "full"}
    assert first["saved"] == {"h.0..9": {"mlp/gelu": "offload"}}
    again = loads(text)
    assert again == plan and again.hash == plan.hash
    assert dumps(again) == text
    # With each name, as older files have them, it is the same plan.
    data = json.loads(text)
    data["stages"][0] |= {"recompute": dict(plan.stages[0].recompute)}
    assert loads(json.dumps(data)) == plan


def test_names_may_go_on_behind_the_number() -> None:
    each = {f"h.{i}.mlp": "full" for i in range(3)}
    assert in_runs(each) == {"h.0..2.mlp": "full"}
    assert from_runs({"h.0..2.mlp": "full"}, "plan") == each


def test_tables_have_runs() -> None:
    shown = " ".join(printed(render(_plan())).split())
    assert "h.0..11, h.13..39" in shown


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(["h", "a.b", "3"]), st.integers(0, 30), st.booleans()),
        st.sampled_from(["full", "none"]), max_size=40,
    )
)  # fmt: skip
def test_there_and_back(drawn: dict[tuple[str, int, bool], str]) -> None:
    items = {f"{head}.{n}{'.x' * tail}": how for (head, n, tail), how in sorted(drawn.items())}
    short = in_runs(items)
    assert from_runs(short, "plan") == items
    assert list(from_runs(short, "plan")) == list(items)
    assert len(short) <= len(items)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (("h.0", "h.1"), ("h.0", "h.1")),
        (("h.8", "h.9", "h.10", "h.11"), ("h.8..11",)),
        (("h.0", "h.2", "h.4"), ("h.0", "h.2", "h.4")),
        (("h.0.a.0", "h.0.a.1", "h.1.a.2"), ("h.0.a.0", "h.0.a.1", "h.1.a.2")),
        (("h.0.a.3", "h.1.a.3", "h.2.a.3"), ("h.0..2.a.3",)),
        (("0", "1", "2"), ("0..2",)),
        (("h.00", "h.01", "h.02"), ("h.00", "h.01", "h.02")),
        (("lm_head", "h.*"), ("lm_head", "h.*")),
    ],
)
def test_what_is_a_run(names: tuple[str, ...], short: tuple[str, ...]) -> None:
    assert tuple(in_runs(dict.fromkeys(names, "full"))) == short


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("h.3..1", "'h.3..1' is no run of names; one is like 'model.layers.0..69'"),
        ("h.a..b", "is no run of names"),
        ("h.0..2..4", "is no run of names"),
        ("h.00..2", "is no run of names"),
        ("..3", "is no run of names"),
        (
            f"h.10..{MOST + 10}",
            f"has {MOST + 1} names; of a plan's runs together there may be {MOST}",
        ),
        ("h.0..999999999", "has 1000000000 names"),
        ("h.1..3", "'h.2' is there twice; say it once"),
    ],
)
def test_what_is_none_is_refused(key: str, why: str) -> None:
    data = json.loads(dumps(rehash(_plan())))
    data["stages"][0]["recompute"] = {"h.2": "full", key: "full"}
    with pytest.raises(PlanError, match="recompute") as raised:
        loads(json.dumps(data), check_hash=False)
    assert why in str(raised.value)


def test_runs_of_a_file_are_bounded_together() -> None:
    """However they are shared out over its stages."""
    data = json.loads(dumps(rehash(_plan())))
    data["stages"][0]["recompute"] = {"a.0..4": "full"}
    data["stages"][0]["saved"] = {}
    data["stages"][1]["recompute"] = {f"b.1..{MOST - 4}": "full"}
    with pytest.raises(PlanError, match=r"stages\.1\.recompute: 'b\.1.*together"):
        loads(json.dumps(data), check_hash=False)
    assert len(from_runs({"a.0..4": "full", "b.1..5": "full"}, "plan", 10)) == 10
    with pytest.raises(PlanError, match="together"):
        from_runs({"a.0..4": "full", "b.1..6": "full"}, "plan", 10)
