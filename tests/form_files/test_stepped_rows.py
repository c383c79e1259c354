"""Which optimizers step the rows of tables as one process does: said before anything runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import app, main
from meshwright.forms import sync_findings
from meshwright.forms.sync import for_tables, zero_of_tables
from meshwright.forms.sync_findings import findings
from meshwright.forms.updates import UPDATES, Reach, update
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.finishing.tables import variants
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.tools.check import Checked, check_plan
from tests.form_files.owners import plan_of
from tests.form_files.words import batch, model


def notes(plan: Plan) -> list[str]:
    return [f.message for f in check_plan(Checked(plan, ())).findings if f.severity == "note"]


@pytest.mark.parametrize("form", ["owned_rows", "owned_columns", "late_rows"])
def test_the_check_says_what_is_exact(form: str) -> None:
    """All rows are stepped in each step, so all that look at each element alone are; or those that
    are left out stay as they are."""
    for optimizer in UPDATES:
        if update(optimizer).reach is not Reach.ELEMENT:
            continue
        found = notes(plan_of(2, optimizer, form=form))
        assert len(found) == 2
        for note in found:
            assert f"{form} is exact" in note and "the owner of a row" in note
            assert f"by {optimizer}, which looks at the element alone" in note
            some = form != "late_rows" and optimizer in ("sgd", "adagrad")
            assert ("each step, where it has a gradient, by" in note) == some, note


def test_all_replicas_step_packed_rows() -> None:
    plan = plan_of(2, "adamw")
    own = ParameterChoice(zero=0, sync=FormChoice(form="packed_rows"))
    stage = replace(plan.stages[0], by_parameter={"words.weight": own})
    (note,) = notes(replace(plan, stages=(stage,)))
    assert "exact for words.weight: every replica steps it" in note


def test_it_is_printed_and_no_doubt(tmp_path: Path, capsys: Any) -> None:
    plan_io.save(plan_io.rehash(plan_of(2, "adamw", form="late_rows")), tmp_path / "plan.json")
    with pytest.raises(SystemExit) as left:
        main(lambda: app(["check", str(tmp_path / "plan.json")]))
    assert not left.value.code
    printed = capsys.readouterr().out
    assert "note: sync: stage 0: late_rows is exact for words.weight" in printed
    assert "the plan is sound" in printed


@pytest.mark.parametrize("reach", [Reach.PARAMETER, Reach.GROUP])
def test_what_looks_at_more_is_refused(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check; and search has another form for it."""
    plan = plan_of(2, "sgd")
    monkeypatch.setattr(sync_findings, "update", lambda name: replace(update(name), reach=reach))
    said = [str(f) for f in findings(plan) if f.severity == "error"]
    assert all(f"a step of sgd depends on {reach.value}" in each for each in said)
    assert sum("under owned_rows" in each for each in said) == 2
    problem = make_problem(
        trace(model(), batch(0)), Cluster.local(2), precision="fp64", optimizer="sgd",
        rows=RowCounts(zipf=1.1),
    )  # fmt: skip
    whole = build_plan(problem, uniform_choice(problem, dp_replicate=2))
    tried = {
        choice.sync.form
        for variant in variants(problem, whole)
        for choice in variant.stages[0].by_parameter.values() if choice.sync
    }  # fmt: skip
    assert tried == {form for form in for_tables() if not zero_of_tables(form)}
