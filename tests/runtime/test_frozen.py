"""Parameters without gradients: no gradient, no state, no message but what gathers them, and their
place in memory is predicted."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.costmodel.comm.volume import replica_sends
from meshwright.costmodel.stage.placement import stage_costs
from meshwright.costmodel.stage.stage_model import stage_model
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import ParameterChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.finishing.frozen import variants
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES, ModelCase
from meshwright.testing.sent import counted
from meshwright.testing.spawn import run_ranks
from tests.traces import zoo_graph

BATCH, WIDTH, DEPTH = 8, 512, 6
WHOLE = ParameterChoice(zero=1)


def half() -> nn.Module:
    """A GPT-2 whose tied table and first half are frozen."""
    model = CASES["gpt2"].build()
    for part in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:2]):
        part.requires_grad_(False)
    return model


HALF = ModelCase("half", half, CASES["gpt2"].batch)


@cache
def traced(precision: str) -> Graph:
    return zoo_graph(HALF, BATCH, precision=precision)


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("", {"dp_shard": 4, "zero": 1, "num_microbatches": 2}),
    ("", {"dp_shard": 4, "zero": 3, "recompute": "full", "prefetch": 1}),
    ("", {"dp_shard": 2, "zero": 3, "tp": 2, "num_microbatches": 2}),
    ("", {"pp": 2, "dp_shard": 2, "zero": 3, "num_microbatches": 4, "schedule": "zero_bubble"}),
    ("", {"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "interleaved"}),
    ("copies64", {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "num_microbatches": 2}),
    ("copies64", {"dp_shard": 4, "zero": 3, "num_microbatches": 2}),
]


def planned(precision: str, choice: dict[str, Any]) -> tuple[Plan, Graph]:
    graph = traced(precision)
    problem = make_problem(graph, Cluster.local(4), optimizer="adam", precision=precision or "fp64")
    prefetch = choice.pop("prefetch", 0)
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    return replace(plan, stages=tuple(replace(s, prefetch=prefetch) for s in plan.stages)), graph


def test_a_job_with_frozen_parameters_equals_the_single_process() -> None:
    plans = [planned(precision, dict(choice)) for precision, choice in PLANS]
    some = {"transformer.h.0.*": WHOLE, "transformer.h.3.ln_1.*": WHOLE}
    mixed = tuple(replace(stage, by_parameter=some) for stage in plans[1][0].stages)
    plans.append((replace(plans[1][0], stages=mixed), plans[1][1]))
    found = check_each_equal(HALF, plans)
    names = [*PLANS, ("some blocks whole", {})]
    bad = {str(c): str(d) for c, d in zip(names, found, strict=True) if not d.worst_of_both <= 1e-9}
    assert not bad


class Layer(nn.Module):
    """Frozen, with little beside it that is trained, or nothing."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.gain = nn.Parameter(0.01 * torch.ones(WIDTH, rank)) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + torch.relu(self.wide(x))
        return made if self.gain is None else made + x @ self.gain @ self.gain.T


class Deep(nn.Module):
    """Layers that are frozen, then such beside which little is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Layer(0) for _ in range(2))
        self.layers = nn.ModuleList(Layer(8) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.first, *self.layers):
            x = layer(x)
        return x.square().mean()


def batch() -> tuple[Tensor]:
    return (torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0)),)


@cache
def problem(precision: str, world: int, memory: str = "") -> Problem:
    graph = trace(Deep(), batch(), precision="bf16" if precision == "bf16" else "")
    pins = (f"memory<={memory}",) if memory else ()
    return make_problem(
        graph, Cluster.local(world), optimizer="adamw", precision=precision, constraints=pins
    )


CHOICES: list[tuple[int, dict[str, Any]]] = [
    (1, {"num_microbatches": 2}),
    (2, {"dp_replicate": 2}), (2, {"dp_shard": 2, "zero": 1}),
    (2, {"dp_shard": 2, "zero": 2, "num_microbatches": 2}),
    (2, {"dp_shard": 2, "zero": 3}), (2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
]  # fmt: skip


def run_all(plans: list[Plan], graph: Graph) -> list[tuple[int, list[int], list[int], set[str]]]:
    """Of each plan: most bytes of tensors, bytes of a step's messages of parameters and of
    gradients, and what the optimizer has state of."""
    found = []
    for plan in plans:
        job = compile_job(Deep(), plan, optimizer="adamw", device="cpu", graph=graph)
        with counted(job, "parameters") as gathers:
            job.step(batch())
        with counted(job, "gradients") as sums:
            job.step(batch())
        job.track_memory(batch())
        assert job.tensor_memory
        names = {id(h.tensor): h.param.fqn for h in job.parts.held}
        state = {names[id(p)] for p in job.optimizer.state}
        found.append((job.tensor_memory.peak_bytes, gathers[0], sums[0], state))
        job.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_cost_their_place_and_their_gathers_alone(precision: str) -> None:
    for world in (1, 2):
        asked = problem(precision, world)
        choices = [choice for ranks, choice in CHOICES if ranks == world]
        plans = [build_plan(asked, uniform_choice(asked, **c), predict=False) for c in choices]
        for choice, plan, (tracked, gathers, sums, state) in zip(
            choices, plans, run_all_on(world, plans, asked.graph), strict=True
        ):
            memory = predict_plan(asked, plan).stages[0].memory
            assert memory.tensor_bytes == pytest.approx(tracked, rel=0.01), choice
            assert state == {f"layers.{i}.gain" for i in range(DEPTH)}
            costs = stage_costs(asked.tables, plan, 0)
            sync = stage_model(asked.tables, plan, 0, costs).sync
            told = {"parameters": 0.0, "gradients": 0.0}
            for _, send, messages in replica_sends(sync, plan.num_microbatches):
                told[send.what] += sum(one.nbytes for one in messages)
            share = (world - 1) / world * (2 if choice.get("dp_replicate") else 1)
            assert told["gradients"] == pytest.approx(share * sum(sums)), choice
            assert told["parameters"] == pytest.approx((world - 1) / world * sum(gathers)), choice
            trained = sum(x.nbytes for x in asked.graph.parameters if x.requires_grad)
            wide = 2 if precision == "bf16" else 1
            assert sum(sums) <= wide * trained * plan.num_microbatches


def run_all_on(world: int, plans: list[Plan], graph: Graph) -> list[Any]:
    found: list[Any] = run_ranks(world, run_all, plans, graph)[0]
    return found


def test_blocks_before_the_first_gradient_are_gathered_for_the_forward_alone() -> None:
    asked = problem("fp32", 2)
    plan = build_plan(asked, uniform_choice(asked, dp_shard=2, zero=3), predict=False)
    _, gathers, _, _ = run_all_on(2, [plan], asked.graph)[0]
    layer, gain = 4 * WIDTH * WIDTH, 4 * WIDTH * 8
    assert len(asked.tables.still) == 2
    assert sum(gathers) == 2 * layer + 2 * DEPTH * (layer + gain)


def test_as_many_frozen_blocks_are_whole_as_memory_allows() -> None:
    layer, zero3 = 4 * WIDTH * WIDTH, {"dp_shard": 2, "zero": 3}

    def made(asked: Problem) -> tuple[Plan, list[Plan]]:
        plan = build_plan(asked, uniform_choice(asked, **zero3))
        return plan, list(variants(asked, plan))

    plan, found = made(problem("fp32", 2))
    assert plan.predicted
    assert len(found) == 1 and found[0].predicted
    assert len(found[0].stages[0].by_parameter) == 2 + DEPTH
    before, after = (p.predicted.stages[0].memory for p in (plan, found[0]))  # type: ignore[union-attr]
    assert after.parameters_bytes - before.parameters_bytes == (2 + DEPTH) * layer // 2
    assert found[0].predicted.step_s < plan.predicted.step_s
    room = before.total_bytes + 17 * layer // 16  # the last gather takes as much as two blocks
    _, some = made(problem("fp32", 2, f"{room}B"))
    assert some and all(p.predicted and p.predicted.step_s < plan.predicted.step_s for p in some)
    assert len(some[-1].stages[0].by_parameter) == 2
    assert (
        "first.0.wide.weight" not in some[-1].stages[0].by_parameter
    )  # it costs one gather, not two


def checked(plan: Plan, graph: Graph) -> str:
    job = compile_job(
        HALF.model(torch.float32), plan, optimizer="adam", device="cpu", graph=graph, check=True
    )
    job.step(HALF.example(BATCH, 0, torch.float32))
    job.close()
    return str(job.checked)


def test_a_job_is_checked_though_what_is_frozen_is_there_in_narrow_numbers_only() -> None:
    graph = trace(
        HALF.model(torch.float32), HALF.example(BATCH, 0, torch.float32), precision="bf16"
    )
    asked = make_problem(graph, Cluster.local(2), optimizer="adam", precision="bf16")
    plan = build_plan(asked, uniform_choice(asked, dp_shard=2, zero=3), predict=False)
    assert "one step of the plan" in run_ranks(2, checked, plan, graph)[0]


def test_blocks_are_named_by_patterns_that_name_nothing_else() -> None:
    """Also one with little beside it that is trained; parameters of other blocks are left alone."""
    model = half()
    model.transformer.h[1].ln_1.requires_grad_(True)
    graph = trace(model, HALF.example(BATCH))
    asked = make_problem(graph, Cluster.local(2), optimizer="adam", precision="fp32")
    plan = build_plan(asked, uniform_choice(asked, dp_shard=2, zero=3))
    (found,) = variants(asked, plan)
    assert set(found.stages[0].by_parameter) == {
        "transformer.h.0.*", "transformer.h.1.*",
        "transformer.wte.weight", "transformer.wpe.weight",
    }  # fmt: skip
