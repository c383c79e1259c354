"""Jobs whose blocks read copies of parameters: all of it in float64 is exact, and in narrower types
it equals one process that does the same."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.forms.sync_findings import check
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.precision import copies_of
from meshwright.ir.precision import precision as of_name
from meshwright.ir.trace.loss_module import TrainingStep, flatten_batch
from meshwright.ir.trace.module_numbers import wide_parameters
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.notes import notes_of
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.runtime.step import loss_scale
from meshwright.runtime.step.loss_scale import LossScale, leaves_out, unless
from meshwright.runtime.step.updates import stepped_by_kernel
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES
from meshwright.testing.spawn import alone, run_ranks
from tests.traces import zoo_graph

EXACT = "copies64"
MIXED = "copies32, transformer.h.1=fp64, transformer.ln_f=fp64"
BATCH = 8


@cache
def traced(name: str, precision: str) -> Graph:
    case = CASES[name]
    return zoo_graph(case, BATCH, precision=precision)


def planned(
    name: str, world: int, precision: str, sync: FormChoice | None = None, **choice: Any
) -> tuple[Plan, Graph]:
    graph = traced(name, precision)
    problem = make_problem(graph, Cluster.local(world), optimizer="adam")
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    assert plan.precision == precision
    stages = tuple(replace(stage, sync=sync) for stage in plan.stages)
    return replace(plan, stages=stages), graph


ONE = [{}, {"num_microbatches": 4}, {"recompute": "full"}]
FOUR = [
    {"dp_replicate": 4}, {"dp_replicate": 4, "num_microbatches": 2},
    {"dp_shard": 4, "zero": 1}, {"dp_shard": 4, "zero": 1, "num_microbatches": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "num_microbatches": 2},
    {"dp_shard": 4, "zero": 3}, {"dp_shard": 2, "zero": 3, "tp": 2, "num_microbatches": 2},
    {"pp": 2, "dp_shard": 2, "zero": 1, "num_microbatches": 4, "schedule": "zero_bubble"},
    {"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "interleaved"},
]  # fmt: skip
DEAR = FormChoice(form="dear", settings={"bucket_bytes": 4096, "ahead": 2})


def test_a_job_of_copies_equals_the_single_process() -> None:
    name = "gpt2"
    four: list[tuple[FormChoice | None, dict[str, Any]]] = [(None, choice) for choice in FOUR]
    four += [(DEAR, {"dp_shard": 4, "zero": 1}), (DEAR, {"dp_replicate": 4})]
    for world, choices in ((1, [(None, choice) for choice in ONE]), (4, four)):
        plans = [planned(name, world, EXACT, sync, **choice) for sync, choice in choices]
        found = zip(choices, check_each_equal(CASES[name], plans), strict=True)
        bad = {str(c): str(d) for c, d in found if not d.worst_of_both <= 1e-9}
        assert not bad


def copied_training(name: str, precision: str, steps: int, parts: int) -> dict[str, torch.Tensor]:
    """Plain PyTorch: a copy in narrower numbers makes gradients, which are summed and stepped in
    wider ones."""
    case, dtypes = CASES[name], copies_of(precision)
    scale = LossScale(torch.device("cpu")).value if of_name(precision).scales_loss else 1.0
    assert dtypes
    model, twin = case.model(torch.float32).to(dtypes.stepped), case.model(torch.float32)
    wide = wide_parameters(twin, dtypes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for seed in range(steps):
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                q.data = p.to(dtypes.stepped if id(q) in wide else dtypes.read, copy=True)
                p.grad = torch.zeros_like(p)
        values = flatten_batch(case.example(BATCH, seed, torch.float32))
        step = TrainingStep(twin, case.loss_fn, tuple(values), dtypes)
        total = 0.0
        for part in zip(*(x.chunk(parts) for x in values.values()), strict=True):
            twin.zero_grad(set_to_none=True)
            loss = step(*part) / parts
            (loss * scale).backward()
            total += float(loss.detach())
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                if q.grad is not None:
                    p.grad += q.grad.to(p.dtype) / scale
        optimizer.step()
        losses.append(total)
    return {"losses": torch.tensor(losses)} | dict(model.state_dict())


def job_of_copies(name: str, jobs: list[tuple[Plan, Graph]], steps: int) -> list[Any]:
    found = []
    for plan, graph in jobs:
        case = CASES[name]
        job = compile_job(
            case.model(torch.float32), plan, optimizer="adam", lr=1e-3, loss_fn=case.loss_fn,
            device="cpu", graph=graph,
        )  # fmt: skip
        batches = [case.example(BATCH, seed, torch.float32) for seed in range(steps)]
        losses = torch.tensor([float(job.step(batch)) for batch in batches])
        dtypes = {str(h.tensor.dtype) for h in job.parts.held}
        found.append(({"losses": losses} | full_state(job), dtypes))
        job.close()
    return found


@cache
def traced32(name: str, precision: str) -> Graph:
    case = CASES[name]
    example = case.example(BATCH, 0, torch.float32)
    return trace(case.model(torch.float32), example, case.loss_fn, precision=precision)


@pytest.mark.parametrize(
    ("precision", "most"),
    [("bf16", 0.1), ("bf16-sums", 0.15), ("fp16", 0.03), ("copies32", 1e-4), (MIXED, 1e-4),
     ("fp32, transformer.h.0=bf16", 0.1)],
)  # fmt: skip
def test_copies_are_those_of_plain_pytorch(precision: str, most: float) -> None:
    """One rank does what plain PyTorch does, up to the step; several round otherwise: how far apart
    all parameters end, per how far they have moved."""
    graph, dtypes = traced32("gpt2", precision), copies_of(precision)
    assert dtypes
    for t in graph.parameters:
        assert f"torch.{t.dtype}" == str(dtypes.read_by(t.fqn.rpartition(".")[0]))
    assert f"torch.{graph.tensors[graph.loss].dtype}" == str(dtypes.stepped)
    begun = CASES["gpt2"].model(torch.float32).state_dict()
    for world, choices in (
        (1, [{}, {"num_microbatches": 4}]),
        (2, [{"dp_replicate": 2}, {"dp_shard": 2, "zero": 1, "num_microbatches": 2},
             {"dp_shard": 2, "zero": 3}, {"pp": 2, "num_microbatches": 2}, {"tp": 2}]),
    ):  # fmt: skip
        jobs = []
        for choice in choices:
            problem = make_problem(graph, Cluster.local(world), optimizer="adam")
            jobs.append(
                (build_plan(problem, uniform_choice(problem, **choice), predict=False), graph)
            )
        found = run_ranks(world, job_of_copies, "gpt2", jobs, 3)[0]
        for choice, (state, held) in zip(choices, found, strict=True):
            assert held == {str(dtypes.stepped)}
            parts = choice.get("num_microbatches", 1)
            wanted = alone(copied_training, "gpt2", precision, 3, parts)
            torch.testing.assert_close(state["losses"], wanted["losses"], rtol=most / 50, atol=0)
            keys = sorted(begun.keys() & state.keys())
            moved, off = (
                torch.cat([(state[k].double() - x[k].double()).flatten() for k in keys]).norm()
                for x in (begun, wanted)
            )
            assert off / moved <= (1e-5 if world == 1 else most), (choice, off / moved)


def overflowing(plans: list[tuple[Plan, Graph]], folder: str) -> list[Any]:
    """Of each plan: what a left-out step leaves, scales after it, and how the next plan goes on
    beside one that has no break."""
    found = []
    case = CASES["gpt2"]

    def job_of(number: int, check: bool) -> Job:
        plan, graph = plans[number % len(plans)]
        return compile_job(
            case.model(torch.float32), plan, optimizer="adam", lr=1e-3, max_grad_norm=1.0,
            device="cpu", graph=graph, check=check,
        )  # fmt: skip

    for number in range(len(plans)):
        job = job_of(number, check=True)
        batch = case.example(BATCH, 0, torch.float32)
        first = full_state(job)
        assert job.loss_scale
        job.loss_scale.value = 2.0**40
        job.step(batch)
        left = full_state(job)
        skipped = job.loss_scale.value, job.loss_scale.skipped, job.state.step, job.grad_norm
        job.loss_scale.value = 2.0**12
        losses = [float(job.step(batch)) for _ in range(3)]
        job.save(f"{folder}/{number}")
        then = job_of(number + 1, check=False)
        then.load(f"{folder}/{number}")
        assert then.loss_scale
        scale, ends = then.loss_scale.state(), []
        for each in (job, then):
            each.loss_scale.value = 2.0**40  # type: ignore[union-attr]
            each.step(batch)
            ends.append((float(each.step(batch)), each.loss_scale.state()))  # type: ignore[union-attr]
            each.close()
        found.append((first, left, skipped, losses, scale, ends))
    return found


def test_steps_that_overflow_are_left_out_and_the_scale_shrinks(tmp_path: Path) -> None:
    graph = traced32("gpt2", "fp16")
    plans = []
    for choice in ({"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3},
                   {"pp": 2, "num_microbatches": 2}):  # fmt: skip
        problem = make_problem(graph, Cluster.local(2), optimizer="adam", max_grad_norm=1.0)
        chosen = uniform_choice(problem, **choice)
        plans.append((build_plan(problem, chosen, predict=False), graph))
    found = run_ranks(2, overflowing, plans, str(tmp_path))[0]
    for first, left, skipped, losses, scale, (own, other) in found:
        assert all(torch.equal(left[name], x) for name, x in first.items())
        assert skipped == (2.0**39, 1, 1, 0.0)
        assert losses[0] > losses[1] > losses[2]
        assert scale == {"value": 2.0**12, "good": 3, "skipped": 1}
        assert own[1] == other[1] and own[1]["skipped"] > 1
        assert own[0] == pytest.approx(other[0], rel=1e-5)


def scaled(plan: Plan, graph: Graph, interval: int, first: float, fused: bool) -> Any:
    """Parameters after three steps that count, with momentum; with `first`, the scale of a step
    before them, which overflows. The scale doubles each `interval` steps."""
    case = CASES["gpt2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scale, "_INTERVAL", interval)
        job = compile_job(
            case.model(torch.float32), plan, device="cpu", graph=graph, max_grad_norm=math.inf,
            optimizer=lambda given: torch.optim.SGD(given, 0.05, momentum=0.9, fused=fused),
        )  # fmt: skip
        batch = case.example(BATCH, 0, torch.float32)
        assert job.loss_scale
        if first:
            job.loss_scale.value = first
            job.step(batch)
        job.loss_scale.value = 2.0**8
        norms = []
        for _ in range(3):
            job.step(batch)
            assert job.grad_norm is not None
            norms.append(float(job.grad_norm))
        found = full_state(job), job.loss_scale.skipped, norms
        job.close()
    return found


def test_momentum_begins_with_the_first_step_that_counts() -> None:
    """Whether the device leaves out a step that overflows or the host does, and whatever the scale
    grows to."""
    graph = traced32("gpt2", "fp16")
    problem = make_problem(graph, Cluster.local(1), optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem), predict=False)
    wanted, _, norms = alone(scaled, plan, graph, 2000, 0.0, True)
    assert norms[0] > norms[1] > 0
    for interval, first, fused, near in (
        (2000, 2.0**40, True, 0.0), (2000, 2.0**40, False, 1e-6), (1, 0.0, True, 1e-3),
    ):  # fmt: skip
        found, skipped, again = alone(scaled, plan, graph, interval, first, fused)
        assert skipped == bool(first)
        assert again == pytest.approx(norms, rel=max(near, 1e-12))
        for name, x in wanted.items():
            torch.testing.assert_close(found[name], x, rtol=near, atol=near / 10, msg=name)


def test_forms_that_take_all_steps_are_refused_where_some_are_left_out() -> None:
    plan, graph = planned("gpt2", 2, "fp16", DEAR, dp_shard=2, zero=1)
    with pytest.raises(PlanError, match="fp16 leaves steps out that overflow, and dear takes all"):
        check(plan)
    assert make_problem(graph, Cluster.local(2), optimizer="adam").forms == ()
    check(replace(plan, precision="bf16"))


def test_what_is_not_trained_is_said_to_be_narrow() -> None:
    case = CASES["gpt2"]
    model = case.model(torch.float32)
    for p in model.transformer.h[0].parameters():
        p.requires_grad_(False)
    graph = trace(model, case.example(BATCH, 0, torch.float32), precision="bf16")
    problem = make_problem(graph, Cluster.local(1))
    notes = notes_of(problem, build_plan(problem, uniform_choice(problem)))
    told = [note for note in notes if "not trained" in note]
    assert len(told) == 1 and told[0].startswith("12 parameters") and "bfloat16 alone" in told[0]


def gone_on(jobs: list[tuple[Plan, Graph]], folder: str) -> list[dict[str, torch.Tensor]]:
    """Parameters that the first job saves, and that each of the others has loaded."""
    found = []
    for number, (plan, graph) in enumerate(jobs):
        case = CASES["gpt2"]
        job = compile_job(
            case.model(torch.float32), plan, optimizer="adam", lr=1e-3, device="cpu", graph=graph
        )
        if number:
            job.load(folder)
            assert job.state.step == 1
        else:
            job.step(case.example(BATCH, 0, torch.float32))
            job.save(folder)
        found.append(full_state(job))
        assert job.step(case.example(BATCH, 1, torch.float32)).isfinite()
        job.close()
    return found


def test_checkpoints_know_nothing_of_copies(tmp_path: Path) -> None:
    case, jobs = CASES["gpt2"], []
    plain = trace(case.model(torch.float32), case.example(BATCH, 0, torch.float32))
    for graph, precision, choice in (
        (traced32("gpt2", "bf16"), "bf16", {"dp_shard": 2, "zero": 3}),
        (plain, "fp32", {"dp_shard": 2, "zero": 1}),
        (plain, "bf16-autocast", {"tp": 2}),
        (traced32("gpt2", "fp16"), "fp16", {"pp": 2, "num_microbatches": 2}),
    ):
        problem = make_problem(graph, Cluster.local(2), optimizer="adam", precision=precision)
        chosen = uniform_choice(problem, **choice)  # type: ignore[arg-type]
        jobs.append((build_plan(problem, chosen, predict=False), graph))
    first, *others = run_ranks(2, gone_on, jobs, str(tmp_path))[0]
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], x) for name, x in other.items())


def test_the_scale_moves_as_torchs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_INTERVAL", 3)
    ours, device = LossScale(torch.device("cpu")), torch.device("cpu")
    scale, good = torch.full((), ours.value), torch.zeros((), dtype=torch.int32)
    left_out = [0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    for wrong in map(float, left_out):
        ours.took(torch.tensor(wrong))
        torch._amp_update_scale_(scale, good, torch.tensor([wrong]), 2.0, 0.5, 3)
        assert (ours.value, ours.state()["good"]) == (float(scale), int(good))
    assert ours.skipped == sum(left_out)
    again = LossScale(device, **ours.state())
    assert again.state() == ours.state()


def test_who_must_be_told_by_the_host() -> None:
    given = [torch.zeros(2, requires_grad=True)]
    assert leaves_out(torch.optim.AdamW(given, fused=True))
    assert not leaves_out(torch.optim.AdamW(given))
    assert not leaves_out(stepped_by_kernel(torch.optim.AdamW(given, fused=True)))
    given[0].grad = torch.ones(2)
    plain, heavy = (torch.optim.SGD(given, fused=True, momentum=m) for m in (0.0, 0.9))
    assert leaves_out(plain)
    assert not leaves_out(heavy), "torch makes momentum without values in a step that is left out"
    heavy.step()
    assert leaves_out(heavy)


def test_an_optimizer_is_told_for_one_step() -> None:
    given = [torch.zeros(2, requires_grad=True)]
    optimizer = torch.optim.AdamW(given, lr=1.0, fused=True)
    for overflow, moved in ((1.0, 0), (0.0, 1), (None, 2)):
        given[0].grad = torch.ones(2)
        with unless(optimizer, None if overflow is None else torch.tensor(overflow)):
            optimizer.step()
        assert not hasattr(optimizer, "found_inf")
        assert float(optimizer.state[given[0]]["step"]) == moved
