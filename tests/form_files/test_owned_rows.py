"""Rows at their owners: equal to one process, whatever is known of the next batch."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.forms.sync_findings import findings
from meshwright.forms.tables import check_tables, table_findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import BlockLayout, FormChoice, ParameterChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.owners import job_of, plan_of, trained
from tests.form_files.words import (
    STEPS,
    VOCAB,
    WIDTH,
    assert_equal,
    batch,
    error_beyond,
    graph,
    model,
    plain,
)


@pytest.mark.sampled
@pytest.mark.parametrize("known", ["all", "none", "some", "read"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_training_is_that_of_one_process(known: str, optimizer: str) -> None:
    """With decay and moments of rows that do not occur; also where somebody looks at parameters."""
    found = run_ranks(2, trained, plan_of(2, optimizer), known)[0]
    assert_equal(found, alone(plain, optimizer, 0.05, None))


@pytest.mark.parametrize(("ranks", "zero"), [(3, 1), (4, 3), (5, 2)])
def test_uneven_tables_and_shares_beside_each_level(ranks: int, zero: int) -> None:
    """203 and 50 rows over ranks, clipped by the norm of all."""
    plan = plan_of(ranks, "adamw", zero=zero)
    assert not list(findings(plan))
    found = run_ranks(ranks, trained, plan, "all", 0.3)[0]
    assert_equal(found, alone(plain, "adamw", 0.05, 0.3))


def test_copies_of_owners() -> None:
    plan = plan_of(4, "adamw", dp_replicate=2, dp_shard=2)
    found = run_ranks(4, trained, plan, "all", 0.3)[0]
    assert_equal(found, alone(plain, "adamw", 0.05, 0.3))


@pytest.mark.parametrize("how", [{"overlap": "block"}, {"recompute": {"*": "full"}}])
def test_look_ups_run_as_blocks_do(how: Any) -> None:
    """In two halves, and again for their backward."""
    plan = plan_of(2, "adamw")
    if "recompute" in how:
        how = {"recompute": {block.name: "full" for block in graph().blocks}}
    plan = replace(plan, stages=(replace(plan.stages[0], **how),))
    assert_equal(run_ranks(2, trained, plan)[0], alone(plain, "adamw", 0.05, None))


def test_a_checkpoint_does_not_know_of_it(tmp_path: Any) -> None:
    found = run_ranks(2, trained, plan_of(2, "adamw"), "all", None, str(tmp_path / "kept"))[0]
    assert_equal(found, alone(plain, "adamw", 0.05, None))


def _accumulated(plan: Plan) -> list[float]:
    job, losses = job_of(plan), []
    for step in range(0, STEPS, 2):
        first = job.accumulate(batch(step), next_batch=batch(step + 1))
        after = batch(step + 2) if step + 2 < STEPS else None
        second = job.accumulate(batch(step + 1), next_batch=after)
        job.apply(0.5)
        losses += [float(first), float(second)]
    job.close()
    return losses


def _accumulated_plain() -> list[float]:
    own, losses = model(), []
    stepped = torch.optim.AdamW(own.parameters(), lr=0.05)
    for step in range(0, STEPS, 2):
        stepped.zero_grad()
        for number in (step, step + 1):
            loss = own(*batch(number))
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        stepped.step()
    return losses


def test_accumulated_batches() -> None:
    found = run_ranks(2, _accumulated, plan_of(2, "adamw"))[0]
    assert found == pytest.approx(alone(_accumulated_plain), rel=1e-10)


def _sent(plan: Plan) -> list[dict[str, int]]:
    """Bytes by purpose of this rank's tables in each step, and how many messages they go in."""
    job, found = job_of(plan), []
    pending = job.recorder.pending
    for step in range(4):
        seen = {"gradients": 0, "parameters": 0, "messages": 0}

        def noted(what: Any, *more: Any, seen: dict[str, int] = seen) -> Any:
            if what.primitive == "all_to_all":
                seen[what.purpose] += what.nbytes
                seen["messages"] += 1
            return pending(what, *more)

        job.recorder.pending = noted  # type: ignore[method-assign]
        job.step(batch(step), next_batch=batch(step + 1))
        found.append(dict(seen))
    job.close()
    return found


def test_what_goes_is_the_rows_that_occur() -> None:
    """Distinct ones: of each rank's samples for gradients, of its next batch for parameters, where
    what others ask for goes out. Numbers go once, when rows are asked for, and of both tables all
    goes together: how many are asked for, which, what they are, their gradients."""
    ranks = 2
    found = run_ranks(ranks, _sent, plan_of(ranks, "sgd"))
    for step in range(1, 4):
        rows = {"gradients": 0, "parameters": 0}
        for table in (0, 1):
            for rank in range(ranks):
                own = _samples(batch(step)[table], rank)
                coming = _samples(batch(step + 1)[table], rank)
                rows["gradients"] += len(own.unique())
                rows["parameters"] += len(coming.unique())
        assert all(each[step]["messages"] == 4 for each in found)
        for purpose, count in rows.items():
            numbers = 8 * count + 2 * ranks * ranks * 8 if purpose == "parameters" else 0
            wanted = count * WIDTH * 8 + numbers
            assert sum(each[step][purpose] for each in found) == wanted, (step, purpose)
    assert VOCAB * WIDTH * 8 > 4 * max(each[1]["gradients"] for each in found)


def _samples(x: Any, rank: int) -> Any:
    """This rank's of two micro-batches, half of each."""
    first, second = x.chunk(2)
    return torch.cat([first.chunk(2)[rank], second.chunk(2)[rank]])


def _lied(plan: Plan) -> str:
    job = job_of(plan)
    job.step(batch(0), next_batch=batch(2))
    try:
        job.step(batch(1))
    except PlanError as error:
        return str(error)
    return ""


def test_a_batch_that_was_not_announced_is_refused() -> None:
    assert all(
        "not the one that next_batch said" in said
        for said in run_ranks(2, _lied, plan_of(2, "sgd"))
    )


def test_the_self_check_takes_it() -> None:
    assert run_ranks(2, _checked, plan_of(2, "adamw"))[0]


def _checked(plan: Plan) -> bool:
    job = job_of(plan, check=True)
    done = job.checked is not None and not any("the plan" in each for each in job.checked.unchecked)
    job.close()
    return done


class Tied(nn.Module):
    """A table that the output layer reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(30, 4), nn.Linear(4, 30, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.words(ids)), ids)


@pytest.mark.parametrize(
    ("ids", "tied", "near"),
    [("1", False, "ids '0'"), ("", False, "ids '0'"), ("0", True, "read otherwise too")],
)
def test_rows_that_no_input_names_are_never_old(ids: str, tied: bool, near: str) -> None:
    """A wrong input, or a table of which all rows are read: refused, by the check and the job."""
    own = Tied().double() if tied else model()
    example = (torch.arange(8),) if tied else batch(0)
    traced = trace(own, example)
    problem = make_problem(traced, Cluster.local(2), precision="fp64", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_shard=2, zero=1), predict=False)
    form = FormChoice(form="owned_rows", settings={"ids": ids})
    said = {"words.weight": ParameterChoice(zero=1, sync=form)}
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))
    (finding,) = table_findings(plan, traced)
    assert "others are read" in finding.message and near in finding.nearest
    with pytest.raises(PlanError, match="others are read"):
        check_tables(plan, traced)
    assert not list(table_findings(plan_of(2, "sgd"), graph()))


def _of_few_bits(step: int) -> tuple[Tensor, ...]:
    ids, others, y = batch(step)
    return ids.int(), others.int(), y


@cache
def _graph_of_few_bits() -> Graph:
    return trace(model(), _of_few_bits(0))


def _trained_on(plan: Plan, few: bool) -> list[float]:
    give, traced = (_of_few_bits, _graph_of_few_bits()) if few else (batch, graph())
    job = compile_job(model(), plan, optimizer="sgd", lr=0.05, device="cpu", check=False,
                      example_inputs=give(0), graph=traced)  # fmt: skip
    losses = [
        float(loss) for step in range(3) for loss in (job.step(give(step)), job.eval(give(0)))
    ]
    job.close()
    return losses


def test_ids_of_fewer_bits() -> None:
    plan = plan_of(2, "sgd")
    problem = make_problem(
        _graph_of_few_bits(), Cluster.local(2), precision="fp64", optimizer="sgd"
    )
    choice = uniform_choice(problem, num_microbatches=2, zero=1, dp_shard=2)
    few = build_plan(problem, choice, predict=False)
    own = plan.stages[0].by_parameter
    few = replace(few, stages=(replace(few.stages[0], by_parameter=own),))
    assert run_ranks(2, _trained_on, few, True)[0] == run_ranks(2, _trained_on, plan, False)[0]


def _no_row(plan: Plan) -> str:
    return error_beyond(job_of(plan))


def test_an_id_that_is_no_row_is_refused() -> None:
    said = run_ranks(2, _no_row, plan_of(2, "sgd"))
    assert all("index of words.weight is out of range" in each for each in said)


def test_ids_that_a_layout_gathers_are_refused() -> None:
    """A replica would look up what samples of others name."""
    traced, plan = graph(), plan_of(2, "sgd")
    assert not list(table_findings(plan, traced))

    def gathered(layout: BlockLayout) -> BlockLayout:
        ops = {key: axes for key, axes in layout.ops.items() if "embedding" not in key}
        return replace(layout, ops=ops)

    plan = replace(plan, layouts=tuple(gathered(layout) for layout in plan.layouts))
    said = list(table_findings(plan, traced))
    assert len(said) == 2 and all("gathers ids of all replicas" in f.message for f in said)


def test_what_cannot_be_is_refused() -> None:
    plan = plan_of(2, "sgd", dp_replicate=2, zero=0)
    found = list(findings(plan))
    assert "dp_shard, which is 1" in found[0].message and "dp_shard 2" in found[0].nearest
    own = ParameterChoice(zero=0, sync=FormChoice(form="owned_rows", settings={"ids": 3}))
    plan = plan_of(2, "sgd")
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter={"words.weight": own}),))
    said = " ".join(finding.message for finding in findings(plan))
    assert "ids must be a name" in said and "zero is 0" in said
