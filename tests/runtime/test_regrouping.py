"""Buckets that are cut anew while a job trains: exact whatever sizes are tried, alike on all ranks,
and at a small share of the time."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.ir.comm import by_store
from meshwright.ir.errors import MismatchError, PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.runtime.step import regrouping
from meshwright.runtime.step.regrouping import SHARE, regroup
from meshwright.runtime.world import world
from meshwright.testing.nets import graph_of, plan_for
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.dear_jobs import Words, assert_equal, data, dear, made, plain, take

STEPS = 13
SIZES = (1, 600, 2**30, 90, 5000, 1, 2**30)
PLANS = {
    "parameters": (3, {"dp_shard": 3, "zero": 1}),
    "gradients": (3, {"dp_replicate": 3}),
    "both": (4, {"dp_shard": 2, "dp_replicate": 2, "zero": 1}),
}


def plan(kind: str, **settings: int) -> Plan:
    ranks, mesh = PLANS[kind]
    shares: Any = {"batch_shares": (3, 3, 2)} if ranks == 3 else {}
    usual = plan_for(Words, ranks, inputs=data(0), **mesh)
    stages = tuple(replace(stage, **shares) for stage in usual.stages)
    return dear(replace(usual, stages=stages), **settings)


def count(job: Job) -> int:
    return sum(len(stage.sync._buckets) for stage in job.parts.stages.values())


def forced(first: Plan, other: Plan, folder: str) -> list[tuple[Any, ...]]:
    """Steps between which buckets become others, with a checkpoint after one of the cuts; from it
    a job goes on whose buckets stay, and the other way round."""
    job, scheduler = made(first)
    begun = [(id(h.tensor), h.rows) for h in job.parts.held]
    losses, counts = [], [count(job)]
    for step in range(STEPS):
        losses += take(job, scheduler, step, step + 1)
        if step == 6:
            job.save(f"{folder}/cut", scheduler)
        if step % 2:
            regroup(job, SIZES[step // 2])
            counts.append(count(job))
    assert begun == [(id(h.tensor), h.rows) for h in job.parts.held]
    found = [(losses, full_state(job), counts)]
    job.close()
    job, scheduler = made(other)
    take(job, scheduler, 0, 1)
    job.load(f"{folder}/cut", scheduler)
    losses = take(job, scheduler, 7, 9)
    job.save(f"{folder}/uncut", scheduler)
    take(job, scheduler, 9, STEPS)
    found.append((losses, full_state(job), []))
    job.close()
    job, scheduler = made(first)
    regroup(job, 2**30)
    job.load(f"{folder}/uncut", scheduler)
    regroup(job, 300)
    found.append((take(job, scheduler, 9, STEPS), full_state(job), []))
    job.close()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("kind", PLANS)
def test_forced_cuts_are_exact_and_checkpoints_know_nothing_of_them(kind: str, tmp_path) -> None:
    losses, state = alone(plain, STEPS)
    ranks = PLANS[kind][0]
    plans = plan(kind, bucket_bytes=1), plan(kind, bucket_bytes=700)
    cut, uncut, again = run_ranks(ranks, forced, *plans, str(tmp_path), timeout_s=300)[0]
    assert cut[0] == pytest.approx(losses, rel=1e-10)
    assert max(cut[2]) == 10 and min(cut[2]) == 1 and len({*cut[2]}) > 3
    for _, parameters, _ in (cut, uncut, again):
        assert_equal(parameters, state)


def pipeline() -> Plan:
    return dear(plan_for(Words, 4, inputs=data(0), pp=2, dp_shard=2, zero=1), bucket_bytes=2**30)


def tuned(plan: Plan, steps: int) -> tuple[Any, ...]:
    """A job that tunes itself, by a clock on which a bucket takes a tenth of all else; how many
    buckets each step ran with, and how often ranks told each other anything."""
    job, scheduler = made(plan, tune=True, check=False)
    assert job.retuning is not None
    took = job.retuning.took

    def by_clock(record: Any) -> None:
        record.step_s = 1.0 + 0.1 * count(job)
        took(record)

    job.retuning.took = by_clock  # type: ignore[method-assign]
    losses, counts, kinds, talks = [], [], [], []
    for step in range(steps):
        before = by_store._turns[""]
        counts.append(count(job))
        losses += take(job, scheduler, step, step + 1)
        talks.append(by_store._turns[""] - before)
        kinds.append(job.stats.taken[-1].kind)
    found = losses, full_state(job), counts, talks, kinds, job.measured().tuned
    job.close()
    return found


def test_a_job_tunes_itself_and_stays_exact(capfd) -> None:
    pytest.importorskip("bayes_opt")
    steps = 70
    losses, state = alone(plain, steps)
    found = run_ranks(3, tuned, plan("parameters", bucket_bytes=1), steps, timeout_s=400)
    ours, parameters, counts, talks, kinds, record = found[0]
    assert ours == pytest.approx(losses, rel=1e-10)
    assert_equal(parameters, state)
    assert record.over and record.tried[0].size_bytes == 8, "the smallest parameter has 8 bytes"
    assert [trial.step_s for trial in record.tried[:1]] == [2.0] and counts[0] == 10
    assert counts[-1] == 1 and record.gained == pytest.approx(0.45)
    assert all(rank[2] == counts and rank[4] == kinds for rank in found)
    assert all(rank[5] is None for rank in found[1:])
    assert talks[0] == 1, "whether all have read the same batch"
    assert sum(t > 0 for t in talks[1:]) == len(record.tried), "ranks talk once a trial"
    assert kinds[0] == "warm-up" and kinds.count("tuning") == 5 * len(record.tried) - 1
    assert record.spent_s <= SHARE * record.elapsed_s
    assert "45.0% of a step saved beside the plan's" in capfd.readouterr().err


def test_a_pipeline_tunes_all_stages_alike() -> None:
    pytest.importorskip("bayes_opt")
    steps = 14
    losses, _ = alone(plain, steps)
    found = run_ranks(4, tuned, pipeline(), steps, timeout_s=300)
    assert found[0][0] == pytest.approx(losses, rel=1e-10)
    assert len({*found[0][2]}) > 1 and found[0][5].tried and not found[0][5].over
    assert len({tuple(rank[4]) for rank in found}) == 1


def refused(plans: list[Plan]) -> list[str]:
    found = []
    for number, plan in enumerate([*plans, plans[0]]):
        tune = number < len(plans) or world.rank() == 0
        kind = PlanError if number < len(plans) else MismatchError
        with pytest.raises(kind) as error:
            compile_job(Words(), plan, lr=0.1, device="cpu", tune=tune, check=False,
                        graph=graph_of(plan))  # fmt: skip
        found.append(str(error.value))
    return found


def test_what_cannot_be_tuned_is_refused_on_all_ranks() -> None:
    usual = plan_for(Words, 4, inputs=data(0), dp_shard=4, zero=1)
    late = pipeline()
    first, last = late.stages
    small = replace(last, sync=replace(last.sync, settings={"bucket_bytes": 64}))
    for said in run_ranks(4, refused, [usual, rehash(replace(late, stages=(first, small)))]):
        assert "by zero1, with buckets that cannot be cut anew" in said[0] and "dear" in said[0]
        assert "[64, 1073741824] bytes" in said[1] and "give all of them 64" in said[1]
        assert "tune differs" in said[2]


def test_rests_pay_for_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of a job that stands still: after a trial that took long, the next one waits."""
    pytest.importorskip("bayes_opt")

    class Still:
        class failures:
            @staticmethod
            def guard() -> Any:
                return torch.no_grad()

    monkeypatch.setattr(regrouping, "_bounds", lambda job: (2**10, 2**20, 2**12))
    monkeypatch.setattr(regrouping, "regroup", lambda job, size: None)
    made = regrouping.Retuning(Still(), steps=3)  # type: ignore[arg-type]

    class Record:
        kind = "timed"

        def __init__(self, seconds: float) -> None:
            self.step_s = seconds

    shares, kinds = [], []
    for _ in range(4000):
        before = made.kind
        if before == "tuning" and kinds and kinds[-1] == "timed":
            shares.append(made._spent_s / made._elapsed_s)
        kinds.append(before)
        made.took(Record(1.0 if made._bytes == 2**12 else 3.0))  # type: ignore[arg-type]
        if made.over:
            break
    assert made.over and made._bytes == 2**12 and len(shares) > 3
    assert max(shares) <= SHARE * 1.001
    tuned = made.tuned
    assert tuned is not None and tuned.gained == 0.0 and tuned.chosen_bytes == 2**12
    assert tuned.spent_s == pytest.approx(4.0 * (len(tuned.tried) - 1), rel=0.1)
