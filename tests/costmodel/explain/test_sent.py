"""What a run sent beside what its plan said: every byte has its place, and a wrong one shows."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel.explain.sent import ComparedBytes, SentKind, compared_bytes
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan, Setting
from meshwright.ir.profile.measured import Measured, save
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import in_detail, predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks
from tests.command_line import invoke
from tests.form_files.words import BATCH, VOCAB, WIDTH, batch, graph, model

RANKS = 3
ROW_BYTES = 8 * WIDTH


def predicted(said: Mapping[str, ParameterChoice]) -> Plan:
    problem = make_problem(graph(), Cluster.local(RANKS), precision="fp64", optimizer="sgd")
    choice = uniform_choice(problem, num_microbatches=2, dp_shard=RANKS, zero=1)
    plan = build_plan(problem, choice, predict=False)
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))
    return in_detail(problem, replace(plan, predicted=predict_plan(problem, plan)))


def measured(plan: Plan) -> Measured:
    """Of steps that all have the same batch."""
    job = compile_job(
        model(),
        plan,
        optimizer="sgd",
        device="cpu",
        example_inputs=batch(0),
        graph=graph(),
        check=False,
    )
    for _ in range(4):
        job.step(batch(0), next_batch=batch(0))
    job.settle()
    found = job.measured()
    job.close()
    return found


def rows(**settings: Setting) -> ParameterChoice:
    return ParameterChoice(sync=FormChoice(form="packed_rows", settings=settings), zero=0)


@pytest.fixture(scope="module")
def run() -> tuple[Plan, tuple[Measured, ...]]:
    """Words go to their owners, marks are packed, the rest is ZeRO 1."""
    ids, others, _ = batch(0)
    words = [len(part.unique()) for part in ids.split(BATCH // RANKS)]
    marks = len(others.unique())
    owned = {"rows_each": sum(words) / RANKS / VOCAB, "row_bytes": ROW_BYTES, "ids": "0"}
    said = {
        "words.weight": ParameterChoice(sync=FormChoice(form="owned_rows", settings=owned), zero=1),
        "marks.weight": rows(rows=marks / 50, row_bytes=ROW_BYTES),
    }
    plan = predicted(said)
    return plan, tuple(run_ranks(RANKS, measured, plan))


def by_kind(found: tuple[ComparedBytes, ...]) -> dict[tuple[str, str], ComparedBytes]:
    return {row.kind[1:3]: row for row in found}


def test_each_form_sends_what_was_said_of_it(run: Any) -> None:
    """Predicted is without padding: of 83 values for three ranks, and of 50 bits."""
    plan, runs = run
    found = by_kind(compared_bytes(plan, runs))
    ids, others, _ = batch(0)
    read = [set(part.unique().tolist()) for part in ids.split(BATCH // RANKS)]
    marks, rest = len(others.unique()), sum(x.numel() for x in model().parameters()) - 253 * WIDTH
    ring = (RANKS - 1) / RANKS
    rows, number = sum(map(len, read)) / RANKS, 8
    for purpose, nbytes in (("gradients", ROW_BYTES), ("parameters", ROW_BYTES + number)):
        owned = found[purpose, "owned_rows"]
        assert owned.predicted == ceil(ring * rows * nbytes - 1e-9)
        assert owned.counted == pytest.approx(ring * rows * nbytes, rel=0.03)
    packed = found["gradients", "packed_rows"]
    assert packed.predicted == ceil(2 * ring * (50 / 8 + marks * ROW_BYTES))
    assert packed.counted == pytest.approx(2 * ring * (7 + marks * ROW_BYTES))
    assert packed.error == pytest.approx(packed.predicted / packed.counted - 1)
    for purpose in ("gradients", "parameters"):
        whole = found[purpose, "zero1"]
        assert whole.predicted == ceil(ring * rest * 8)
        assert whole.counted == pytest.approx(ring * 90 * 8)
    assert len(found) == 5 and {row.kind.stage for row in found.values()} == {0}
    assert all(row.link == "loopback" for row in found.values())


def test_what_is_not_said_and_what_is_not_sent_are_rows_too(run: Any) -> None:
    plan, runs = run
    few = tuple(
        replace(m, collectives=tuple(
            replace(c, axis="tp", purpose="blocks") for c in m.collectives if c.form == "zero1"
        )) for m in runs
    )  # fmt: skip
    found = compared_bytes(plan, few)
    other = [row for row in found if row.kind.axis == "tp"]
    assert [row.kind for row in other] == [SentKind(0, "tensors", "zero1", "tp")]
    assert other[0].predicted is None and other[0].error is None and other[0].link == ""
    silent = [row for row in found if row.kind.form == "packed_rows"]
    assert [row.counted for row in silent] == [0.0] and silent[0].error is None
    assert silent[0].predicted


def test_twice_the_bytes_show(run: Any) -> None:
    plan, runs = run
    twice = tuple(
        replace(m, collectives=tuple(replace(c, nbytes=2 * c.nbytes) for c in m.collectives))
        for m in runs
    )
    once, more = (by_kind(compared_bytes(plan, found)) for found in (runs, twice))
    assert all(more[key].counted == pytest.approx(2 * once[key].counted) for key in once)


def test_a_plan_without_detail_has_nothing_to_compare(run: Any) -> None:
    plan, runs = run
    assert plan.predicted and not compared_bytes(
        replace(plan, predicted=replace(plan.predicted, detail=None)), runs
    )


def test_the_command_shows_them(
    run: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, runs = run
    for m in runs:
        save(m, tmp_path / f"measured_rank{m.rank}.json")
    plan_io.save(plan, tmp_path / "plan.json")
    monkeypatch.setenv("COLUMNS", "160")
    invoke("compare", str(tmp_path / "plan.json"), str(tmp_path))
    out = capsys.readouterr().out
    assert "owned_rows" in out and "dp_shard, loopback" in out and "585 B" in out
