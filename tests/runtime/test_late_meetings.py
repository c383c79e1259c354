"""Replicas that train alone meet no one in a step: one that is late by `delay` steps holds nobody
up, and what all have to know together they know so many steps later."""

import warnings
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.costmodel.estimate import estimate_all
from meshwright.forms.alone import lone_replicas
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import NonFinite, PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.torch_private import job_store
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.notes import notes_of
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.saver import Saver
from meshwright.runtime.step.meetings import largest
from meshwright.runtime.world.agreement import Agreement
from meshwright.runtime.world.failure import first_failure
from meshwright.testing.spawn import alone, run_ranks

STEPS, SAMPLES, TOKENS, LR, MICRO = 9, 8, 6, 0.1, 2
EVERY, DELAY, LATE = 3, 2, 4
"""From step LATE on the last replica waits until the first one is DELAY steps ahead."""
PLACES = ({"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2, "zero": 1},
          {"dp_replicate": 2, "pp": 2})  # fmt: skip
Batch = tuple[Tensor, Tensor]


class Words(nn.Module):
    """Its loss is a mean over those places that have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixed, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.out(torch.tanh(self.mixed(self.table(ids))))
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Words().double().train()


def batch(step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(11, (2, SAMPLES, TOKENS), generator=draw)
    return ids, torch.where(torch.rand(SAMPLES, TOKENS, generator=draw) < 0.4, -100, labels)


@cache
def graph() -> Graph:
    """Traced once, for plans and for the jobs of every rank that is forked after them."""
    return trace(model(), batch(0))


def plan_of(shares: tuple[int, ...] = (), **sizes: int) -> Plan:
    ranks = sizes["dp_replicate"] * sizes.get("dp_shard", 1) * sizes.get("pp", 1)
    problem = make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer="sgd")
    choice = uniform_choice(problem, num_microbatches=MICRO, **sizes)
    plan = build_plan(problem, choice, predict=False)
    sync = FormChoice(form="dasgd", settings={"every": EVERY, "delay": DELAY})
    stages = tuple(replace(stage, sync=sync) for stage in plan.stages)
    return replace(plan, stages=tuple(
        replace(stage, batch_shares=shares or stage.batch_shares) for stage in stages
    ))  # fmt: skip


def job_of(plan: Plan, **more: Any) -> Any:
    return compile_job(model(), plan, optimizer="sgd", lr=LR, device="cpu", graph=graph(),
                       check=False, **more)  # fmt: skip


@contextmanager
def counted(job: Any, group: Any) -> Any:
    """After how many steps sums over ranks of several replicas were waited for; 0: at once."""
    usual, lags = dist.all_reduce, list[int]()

    def counting(x: Tensor, *given: Any, **how: Any) -> Any:
        work, begun = usual(x, *given, **how), job.state.step
        if group is not None and how.get("group") is group:
            return work
        if not how.get("async_op"):
            lags.append(0)
            return work

        class Waited:
            def wait(self) -> None:
                lags.append(job.state.step - begun)
                work.wait()

        return Waited()

    dist.all_reduce = counting
    try:
        yield lags
    finally:
        dist.all_reduce = usual


def _trained(plan: Plan) -> Any:
    """Losses of this replica, all means that it heard, the state in the end, and when the ranks do
    what the late one has asked for."""
    job, store, found = job_of(plan), job_store(), []
    agreed, due = Agreement(plan.world_size, late=False, lag=DELAY), list[int]()
    means, late = dict[int, float](), job.replica.number == 1
    with counted(job, job.replica.group) as lags:
        for step in range(STEPS):
            if late and step == LATE:
                store.wait(["ahead"], timedelta(seconds=60))
                agreed.ask(step, "save")
            found.append(float(job.step(batch(step))))
            if not late and job.state.step == LATE + DELAY:
                store.set("ahead", "")
            if agreed.due(job.state.step):
                due.append(job.state.step)
            if job.mean_loss is not None:
                means[job.mean_loss.step] = job.mean_loss.loss
        waited = set(lags)
    job.settle()
    state = full_state(job)
    means[job.mean_loss.step] = job.mean_loss.loss
    most = largest(torch.tensor(float(job.parts.rank)), plan.world_size, job.replica)
    job.close()
    return found, means, state, due, waited, int(most)


def emulated(shares: tuple[int, int]) -> Any:
    """Losses of both replicas, one after another, and the mean of their parameters."""
    own = [model() for _ in shares]
    weights = [share / sum(shares) for share in shares]
    optimizers = [torch.optim.SGD(x.parameters(), lr=LR) for x in own]
    losses: list[list[float]] = [[], []]
    before: list[list[Tensor]] = []

    def mean(values: list[list[Tensor]]) -> list[Tensor]:
        return [weights[0] * a + weights[1] * b for a, b in zip(*values, strict=True)]

    def values() -> list[list[Tensor]]:
        return [[p.detach().clone() for p in x.parameters()] for x in own]

    for step in range(STEPS):
        halves = [[torch.split(part, list(shares)) for part in x.chunk(MICRO)] for x in batch(step)]
        for i, (x, optimizer) in enumerate(zip(own, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = x(*(torch.cat([part[i] for part in tensor]) for tensor in halves))
            loss.backward()
            optimizer.step()
            losses[i].append(float(loss.detach()))
        if before and (step + 1) % EVERY == DELAY:
            for x, had in zip(own, before, strict=True):
                for p, old, new in zip(x.parameters(), had, mean(before), strict=True):
                    p.data += new - old
        if (step + 1) % EVERY == 0:
            before = values()
    return losses, mean(values())


def test_one_that_is_late_holds_nobody_up() -> None:
    """The first replica gets ahead by as many steps as averages are late, whatever the last one
    does: else that waits in vain. Losses are a replica's own, divided by its own counts."""
    plans = [plan_of(**sizes) for sizes in PLACES]
    plans.append(plan_of((3, 1), **PLACES[0]))
    for plan in plans:
        alone_ones = lone_replicas(plan)
        assert alone_ones and alone_ones.lag == DELAY
        shares = alone_ones.shares
        losses, values = alone(emulated, shares)
        for rank, (found, means, state, due, lags, most) in enumerate(
            run_ranks(plan.world_size, _trained, plan)
        ):
            assert found == pytest.approx(losses[alone_ones.of(rank)], rel=1e-10)
            assert [means[step] for step in range(STEPS - 3)] == pytest.approx(
                [(a * shares[0] + b * shares[1]) / sum(shares)
                 for a, b in zip(*losses, strict=True)][:STEPS - 3], rel=1e-10)  # fmt: skip
            assert most == max(alone_ones.lines[alone_ones.of(rank)]), "decided by the replica"
            assert lags == {DELAY}, "no sum is waited for in the step in which it began"
            assert due == [LATE + DELAY + 1]
            if rank == 0:
                for x, wanted in zip(state.values(), values, strict=True):
                    assert torch.allclose(x, wanted, rtol=1e-10, atol=1e-12)


def test_replicas_are_alone_only_where_no_stage_has_them_meet() -> None:
    plan = plan_of(dp_replicate=2, pp=2)
    first, last = plan.stages

    def of(**other: Any) -> Any:
        return lone_replicas(replace(plan, stages=(first, replace(last, **other))))

    def late(delay: int) -> FormChoice:
        return FormChoice(form="dasgd", settings={"every": EVERY, "delay": delay})

    usual = of()
    assert usual.lines == tuple(
        tuple(sorted((first.devices[n], last.devices[n]))) for n in range(2)
    )
    assert [usual.of(rank) for rank in usual.lines[1]] == [1, 1]
    assert usual.lag == DELAY and of(sync=late(1)).lag == 1, "of the stage that waits first"
    assert of(sync=late(0)) is None and of(sync=None) is None
    assert of(batch_shares=(3, 1)) is None, "the last stage's replicas have other samples"
    assert of(devices=first.devices[::-1]) is None, "a rank is of two replicas"
    assert lone_replicas(replace(plan, precision="fp16")) is None, "all have one scale"


def test_what_is_late_is_not_in_the_price_of_a_step() -> None:
    """Neither the loss nor counts; of two ranks of a replica they are, as they meet. Notes say
    so."""
    cluster = Cluster.preset("v100-16", num_nodes=4, devices_per_node=1)
    assert cluster.between_nodes
    slow = replace(cluster.between_nodes, step_s=1e-2)
    problem = make_problem(graph(), replace(cluster, between_nodes=slow), precision="fp64",
                           optimizer="sgd")  # fmt: skip

    def priced(delay: int, **sizes: int) -> tuple[float, str]:
        plan = build_plan(problem, uniform_choice(problem, num_microbatches=1, **sizes))
        sync = FormChoice(form="dasgd", settings={"every": 64, "delay": delay})
        plan = replace(plan, stages=(replace(plan.stages[0], sync=sync),))
        found = estimate_all(graph(), problem.cluster, plan, problem.tables).prediction
        return found.step_s, "\n".join(notes_of(problem, plan))

    late_s, said = priced(2, dp_replicate=4)
    assert late_s < 1e-2 and "hear of each other 2 steps late" in said
    at_once_s, said = priced(0, dp_replicate=4)
    assert at_once_s > late_s + 1e-2 and "one that is late holds up the others" in said
    some_s, _ = priced(2, dp_replicate=2, dp_shard=2, zero=1)
    assert late_s + 2e-2 < some_s


def spoiled(job: Any, step: int, at: int) -> Batch:
    """In one step the last replica's parameters are no numbers."""
    if step == at and job.replica.number == 1:
        with torch.no_grad():
            job.parts.held[0].tensor.fill_(float("nan"))
    return batch(step)


def _stopped(plan: Plan, folder: Path) -> dict[str, Any]:
    """At which step, and with what words, under each policy."""
    found: dict[str, Any] = {}
    for policy in ("stop", "warn", "back"):
        job = job_of(plan, on_nonfinite=policy)
        saver = Saver(job, folder / policy) if policy == "back" else None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                for step in range(STEPS):
                    if saver is not None and step == 1:
                        saver.save()
                    job.step(spoiled(job, step, 3))
                found[policy] = job.state.step, [str(w.message) for w in told], job.mean_loss
            except NonFinite as error:
                found[policy] = job.state.step, str(error), job.mean_loss
                if saver is not None:
                    saver.go_back(error)
                    losses = [float(job.step(batch(step))) for step in range(5)]
                    job.settle()
                    found["again"] = job.state.step, job.state.samples, losses
                    saver.finish()
    job = job_of(plan)
    for step in range(4):
        job.step(spoiled(job, step, 3))
    for name in ("save", "export"):
        try:
            getattr(job, name)(folder / name)
        except NonFinite as error:
            found[name] = str(error)
    found["ended"] = first_failure(job_store())
    return found


def test_all_stop_or_none_at_the_same_step(tmp_path: Path) -> None:
    """As late as averages are, and before anything is saved."""
    each = run_ranks(2, _stopped, plan_of(**PLACES[0]), tmp_path)
    for found in each:
        step, text, heard = found["stop"]
        assert step == 3 + DELAY and heard.step == 3 and heard.loss != heard.loss
        assert text.startswith("step 3: the mean of all replicas' losses is nan, as parameters")
        assert "first on rank 1" in text and "rank 0" not in text
        assert found["warn"][0] == STEPS and found["warn"][2].step == STEPS - 1 - DELAY
        assert found["back"][0] == 3 + DELAY
        step, samples, losses = found["again"]
        assert step == 1 + 5 and samples == (3 + DELAY + 1 + 5) * SAMPLES
        assert all(loss == loss for loss in losses)
        assert "step 3: the mean of all" in found["save"]
        assert "the export is not written" in found["export"]
        assert found["ended"] is None, "what is caught ends no job"
    assert any("step 3" in text for text in each[0]["warn"][1]) and not each[1]["warn"][1]
    assert not (tmp_path / "save").exists() and not (tmp_path / "export").exists()


def _beside(plan: Plan) -> Any:
    """What is said of rates that differ from rank to rank, once that is heard; and the state after
    steps of two batches each, of which both are the same."""
    module = model()
    mine = torch.optim.SGD(module.parameters(), lr=LR)
    job = compile_job(module, plan, optimizer=mine, device="cpu", graph=graph(), check=False)
    for step in range(2 + DELAY + 1):
        if step == 2 and job.replica.number == 1:
            mine.param_groups[0]["lr"] = 2 * LR
        job.step(batch(step))
    try:
        job.settle()
        said = ""
    except PlanError as error:
        said = str(error)
    states = []
    for twice in (False, True):
        job = job_of(plan)
        for step in range(5):
            if twice:
                job.accumulate(batch(step))
                job.accumulate(batch(step))
                job.apply(0.5)
            else:
                job.step(batch(step))
        job.settle()
        states.append((full_state(job, everyone=True), job.mean_loss))
        job.close()
    return said, *states


def test_what_travels_with_losses_and_steps_of_several_batches() -> None:
    for said, (once, loss), (twice, again) in run_ranks(2, _beside, plan_of(**PLACES[0])):
        assert said.startswith("the groups of your optimizer differ from rank to rank"), said
        assert loss.step == again.step == 4 and loss.loss == pytest.approx(again.loss, rel=1e-12)
        for name, x in once.items():
            assert torch.allclose(twice[name], x, rtol=1e-12, atol=1e-14), name
