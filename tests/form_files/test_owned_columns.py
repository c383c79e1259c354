"""Columns at their owners: equal to one process, whatever ids occur; as many bytes as said."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.forms.sync import exchange_of
from meshwright.forms.sync_findings import findings
from meshwright.ir.plan.parameters import as_for
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.checkpoint.export import full_state
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.owners import job_of, plan_of, trained
from tests.form_files.words import STEPS, WIDTH, assert_equal, batch, plain

FORM = "owned_columns"


def _each(cases: list[tuple[Plan, str, float | None]]) -> Any:
    return [trained(*case) for case in cases]


def test_training_is_that_of_one_process() -> None:
    """Whatever is known of the next batch; under optimizers with and without a state."""
    cases = [
        (plan_of(2, optimizer, form=FORM), known, None)
        for optimizer, known in (("adamw", "all"), ("sgd", "none"), ("adagrad", "some"),
                                 ("adamw", "read"))
    ]  # fmt: skip
    for (plan, *_), found in zip(cases, run_ranks(2, _each, cases)[0], strict=True):
        assert_equal(found, alone(plain, plan.optimizer, 0.05, None))


def test_uneven_columns_copies_and_a_rank_without_any() -> None:
    """6 columns over 4 ranks, and over 7; clipped by the norm of all, beside each level."""
    plans = [plan_of(4, "adamw", zero=3, form=FORM),
             plan_of(4, "adamw", form=FORM, dp_replicate=2, dp_shard=2)]  # fmt: skip
    wanted = alone(plain, "adamw", 0.05, 0.3)
    for plan in plans:
        assert not list(findings(plan))
    for found in run_ranks(4, _each, [(plan, "all", 0.3) for plan in plans])[0]:
        assert_equal(found, wanted)
    many = plan_of(7, "adamw", form=FORM, micro=1)
    assert_equal(run_ranks(7, _each, [(many, "some", 0.3)])[0][0], wanted)


def _resharded(plans: Mapping[str, Plan], folder: str) -> Any:
    """A run that goes on from each form under the next."""
    losses: list[float] = []
    state = None
    for number, (step, form) in enumerate(zip(range(0, STEPS, 2), [*plans, *plans], strict=False)):
        job = job_of(plans[form])
        if number:
            job.load(f"{folder}/{number - 1}")
        for own in (step, step + 1):
            losses.append(float(job.step(batch(own))))
        job.save(f"{folder}/{number}")
        state = full_state(job)
        job.close()
    return losses, state


def test_checkpoints_know_of_no_form(tmp_path: Any) -> None:
    """Columns, rows, whole tables and columns again, with the optimizer's state."""
    plans = {form: plan_of(3, "adamw", form=form) for form in (FORM, "owned_rows")}
    stage = plans[FORM].stages[0]
    plans["whole"] = replace(plans[FORM], stages=(replace(stage, by_parameter={}),))
    found = run_ranks(3, _resharded, plans, str(tmp_path))[0]
    assert_equal(found, alone(plain, "adamw", 0.05, None))


def _sent(plan: Plan) -> dict[str, int]:
    """Bytes by purpose of this rank in the second step, numbers and values."""
    job, found = job_of(plan), {"gradients": 0, "parameters": 0}
    job.step(batch(0), next_batch=batch(1))
    pending = job.recorder.pending

    def noted(what: Any, *more: Any) -> Any:
        if what.primitive == "all_to_all":
            found[what.purpose] += what.nbytes
        return pending(what, *more)

    job.recorder.pending = noted
    job.step(batch(1), next_batch=batch(3))
    job.close()
    return found


def test_what_goes_is_equal_for_all_ranks() -> None:
    """Distinct rows of each rank's samples; numbers go to all ranks, their own part left out by a
    collective's formula."""
    ranks = 2
    found = run_ranks(ranks, _sent, plan_of(ranks, "sgd", form=FORM, micro=1))

    def distinct(step: int, rank: int) -> int:
        return sum(len(batch(step)[table].chunk(ranks)[rank].unique()) for table in (0, 1))

    coming = [distinct(3, rank) for rank in range(ranks)]
    for rank, own in enumerate(found):
        assert own["gradients"] == distinct(1, rank) * WIDTH * 8
        # Half of each row that any rank asks for; how many of two tables each does.
        values = sum(coming) * (WIDTH // 2) * 8
        assert own["parameters"] == values + ranks * coming[rank] * 8 + ranks * 2 * 8


def test_the_table_says_so() -> None:
    """What is sent by the formula: rows both ways, numbers to all others."""
    stage = plan_of(4, "sgd", form=FORM).stages[0]
    choice = stage.by_parameter["words.weight"]
    assert choice.sync
    told = {"rows_each": 0.01, "row_bytes": 64, "ids": "0"}
    choice = replace(choice, sync=replace(choice.sync, settings=told))
    exchange = exchange_of(as_for(stage, choice))
    numbers, _, rows = exchange.published
    assert exchange.sent(numbers, 6400.0, 4) == pytest.approx(4 * 8)
    assert exchange.sent(rows, 6400.0, 4) == pytest.approx(4 * 64)
    assert exchange.load(rows) == 1.0


def _no_row(plan: Plan) -> str:
    ids, *others = batch(0)
    try:
        job_of(plan).step((torch.full_like(ids, 203), *others))
    except Exception as error:
        return str(error)
    return ""


def test_an_id_that_is_no_row_is_refused() -> None:
    said = run_ranks(2, _no_row, plan_of(2, "sgd", form=FORM))
    assert all("index of words.weight is out of range" in each for each in said)
