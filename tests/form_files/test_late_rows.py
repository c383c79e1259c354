"""Rows that nobody reads next, a step later: equal to one process, whatever is known of the next
batch and whoever reads in between."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.sync_findings import findings
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Fusion
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.runtime.checkpoint.export import full_state
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.owners import job_of, plan_of, trained
from tests.form_files.words import STEPS, WIDTH, assert_equal, batch, model, plain


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ranks", "optimizer", "known"),
    [(1, "sgd", "all"), (2, "adamw", "all"), (2, "sgd", "some"), (2, "adamw", "none"),
     (3, "adagrad", "all"), (4, "sgd_momentum", "all"), (5, "adam", "some"), (2, "adam", "read")],
)  # fmt: skip
def test_training_is_that_of_one_process(ranks: int, optimizer: str, known: str) -> None:
    """With decay, moments and counts of steps; one of the ranks may have no row of a table."""
    found = run_ranks(ranks, trained, plan_of(ranks, optimizer, form="late_rows"), known)[0]
    assert_equal(found, alone(plain, optimizer, 0.05, None))


@pytest.mark.parametrize(
    ("ranks", "optimizer", "form", "sizes"),
    [(4, "adamw", "late_rows", {"dp_replicate": 2, "dp_shard": 2}),
     (4, "sgd_momentum", "late_columns", {"dp_replicate": 2, "dp_shard": 2}),
     (5, "adam", "late_columns", {})],
)  # fmt: skip
def test_copies_of_owners_and_owners_of_columns(
    ranks: int, optimizer: str, form: str, sizes: dict[str, int]
) -> None:
    """Copies read other rows next, and have gradients of other rows; a table of 6 columns among 5
    ranks, too. Every second batch is announced."""
    plan = plan_of(ranks, optimizer, form=form, **sizes)
    assert not [f for f in findings(plan) if f.severity == "error"]
    found = run_ranks(ranks, trained, plan, "some")[0]
    assert_equal(found, alone(plain, optimizer, 0.05, None))


def test_both_halves_of_what_the_paper_schedules() -> None:
    """Gradients of blocks arrive in the order in which the next forward needs them, and rows that
    are read next go first."""
    plan = plan_of(3, "adamw", form="late_columns")
    dear = FormChoice(form="dear", settings={"ahead": 1, "bucket_bytes": 4096})
    plan = replace(plan, stages=(replace(plan.stages[0], sync=dear),))
    assert not [f for f in findings(plan) if f.severity == "error"]
    found = run_ranks(3, trained, plan, "all")[0]
    assert_equal(found, alone(plain, "adamw", 0.05, None))


def _read(plan: Plan, how: str) -> list[Any]:
    """What somebody sees after each step, while rows of that are on their way."""
    job, found = job_of(plan), []
    for step in range(3):
        job.step(batch(step), next_batch=batch(step + 1))
        if how == "evaluation":
            found.append(float(job.eval(batch(5))))
        elif how == "state":
            found.append(full_state(job))
        else:
            job.sync_to()
            found.append({n: x.detach().clone() for n, x in job.model.named_parameters()})
    job.close()
    return found


def _seen(how: str) -> list[Any]:
    own, found = model(), []
    stepped = torch.optim.AdamW(own.parameters(), lr=0.05)
    for step in range(3):
        stepped.zero_grad()
        own(*batch(step)).backward()
        stepped.step()
        state = {name: x.detach().clone() for name, x in own.named_parameters()}
        found.append(float(own(*batch(5)).detach()) if how == "evaluation" else state)
    return found


@pytest.mark.parametrize("how", ["evaluation", "state", "module"])
def test_whoever_reads_in_between_sees_all_rows(how: str) -> None:
    found = run_ranks(2, _read, plan_of(2, "adamw", form="late_rows"), how)[0]
    for own, wanted in zip(found, alone(_seen, how), strict=True):
        if how == "evaluation":
            assert own == pytest.approx(wanted, rel=1e-10)
        else:
            assert_equal(([], own), ([], wanted))


@pytest.mark.parametrize(("ranks", "zero"), [(3, 1), (2, 3)])
def test_a_limit_of_the_norm_holds_nothing_back(ranks: int, zero: int) -> None:
    """It needs all rows before any is stepped."""
    plan = plan_of(ranks, "adamw", zero=zero, form="late_rows")
    assert not [f for f in findings(plan) if f.severity == "error"]
    found = run_ranks(ranks, trained, plan, "all", 0.3)[0]
    assert_equal(found, alone(plain, "adamw", 0.05, 0.3))


def test_a_checkpoint_does_not_know_of_it(tmp_path: Any) -> None:
    plan = plan_of(2, "adamw", form="late_rows")
    found = run_ranks(2, trained, plan, "all", None, str(tmp_path / "kept"))[0]
    assert_equal(found, alone(plain, "adamw", 0.05, None))


def _scheduled(plan: Plan | None) -> Any:
    """Batches accumulated in pairs, a rate that falls each step, and the optimizer's state read
    in between; without a plan: one process."""
    job = job_of(plan) if plan else None
    own = model()
    stepped = job.optimizer if job else torch.optim.AdamW(own.parameters(), lr=0.05)
    schedule, losses = torch.optim.lr_scheduler.ExponentialLR(stepped, 0.7), []
    for step in range(0, STEPS, 2):
        for number in (step, step + 1):
            if job:
                after = batch(number + 1) if number + 1 < STEPS else None
                losses.append(float(job.accumulate(batch(number), next_batch=after)))
            else:
                loss = own(*batch(number))
                (loss / 2).backward()
                losses.append(float(loss.detach()))
        if job:
            job.apply(0.5)
            if step == 2:
                stepped.state_dict()
        else:
            stepped.step()
            stepped.zero_grad()
        schedule.step()
    if job is None:
        return losses, {name: x.detach().clone() for name, x in own.named_parameters()}
    state = full_state(job)
    job.close()
    return losses, state


@pytest.mark.parametrize("kernels", [(), (Fusion("bucket_update", 1),)])
def test_late_rows_take_their_own_step(kernels: tuple[Fusion, ...]) -> None:
    """With its scale and its rate, not with those of the step in which they arrive; a kernel that
    steps scales what it reads."""
    plan = replace(plan_of(2, "adamw", form="late_rows"), kernels=kernels)
    assert_equal(run_ranks(2, _scheduled, plan)[0], alone(_scheduled, None))


def _lied(plan: Plan) -> str:
    job = job_of(plan)
    job.step(batch(0), next_batch=batch(1))
    job.step(batch(1), next_batch=batch(3))
    try:
        job.step(batch(2))
    except PlanError as error:
        return str(error)
    return ""


def test_a_batch_that_was_not_announced_is_refused() -> None:
    """If it reads a row that others than those announced would give old."""
    said = run_ranks(2, _lied, plan_of(2, "sgd", form="late_rows"))
    assert all("not the one that next_batch said" in each for each in said)


def _sent(plan: Plan, announced: bool) -> list[dict[str, int]]:
    """Rows of each kind that leave this rank, its own among them, in each step."""
    job, found = job_of(plan), []
    exchange, messages = dist.all_to_all_single, list[Tensor]()

    def noted(out: Any, x: Any, received: Any, sent: Any, **more: Any) -> Any:
        if x.dtype == torch.float64:
            messages.append(x)
        return exchange(out, x, received, sent, **more)

    dist.all_to_all_single = noted
    for step in range(4):
        messages.clear()
        job.step(batch(step), next_batch=batch(step + 1) if announced else None)
        kept = [x for stage in job.parts.stages.values() for x in stage.sync.kept]
        rows = [(any(x is one for one in kept), x.numel() // WIDTH) for x in messages]
        found.append({
            "now": sum(count for late, count in rows if not late),
            "later": sum(count for late, count in rows if late),
        })  # fmt: skip
    dist.all_to_all_single = exchange
    job.close()
    return found


def test_only_rows_that_are_read_next_go_at_once() -> None:
    """By any rank: of its batch's rows a rank sends those, and sends owners' answers."""
    ranks = 2
    found = run_ranks(ranks, _sent, plan_of(ranks, "sgd", form="late_rows"), True)
    for step in range(1, 4):
        now = later = answers = 0
        for table in (0, 1):
            coming = [set(_samples(batch(step + 1)[table], r).tolist()) for r in range(ranks)]
            answers += sum(map(len, coming))
            for rank in range(ranks):
                own = set(_samples(batch(step)[table], rank).tolist())
                now += len(own & set.union(*coming))
                later += len(own - set.union(*coming))
        assert sum(each[step]["later"] for each in found) == later
        assert sum(each[step]["now"] for each in found) == now + answers
        assert later or step == 2
    assert not any(each["later"] for each in found[0][:1]), "the first step makes the state"
    unknown = run_ranks(ranks, _sent, plan_of(ranks, "sgd", form="late_rows"), False)
    assert not any(step["later"] for own in unknown for step in own)


def _samples(x: Any, rank: int) -> Any:
    """This rank's of two micro-batches, half of each."""
    return torch.cat([half.chunk(2)[rank] for half in x.chunk(2)]).unique()


def _kept(plan: Plan) -> tuple[int, int, bool]:
    job = job_of(plan)
    for step in range(2):
        job.step(batch(step), next_batch=batch(step + 1))
    kept = sum(x.nbytes for stage in job.parts.stages.values() for x in stage.sync.kept)
    settled = job.parts.is_settled
    job.settle()
    left = sum(x.nbytes for stage in job.parts.stages.values() for x in stage.sync.kept)
    job.close()
    return kept, left, settled


def test_what_is_late_is_counted_and_let_go() -> None:
    kept, left, settled = run_ranks(2, _kept, plan_of(2, "adamw", form="late_rows"))[0]
    assert kept >= (203 // 2 + 50 // 2) * 6 * 8 and not left and not settled


def _twice(plan: Plan) -> list[Any]:
    return [trained(plan), trained(plan)]


def test_two_runs_are_equal_to_the_last_bit() -> None:
    first, second = run_ranks(3, _twice, plan_of(3, "adamw", form="late_rows"))[0]
    assert first[0] == second[0]
    assert all(first[1][name].equal(second[1][name]) for name in first[1])
