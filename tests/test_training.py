"""What people do around the step, on a real model: clip, schedule, save, go on elsewhere, bf16."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.layout import Shard, parse_placement
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.loss_module import TrainingStep, flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.notes import notes_of
from meshwright.planner.search.search import search
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES
from meshwright.testing.spawn import alone, run_ranks
from tests.traces import zoo_graph

LR, CLIP, STEPS = 1e-2, 0.5, 4
CASE = CASES["gpt2"]


@cache
def graph(batch: int = 8) -> Graph:
    return zoo_graph(CASE, batch)


def plan_for(world: int, batch: int = 8, precision: str = "fp64", **choice: object) -> Plan:
    problem = make_problem(
        graph(batch), Cluster.local(world), precision=precision, optimizer="adam"
    )
    return build_plan(problem, uniform_choice(problem, **choice), predict=False)


PLANS = {
    "one": (1, {}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
    "tp3": (3, {"tp": 3}),
    "zero3_tp2": (4, {"dp_shard": 2, "tp": 2, "zero": 3}),
    "zero1": (3, {"dp_shard": 3, "zero": 1}),
}


def named(name: str) -> Plan:
    world, choice = PLANS[name]
    return plan_io.rehash(replace(plan_for(world, **choice), max_grad_norm=CLIP))


def make_job(plan: Plan, zeroed: bool = False):
    model = CASE.model()
    if zeroed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    return compile_job(
        model, plan, graph=graph(plan.global_batch_size), loss_fn=CASE.loss_fn,
        optimizer="adam", lr=LR,
    )  # fmt: skip


def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain training with clipping and a learning rate that falls."""
    model = CASE.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for seed in range(STEPS):
        values = flatten_batch(CASE.example(8, seed))
        loss = TrainingStep(model, CASE.loss_fn, tuple(values))(*values.values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@cache
def wanted() -> tuple[list[float], dict[str, torch.Tensor]]:
    return alone(reference)


def first_half(plan: Plan, folder: Path) -> list[float]:
    job = make_job(plan)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, 0.5)
    losses = []
    for seed in range(STEPS // 2):
        losses.append(float(job.step(CASE.example(8, seed))))
        scheduler.step()
    job.save(folder, scheduler)
    job.close()
    return losses


def second_half(plan: Plan, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    job = make_job(plan, zeroed=True)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, 0.5)
    job.load(folder, scheduler)
    losses = []
    for seed in range(STEPS // 2, STEPS):
        losses.append(float(job.step(CASE.example(8, seed))))
        scheduler.step()
    state = full_state(job)
    job.export(folder / "exported")
    job.close()
    return losses, state


@pytest.mark.parametrize(
    ("before", "after"),
    [("tp2_pp2", "zero3_tp2"), ("zero3_tp2", "tp3"), ("tp3", "one"), ("one", "tp2_pp2"),
     ("zero1", "tp3")],
)  # fmt: skip
def test_clipped_training_goes_on_under_another_plan(before, after, tmp_path):
    losses, parameters = wanted()
    first, second = named(before), named(after)
    for found in run_ranks(first.world_size, first_half, first, tmp_path):
        assert found == pytest.approx(losses[: STEPS // 2], rel=1e-10)
    results = run_ranks(second.world_size, second_half, second, tmp_path)
    for found, _ in results:
        assert found == pytest.approx(losses[STEPS // 2 :], rel=1e-10)
    state = results[0][1]
    for name, parameter in parameters.items():
        if name in state:
            torch.testing.assert_close(state[name], parameter, rtol=1e-8, atol=1e-9)
    assert len(state) >= len(graph().parameters)


def test_tp_really_splits_the_fused_weights():
    layouts = {layout.pattern: layout for layout in named("tp2_pp2").layouts}
    placed = layouts["transformer.h.*"].parameters["attn.c_attn.weight"]["tp"]
    assert parse_placement(placed) == Shard(1, outer=3)


def test_export_loads_into_the_original_module(tmp_path):
    plan = named("tp2_pp2")
    run_ranks(plan.world_size, first_half, plan, tmp_path)
    _, state = run_ranks(plan.world_size, second_half, plan, tmp_path)[0]
    files = list((tmp_path / "exported").glob("*.safetensors"))
    model = CASE.model()
    missing, unexpected = model.load_state_dict(load_file(files[0]), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied to the embedding
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), state[name])


def test_dapples_fifteen_to_one():
    plan = plan_for(16, batch=30, pp=2, stage_dp=(15, 1), num_microbatches=2)
    difference = check_equal(CASE, plan, graph(30), steps=2)
    assert difference.worst_of_both <= 1e-9, str(difference)


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_the_plan_that_search_returns_runs_and_is_equal(name):
    case = CASES[name]
    found = zoo_graph(case)
    plan = search(
        found, Cluster.local(4), precision="fp64", optimizer="adam", time_limit_s=20,
        progress=False,
    )  # fmt: skip
    assert plan.world_size == 4 and plan.predicted and plan.evidence
    difference = check_equal(case, plan, found, steps=3)
    assert difference.worst_of_both <= 1e-9, str(difference)


@pytest.mark.parametrize(("name", "word"), [("gnmt", "lstm"), ("resnet50", "batch")])
def test_a_plan_says_what_its_strategy_cannot_do(name, word):
    case = CASES[name]
    found = zoo_graph(case)
    problem = make_problem(found, Cluster.local(4), precision="fp64", optimizer="adam")
    choice = uniform_choice(problem, tp=2, pp=2, num_microbatches=2)
    notes = " ".join(notes_of(problem, build_plan(problem, choice, predict=False)))
    assert word in notes.lower(), notes


def bf16_losses(plan: Plan) -> list[float]:
    job = compile_job(
        CASE.model(torch.float32), plan, graph=single_graph(), loss_fn=CASE.loss_fn,
        optimizer="adam", lr=1e-3,
    )  # fmt: skip
    batches = [CASE.example(8, seed, torch.float32) for seed in range(2)]
    losses = [float(job.step(batch)) for batch in batches]
    job.close()
    return losses


@cache
def single_graph() -> Graph:
    return trace(CASE.model(torch.float32), CASE.example(8, 0, torch.float32), CASE.loss_fn)


def bf16_plan(world: int, **choice: object) -> Plan:
    problem = make_problem(
        single_graph(), Cluster.local(world), precision="bf16-autocast", optimizer="adam"
    )
    return build_plan(problem, uniform_choice(problem, **choice), predict=False)


def bf16_reference() -> list[float]:
    model = CASE.model(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for seed in range(2):
        values = flatten_batch(CASE.example(8, seed, torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            loss = TrainingStep(model, CASE.loss_fn, tuple(values))(*values.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("world", "choice"),
    [(1, {}), (2, {"tp": 2}), (2, {"dp_shard": 2, "zero": 3}),
     (2, {"pp": 2, "num_microbatches": 2, "recompute": "full"})],
)  # fmt: skip
def test_bf16_is_autocast_with_a_loss_in_float32(world, choice):
    plan = bf16_plan(world, **choice)
    for found in run_ranks(world, bf16_losses, plan):
        assert found == pytest.approx(alone(bf16_reference), rel=2e-3)
        # A loss rounded to bfloat16 has at most 8 significant bits.
        assert any(loss != float(torch.tensor(loss).bfloat16()) for loss in found)
