"""Rows that occur, packed: equal to one process, with the bytes of the formula; and sketches of
them: exact where each value has its own cell, unbiased, and as good in the end as exact sums."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.forms.rows import packed_bits, unpacked_bits
from meshwright.forms.sync.sketch import Hashes
from meshwright.forms.sync_findings import findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.sent import counted
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.words import STEPS, VOCAB, WIDTH, assert_equal, batch, graph, model, plain


def plan_of(ranks: int, optimizer: str, form: str, micro: int = 2, **settings: Any) -> Plan:
    problem = make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer=optimizer)
    choice = uniform_choice(problem, num_microbatches=micro, dp_replicate=ranks)
    plan = build_plan(problem, choice, predict=False)
    own = ParameterChoice(sync=FormChoice(form=form, settings=settings))
    said = {"words.weight": own, "marks.weight": own}
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))
    assert not [finding for finding in findings(plan) if finding.severity == "error"]
    return plan


def trained(plan: Plan, lr: float, clip: float | None = None, broken: str = "") -> Any:
    def made() -> Any:
        return compile_job(
            model(), plan, optimizer=plan.optimizer, lr=lr, max_grad_norm=clip, device="cpu",
            example_inputs=batch(0), check=False, graph=graph(),
        )  # fmt: skip

    job, losses = made(), []
    for step in range(STEPS):
        if broken and step == 3:
            job.save(broken)
            job.close()
            job = made()
            job.load(broken)
        losses.append(float(job.step(batch(step))))
    state = full_state(job)
    job.close()
    return losses, state


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ranks", "optimizer", "clip"),
    [(1, "sgd", None), (2, "adamw", 0.5), (3, "adagrad", None), (4, "sgd", 0.1),
     (5, "adamw", None)],
)  # fmt: skip
@pytest.mark.parametrize("form", ["packed_rows", "gathered_rows"])
def test_rows_that_occur_are_exact(
    form: str, ranks: int, optimizer: str, clip: float | None
) -> None:
    """Also of replicas with unequal shares, and of one whose samples have no row."""
    plan = plan_of(ranks, optimizer, form)
    found = run_ranks(ranks, trained, plan, 0.05, clip)[0]
    assert_equal(found, alone(plain, optimizer, 0.05, clip))


def _bytes(plan: Plan) -> list[int]:
    job = compile_job(
        model(),
        plan,
        optimizer="sgd",
        device="cpu",
        example_inputs=batch(0),
        check=False,
        graph=graph(),
    )
    with counted(job, "gradients") as sent:
        for step in range(3):
            job.step(batch(step))
    job.close()
    return [sum(each) for each in sent]


def test_what_goes_is_a_bit_a_row_and_the_rows_that_occur() -> None:
    """Padding has none: nothing is learnt of its row."""
    dense = sum(x.numel() for n, x in model().named_parameters() if "words" not in n and
                "marks" not in n) * 8  # fmt: skip
    wanted = []
    for step in range(3):
        ids, others, _ = batch(step)
        rows = len(set(ids.unique().tolist()) - {0}) + len(others.unique())
        wanted.append(dense + -(-VOCAB // 8) + -(-50 // 8) + rows * WIDTH * 8)
    found = run_ranks(2, _bytes, plan_of(2, "sgd", "packed_rows"))
    assert found == [wanted, wanted]


def test_gathered_are_the_rows_that_any_replica_has_and_their_numbers() -> None:
    """As many of each as of the replica that has most."""
    dense = sum(x.numel() for n, x in model().named_parameters() if "words" not in n and
                "marks" not in n) * 8  # fmt: skip
    wanted = []
    for step in range(3):
        ids, others, _ = batch(step)
        parts = [x.reshape(2, 2, 3, -1) for x in (ids, others)]  # micro-batch, replica
        counts = [
            [len(set(x[:, rank].unique().tolist()) - padding)
             for x, padding in zip(parts, ({0}, set()), strict=True)]
            for rank in range(2)
        ]  # fmt: skip
        rows = sum(map(max, zip(*counts, strict=True)))
        wanted.append(dense + 2 * 2 * 8 + 2 * rows * (8 + WIDTH * 8))
    found = run_ranks(2, _bytes, plan_of(2, "sgd", "gathered_rows"))
    assert found == [wanted, wanted]


class Sparse(nn.Module):
    """Gradients that are sparse other than an embedding's: of a matrix most of whose inputs are
    zero, by blocks, and of a stack of matrices of which a batch reads few."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(253, 8)
        self.experts = nn.Parameter(torch.linspace(-1, 1, 60 * 8 * 4).view(60, 8, 4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(x))
        found: Tensor = torch.einsum("bi,bij->bj", hidden, self.experts[ids]).square().mean()
        return found


def sparse() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sparse().double()


def sparse_batch(step: int) -> tuple[Tensor, Tensor]:
    """Of each input the last feature, and a run of 16 at one of two places; two experts."""
    draw = torch.Generator().manual_seed(step)
    x, place = torch.zeros(8, 253, dtype=torch.float64), 32 * (step % 2)
    x[:, place : place + 16] = torch.randn(8, 16, generator=draw, dtype=torch.float64)
    x[:, 252] = 1.0
    return x, torch.randint(0, 2, (8,), generator=draw) + step


@cache
def _traced() -> Graph:
    return trace(sparse(), sparse_batch(0))


def _sparse(form: str, settings: dict[str, Any]) -> Any:
    traced = _traced()
    problem = make_problem(traced, Cluster.local(2), precision="fp64", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=2), predict=False)
    said = {
        name: ParameterChoice(sync=FormChoice(form=form, settings={**settings, "block": block}))
        for name, block in (("wide.weight", 16), ("experts", 0))
    }
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))
    job = compile_job(
        sparse(), plan, optimizer="sgd", lr=0.5, device="cpu", graph=traced, check=False
    )
    with counted(job, "gradients") as sent:
        losses = [float(job.step(sparse_batch(step))) for step in range(3)]
    state = full_state(job)
    job.close()
    return losses, state, sent


def _sparse_plain() -> Any:
    own, losses = sparse(), []
    stepped = torch.optim.SGD(own.parameters(), lr=0.5)
    for step in range(3):
        stepped.zero_grad()
        loss = own(*sparse_batch(step))
        loss.backward()
        stepped.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in own.named_parameters()}


def test_rows_and_blocks_of_what_is_no_table() -> None:
    """Equal to one process; what goes are a bit for each of 126 blocks and 60 matrices, blocks that
    have anything, what is left beside blocks, matrices that were read, and the bias."""
    _traced()  # once, not on each rank
    found = run_ranks(2, _sparse, "packed_rows", {})[0]
    assert_equal(found[:2], alone(_sparse_plain))
    for step, sent in enumerate(found[2]):
        flat = torch.zeros(8, 253)
        flat[:, 32 * (step % 2) : 32 * (step % 2) + 16] = 1
        flat[:, 252] = 1
        blocks = int(flat.flatten()[: 126 * 16].view(126, 16).any(1).sum())
        ids = len(sparse_batch(step)[1].unique())
        assert sum(sent) == 16 + 8 + 8 * (16 * blocks + 8 + 32 * ids + 8), step
    sketched = run_ranks(2, _sparse, "sketch", {"cells": 1.0})[0]
    assert_equal(sketched[:2], alone(_sparse_plain))


class Zipf(nn.Module):
    """A table alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4000, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).square().mean()


def _zipf() -> list[tuple[float, float]]:
    """Of each step, the share of rows without a gradient on any rank, and of the dense gradient's
    bytes what was sent."""
    draw = np.random.default_rng(0)
    weight = np.arange(1, 4001) ** -1.02
    batches = [
        torch.from_numpy(draw.choice(4000, 405, p=weight / weight.sum())) for _ in range(4)
    ]  # fmt: skip
    traced = trace(Zipf(), (batches[0],))
    problem = make_problem(traced, Cluster.local(3), precision="fp32", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=3), predict=False)
    own = ParameterChoice(sync=FormChoice(form="packed_rows"))
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter={"words.weight": own}),))
    job = compile_job(
        Zipf(), plan, optimizer="sgd", lr=0.5, device="cpu", graph=traced, check=False
    )
    with counted(job, "gradients") as sent:
        for ids in batches:
            job.step((ids,))
    job.close()
    return [
        (1 - len(ids.unique()) / 4000, sum(own) / (4000 * 16 * 4))
        for ids, own in zip(batches, sent, strict=True)
    ]


def test_few_rows_are_less_than_a_fifth_of_the_bytes() -> None:
    """S2 Reducer's bar: 81 percent less at 94 percent of rows without a gradient."""
    for empty, sent in run_ranks(3, _zipf)[0]:
        assert 0.94 < empty < 0.97
        assert 1 - empty < sent <= 0.19


def test_bits() -> None:
    """They are joined by or: sums of bytes would overflow among 256 ranks."""
    for count in (1, 7, 8, 9, 200):
        marks = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 0.3
        assert packed_bits(marks).numel() == -(-count // 8)
        assert unpacked_bits(packed_bits(marks), count).equal(marks)


def _hashed(plan: Plan) -> tuple[Any, list[tuple[int, int]]]:
    """What training gives, and of each sketch its number of values and its seed."""
    drawn, noted = Hashes.drawn, list[tuple[int, int]]()

    def note(values: int, size: int, tables: int, seed: int, like: Tensor) -> Hashes:
        noted.append((values, seed))
        return drawn(values, size, tables, seed, like)

    Hashes.drawn = note  # type: ignore[assignment,method-assign]
    try:
        return trained(plan, 0.05), noted
    finally:
        Hashes.drawn = drawn  # type: ignore[method-assign]


def test_a_sketch_with_a_cell_for_each_value_is_exact() -> None:
    """Hashes are equal on all ranks, and others for each table and each step: cells that two values
    share in one step they do not share for ever."""
    plan = plan_of(2, "adamw", "sketch", cells=1.0)
    (found, noted), (_, others) = run_ranks(2, _hashed, plan)
    assert_equal(found, alone(plain, "adamw", 0.05, None))
    assert noted == others and len({seed for _, seed in noted}) == len(noted) == 2 * STEPS
    one, two = (Hashes.drawn(60, 30, 1, seed, torch.zeros(1)) for seed in (0, 1))
    assert not one.cells.equal(two.cells) and not one.signs.equal(two.signs)


def test_sketches_are_unbiased() -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(60))
    for size, tables in ((30, 1), (20, 1), (45, 3)):
        estimates = []
        for seed in range(1000):
            hashes = Hashes.drawn(60, size, tables, seed, values)
            estimates.append(hashes.decoded(hashes.coded(values)))
        found = torch.stack(estimates)
        error = found.std(dim=0) / 1000**0.5
        assert ((found.mean(dim=0) - values).abs() <= 4 * error + 1e-12).all()


def test_relative_errors_are_those_of_the_load() -> None:
    """Of as many other values in the same cell, each as large."""
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(96000))
    for size, wanted in ((96000, 0.0), (48000, 1.0), (32000, 2.0**0.5), (24000, 3.0**0.5)):
        hashes = Hashes.drawn(96000, size, 1, 0, values)
        error = (hashes.decoded(hashes.coded(values)) - values).norm() / values.norm()
        assert float(error) == pytest.approx(wanted, abs=0.02)
        left = values - hashes.shrink * hashes.decoded(hashes.coded(values))
        assert float(left.norm()) <= float(values.norm()), "error feedback never grows"


def test_what_was_lost_is_sent_later_and_kept_in_checkpoints(tmp_path: Any) -> None:
    plan = plan_of(2, "sgd", "sketch", cells=0.4)
    whole = run_ranks(2, trained, plan, 0.05)
    assert whole[0][0] == whole[1][0]
    again = run_ranks(2, trained, plan, 0.05, None, str(tmp_path / "kept"))
    assert_equal(again[0], whole[0])
    exact = alone(plain, "sgd", 0.05, None)
    assert whole[0][0] != pytest.approx(exact[0], rel=1e-6)
    assert np.mean(whole[0][0][-3:]) == pytest.approx(np.mean(exact[0][-3:]), rel=0.1)


@pytest.mark.parametrize(
    ("form", "settings", "zero", "said"),
    [
        ("packed_rows", {"rows": 0.0}, 0, "rows must be a number"),
        ("packed_rows", {}, 1, "has them whole"),
        ("gathered_rows", {"rows_each": 2}, 0, "rows_each must be a number"),
        ("gathered_rows", {}, 1, "has them whole"),
        ("sketch", {"cells": 0}, 0, "cells must be a number"),
        ("sketch", {"tables": 0}, 0, "tables must be a whole number from 1"),
    ],
)
def test_what_cannot_be_is_refused(
    form: str, settings: dict[str, Any], zero: int, said: str
) -> None:
    plan = plan_of(2, "sgd", "packed_rows")
    own = ParameterChoice(zero=zero, sync=FormChoice(form=form, settings=settings))  # type: ignore[arg-type]
    stage = replace(plan.stages[0], by_parameter={"words.weight": own})
    (finding,) = (f for f in findings(replace(plan, stages=(stage,))) if f.severity == "error")
    assert said in finding.message, finding


class Pulled(nn.Module):
    """Rows of a table that every step pulls in the same direction, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.register_buffer("pull", torch.linspace(-1, 1, 8, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.words(ids) * self.pull).sum(-1).mean()


def _pulled(steps: int) -> Tensor:
    """How far rows have come after so many steps, relative to where plain training leads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        own = Pulled().double()
    ids = torch.arange(20)
    traced = trace(own, (ids,))
    problem = make_problem(traced, Cluster.local(2), precision="fp64", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=2), predict=False)
    form = ParameterChoice(sync=FormChoice(form="sketch", settings={"cells": 0.25}))
    stage = replace(plan.stages[0], by_parameter={"words.weight": form})
    job = compile_job(own, replace(plan, stages=(stage,)), optimizer="sgd", lr=1.0, device="cpu",
                      check=False, graph=traced)  # fmt: skip
    before = own.words.weight.detach().clone()
    for _ in range(steps):
        job.step((ids,))
    job.sync_to()
    job.close()
    moved = (own.words.weight.detach() - before)[:20]
    return moved / (-steps * own.pull / 20)


def test_feedback_makes_up_for_what_estimates_lose() -> None:
    """With a quarter of the cells an estimate is shrunk to a quarter; fed back, the mean over many
    steps is whole."""
    found = run_ranks(2, _pulled, 120)[0]
    assert float(found.mean()) == pytest.approx(1.0, abs=0.1)
