"""Ops by themselves: those of every model can be measured; the grid; the optimizer; processes."""

import pytest
import torch

from meshwright.costmodel.block.price_ops import PricedMove, PricedOp
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.ops.keys import op_key
from meshwright.costmodel.ops.profile_timer import profile_timer
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.profile.profile import Machine, MemoryRecord, OpRecord, Profile
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.profiling.memory import heap_plans, rounds
from meshwright.profiling.ops import grid, op_tasks
from meshwright.profiling.work import locals_of
from meshwright.runtime.profiling.heap import Grown, grown, memory_records
from meshwright.runtime.profiling.ops import measure_op
from meshwright.runtime.profiling.optimizers import measure_optimizer, optimizer_tasks
from meshwright.runtime.profiling.process import process_records
from meshwright.runtime.profiling.tasks import OpTask
from meshwright.testing.models import CASES
from meshwright.testing.spawn import alone
from tests.traces import zoo_graph

CPU = torch.device("cpu")
HERE = Machine(device="this", kind="cpu", driver="1", torch="2", backend="gloo", cores=2)


def problem_of(name: str, precision: str = "fp32") -> Problem:
    case, dtype = CASES[name], torch.float32
    graph = zoo_graph(case, dtype=dtype)
    return make_problem(graph, Cluster.local(2), precision=precision)


def _measured(tasks: list[OpTask]) -> list[OpRecord]:
    return [measure_op(task, CPU, budget_s=0.0) for task in tasks]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_ops_of_every_model(name: str) -> None:
    # One of each op, operand count and dtype: others differ in sizes only.
    kinds = {(t.target, t.call, len(t.operands), t.dtype): t for t in op_tasks(problem_of(name))}
    records = alone(_measured, list(kinds.values()))
    assert len(records) == len(kinds) >= 3
    assert all(record.forward.median_s > 0 for record in records)
    assert any(record.backward for record in records)


def test_what_is_measured_is_what_the_cost_model_asks_for() -> None:
    problem = problem_of("gpt2")
    keys = {task.key for task in op_tasks(problem)}
    blocks, device = problem.tables.blocks, problem.tables.device_names[0]
    asked = set()
    for local in locals_of(problem):
        for layout in problem.layouts(local.model):
            for block in problem.graph.blocks:
                if block.pattern == layout.pattern:
                    spot = local.spot(device)
                    trail = blocks.walk(block, layout, spot).trail
                    asked |= {op_key(step.local) for step in _steps(trail)}
    assert keys == asked


def _steps(trail: list[PricedOp | PricedMove]) -> list[PricedOp]:
    """All but views."""
    steps = [x for x in trail if isinstance(x, PricedOp)]
    return [step for step in steps if step.local.op_class is not OpClass.VIEW]


def test_measured_ops_are_looked_up() -> None:
    problem = problem_of("sequential")
    records = alone(_measured, op_tasks(problem))
    profile = Profile(machine=HERE, ops={r.key: r for r in records})
    timed = make_problem(problem.graph, problem.cluster, precision="fp32", profile=profile)
    assert profile_timer(timed.cluster, profile)
    block = problem.graph.blocks[1]
    layout = next(x for x in timed.layouts(()) if x.pattern == block.pattern)
    spot = BlockSpot(4, 1, (), timed.tables.device_names[0], (), ())
    trail = timed.tables.blocks.walk(block, layout, spot).trail
    known = [profile.ops[op_key(step.local)] for step in _steps(trail)]
    assert len(known) >= 2
    cost = timed.tables.block(block, layout, spot)
    assert cost.forward_s >= sum(record.forward.median_s for record in known)


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_the_grid_has_every_class(precision: str) -> None:
    tasks = [t for t in grid(precision, "cpu", 2**33) if t.moved_bytes < 2**22 and t.flops < 1e8]
    records = alone(_measured, tasks)
    assert {record.op_class for record in records} == {
        OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONVOLUTION, OpClass.NORMALIZATION,
        OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.COPY, OpClass.REDUCTION,
        OpClass.GATHER,
    }  # fmt: skip
    assert all(record.backward for record in records)
    assert len({task.key for task in grid(precision, "cuda", 2**40)}) == len(
        grid(precision, "cuda", 2**40)
    )


def test_saved_bytes_of_an_op() -> None:
    task = next(t for t in grid("fp32", "cpu", 2**33) if t.target == "aten.gelu.default")
    assert alone(_measured, [task])[0].saved_bytes == 4 * 4**6


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum", "rmsprop"])
def test_optimizer_steps(optimizer: str) -> None:
    tasks = optimizer_tasks(optimizer, 2**24)
    assert len(tasks) >= 3
    small, *_, large = alone(_optimizers, optimizer)
    assert large.nbytes > small.nbytes
    assert large.time.median_s > small.time.median_s > 0


def _optimizers(optimizer: str) -> list[object]:
    return [measure_optimizer(t, CPU, budget_s=0.0) for t in optimizer_tasks(optimizer, 2**24)]


def test_memory_of_processes() -> None:
    found = {record.name: record for record in process_records(CPU)}
    assert set(found) == {"process", "process_group", "group"}
    assert 50e6 < found["process"].value < 2e9
    assert found["process_group"].value < 100e6
    assert all(record.unit == "bytes" for record in found.values())


def test_memory_of_a_heap_in_training() -> None:
    problem = problem_of("gpt2")
    plans = heap_plans(problem, 2**30)
    assert [p.num_microbatches for p in plans] == [1, 4]
    assert not any(p.stages[0].recompute for p in plans)
    assert heap_plans(problem, 2**10) == []
    assert rounds(plans, 2**30) == [plans]
    assert rounds(plans, 2**10) == [plans[:1], plans[1:]]
    found = alone(_grown, problem)
    # Adam keeps two values per parameter; on a model this small pages blur the rest.
    trained = sum(t.nbytes for t in problem.graph.parameters)
    assert found.state_bytes >= 3 * trained
    assert found.moving_bytes > 0 and found.held_bytes > 0


def _grown(problem: Problem) -> Grown:
    plan = build_plan(problem, uniform_choice(problem, num_microbatches=2), predict=False)
    return grown(problem.graph, plan, CPU)


def test_holes_are_fitted() -> None:
    found = [
        Grown(
            held_bytes=m + 400 + round(0.2 * m + 0.5 * g),
            moving_bytes=m,
            state_bytes=400,
            gradients_bytes=g,
        )
        for m, g in ((1000, 100), (400, 100), (100, 120))
    ]
    ratios = [record.value for record in memory_records("f", found)]
    assert ratios == pytest.approx([0.2, 0.5], abs=0.02)
    # Never negative, whatever was measured.
    shrunk = [
        Grown(held_bytes=0, moving_bytes=m, state_bytes=100, gradients_bytes=9) for m in (10, 1000)
    ]
    assert [r.value for r in memory_records("f", shrunk)] == [0.0, 0.0]
    names = [r.name for r in memory_records("f", found)]
    assert names == ["fragmentation f", "fragmentation_gradients f"]


def test_holes_are_in_the_prediction() -> None:
    problem = problem_of("gpt2")
    model = problem.graph.fingerprint

    def predicted(moving: float, gradients: float) -> int:
        memory = {
            f"fragmentation {model}": MemoryRecord(name="", value=moving, unit="ratio"),
            f"fragmentation_gradients {model}": MemoryRecord(
                name="", value=gradients, unit="ratio"
            ),
        }
        profile = Profile(machine=HERE, memory=memory)
        made = make_problem(problem.graph, problem.cluster, precision="fp32", profile=profile)
        plan = build_plan(made, uniform_choice(made))
        assert plan.predicted
        return plan.predicted.stages[0].memory.fragmentation_bytes

    none, moving, both = predicted(0.0, 0.0), predicted(0.5, 0.0), predicted(0.5, 0.5)
    assert none < moving < both
