"""Calls that are recorded and replayed (`Stage.capture`) equal one process; what forbids it is
said; what it saves is priced. On CPUs a tape of operators keeps the rules of CUDA graphs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.forms.captured import capture_findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.torch_private import storage_key
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.search import search_problem
from meshwright.runtime.capture import recorder
from meshwright.runtime.capture.operators import OperatorTape
from meshwright.runtime.capture.recorder import OperatorRecorder
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.equality import LEARNING_RATE, reference
from meshwright.testing.models import CASES
from meshwright.testing.spawn import alone, run_ranks
from tests import activated_jobs, dropout_jobs
from tests.traces import zoo_graph

STEPS = 3


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on CPUs record, too."""
    monkeypatch.setattr(recorder, "TAPES", True)


ON_FOUR: dict[str, tuple[dict[str, Any], int]] = {
    "1F1B, tensors": ({"pp": 2, "tp": 2, "num_microbatches": 4}, 2),
    "1F1B, ZeRO 2, made again": (
        {"pp": 2, "dp_shard": 2, "zero": 2, "num_microbatches": 4, "recompute": "full"}, 2
    ),
}  # fmt: skip
"""With how many micro-batches each stage has in flight, at most."""


def _problem(model: str, world: int, precision: str = "fp64", batch: int = 8) -> Problem:
    case = CASES[model]
    dtype = torch.float64 if precision == "fp64" else torch.float32
    graph = zoo_graph(case, batch, dtype)
    cluster = Cluster.preset("h100-sxm", num_nodes=1, devices_per_node=world)
    return make_problem(graph, cluster, precision=precision, optimizer="adam")


def _captured(problem: Problem, **choice: Any) -> Plan:
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    plan = replace(plan, stages=tuple(replace(stage, capture=True) for stage in plan.stages))
    assert not list(capture_findings(plan, problem.graph))
    return plan


Trained = tuple[list[float], dict[str, Tensor], list[int]]


def _train(jobs: list[tuple[Plan, Graph]], model: str, halves: bool) -> list[Trained]:
    return [_train_one(*job, model, halves) for job in jobs]


def _train_one(plan: Plan, graph: Graph, model: str, halves: bool) -> Trained:
    """Losses, parameters, and recordings of each stage. With `halves` a step has two batches."""
    case = CASES[model]
    job = compile_job(
        case.model(), plan, optimizer="adam", lr=LEARNING_RATE, loss_fn=case.loss_fn,
        device="cpu", graph=graph, check=False,
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        batch = case.example(plan.global_batch_size, 100 + step)
        if halves:
            job.accumulate(batch)
            losses.append(float(job.accumulate(batch)))
            job.apply(0.5)
        else:
            losses.append(float(job.step(batch)))
    slots = [stage.slots for stage in job.parts.stages.values()]
    state = full_state(job)
    job.close()
    return losses, state, slots


def _wanted(model: str) -> tuple[list[float], dict[str, Tensor]]:
    case = CASES[model]
    batches = [case.example(8, 100 + step) for step in range(STEPS)]
    return alone(reference, case.model(), batches, case.loss_fn, 1)  # type: ignore[no-any-return]


def _check(found: Trained, wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    for name, value in wanted[1].items():
        apart = float((found[1][name] - value).abs().max())
        assert apart <= 1e-10 * max(LEARNING_RATE, float(value.abs().max())), name


def test_replays_equal_one_process() -> None:
    problem, wanted = _problem("llama", 4), _wanted("llama")
    jobs = [(_captured(problem, **choice), problem.graph) for choice, _ in ON_FOUR.values()]
    ranks = run_ranks(4, _train, jobs, "llama", False)
    for number, (_, in_flight) in enumerate(ON_FOUR.values()):
        _check(ranks[0][number], wanted)
        recorded = {slot for rank in ranks for slot in rank[number][2]}
        assert max(recorded) == in_flight and min(recorded) > 0


DROPPING: dict[str, dict[str, Any]] = {
    "four micro-batches": {"num_microbatches": 4},
    "samples split, made again": {"dp_shard": 2, "zero": 2, "num_microbatches": 2,
                                  "recompute": "full"},
    "stages, tensors": {"pp": 2, "tp": 2, "num_microbatches": 4},
}  # fmt: skip


def test_replays_drop_what_calls_drop_as_they_are() -> None:
    """Embeddings, chances of attention, residuals, and after GELU in one pass with it: others in
    each step and micro-batch, under every layout those of one process."""
    gpt2, fused = dropout_jobs.graph(), activated_jobs.activated_graph(("bias_gelu",))
    given = [(gpt2, choice) for choice in DROPPING.values()]
    wanted = [dropout_jobs.alone(), activated_jobs.activated_losses((), 1, {})[:STEPS]]
    for graph, choice in (*given, (fused, {"num_microbatches": 4})):
        world = choice.get("pp", 1) * choice.get("tp", 1) * choice.get("dp_shard", 1)
        cluster = Cluster.preset("h100-sxm", num_nodes=1, devices_per_node=world)
        problem = make_problem(graph, cluster, precision="fp64", optimizer="sgd")
        plan = _captured(problem, **choice)
        for found, recorded in run_ranks(world, _dropped, plan, graph, graph is fused):
            assert recorded
            assert found == pytest.approx(wanted[graph is fused], rel=1e-10)


def _dropped(plan: Plan, graph: Graph, activated: bool) -> tuple[list[float], bool]:
    """Losses, and whether blocks were recorded."""
    model, batch, loss_fn = dropout_jobs.build, dropout_jobs.batch, None
    if activated:
        model, batch = activated_jobs.activated, activated_jobs.pairs
        loss_fn = activated_jobs.squared
    job = compile_job(
        model(), plan, optimizer="sgd", lr=0.1, loss_fn=loss_fn, graph=graph, device="cpu",
        check=False,
    )  # fmt: skip
    found = [float(job.step(batch(step))) for step in range(STEPS)]
    recorded = all(stage.slots for stage in job.parts.stages.values())
    job.close()
    return found, recorded


def test_one_device_adds_batches_up_and_runs_some_calls_as_they_are() -> None:
    """Tables of DLRM read which samples of the batch they have."""
    for model, halves in (("gpt2", True), ("dlrm", False)):
        problem = _problem(model, 1)
        jobs = [(_captured(problem, num_microbatches=2), problem.graph)]
        ((found,),) = run_ranks(1, _train, jobs, model, halves)
        _check(found, _wanted(model))
        assert found[2] == [1]


def test_a_tape_keeps_the_rules_of_a_graph() -> None:
    x, held = torch.ones(4), []
    tape = OperatorTape()
    scale = 3.0
    with tape.recording():
        inside = x * scale
        made = inside + 1
        held.append(made)
        freed = inside.detach()
        del inside
    tape.close()
    assert freed.tolist() == [3.0] * 4, "somebody holds it"
    scale = 5.0  # is of Python, and no part of a replay
    x.fill_(2.0)
    tape.replay()
    assert made.tolist() == [7.0] * 4
    lone = OperatorTape()
    with lone.recording():
        gone = x * 2
        made = gone + 1
        kept = gone.untyped_storage().data_ptr()
        del gone
    lone.close()
    assert made.tolist() == [5.0] * 4 and kept
    lost = [bool(x.isnan().all()) for x in lone._made.values()]
    assert lost == [True, False], "what nobody holds is the pool's"
    for read in (lambda: x.sum().item(), lambda: torch.rand(2), lambda: x[x > 0]):
        with pytest.raises(PlanError, match="a replay"), OperatorTape().recording():
            read()


def test_what_a_tape_counted_goes_with_it() -> None:
    """Its memory is somebody else's then, at the same address."""
    recorder, x, seen = OperatorRecorder(), torch.ones(4), set()
    for _ in range(100):
        _, made = recorder.record(lambda: (x * 2).exp())
        assert made.isfinite().all()
        key = storage_key(made)
        if key in seen:
            break
        seen.add(key)
        del _, made
    else:
        pytest.fail("no address came back, so nothing was tried")


def test_what_forbids_it_is_said() -> None:
    plan = _captured(problem := _problem("llama", 2), dp_shard=2, zero=1, num_microbatches=2)

    def said(stage: dict[str, Any], **more: Any) -> str:
        stages = tuple(replace(one, **stage) for one in plan.stages)
        (found,) = capture_findings(replace(plan, stages=stages, **more), problem.graph)
        return str(found)

    pattern = plan.stages[0].layouts.__iter__().__next__()
    assert "other addresses" in said({"zero": 3}) and "nearest: zero 2" in said({"zero": 3})
    assert "the host holds" in said({"store": FormChoice(form="update_on_host")})
    assert "beyond their backward" in said({"sync": FormChoice(form="dear")})
    assert "single ops" in said({"saved": {pattern: {"*": "offload"}}})
    assert "turns" in said({"overlap": "block"})
    assert "for CPUs" in said({}, cluster=replace(plan.cluster, device_kind="cpu"))
    assert "keeps gradients" in said({}, precision="bf16-sums")
    rows = build_plan(
        problem, uniform_choice(problem, pp=2, num_microbatches=2, schedule="zero_bubble"),
        predict=False,
    )  # fmt: skip
    stages = tuple(replace(stage, capture=True) for stage in rows.stages)
    first, *_ = capture_findings(replace(rows, stages=stages), problem.graph)
    assert "halves of backwards" in str(first) and "one_f_one_b" in str(first)
    experts = _problem("mixtral", 1)
    built = build_plan(experts, uniform_choice(experts), predict=False)
    stages = (replace(built.stages[0], capture=True),)
    (found,) = capture_findings(replace(built, stages=stages), experts.graph)
    assert "mlp.experts/experts" in str(found)
    with pytest.raises(PlanError, match="capture=false"):
        make_problem(problem.graph, Cluster.local(1), constraints=("capture=true",))


def test_launches_are_priced_and_chosen() -> None:
    """Where kernels are short the host decides, and graphs take its part away."""
    problem = _problem("llama", 1, "fp32")
    given = problem.graph, problem.cluster
    chosen, without = (
        search_problem(make_problem(*given, precision="fp32", constraints=pins))
        for pins in ((), ("capture=false",))
    )
    assert all(stage.capture for stage in chosen.stages)
    assert chosen.predicted and without.predicted
    assert chosen.predicted.step_s < 0.7 * without.predicted.step_s
    memory, before = (p.predicted.stages[0].memory for p in (chosen, without) if p.predicted)
    assert memory.activations_bytes > before.activations_bytes
    assert any("no GPU has run ours" in note for note in chosen.notes)
