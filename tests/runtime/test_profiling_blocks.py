"""Blocks as they are measured: the real code, legal values, what autograd keeps; every model."""

from collections import Counter

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.profile.profile import BlockRecord
from meshwright.ir.torch_modes import watching
from meshwright.ir.torch_private import storage_key
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.profiling.work import block_tasks
from meshwright.runtime.profiling.bench import bench
from meshwright.runtime.profiling.blocks import measure_block, memory_of
from meshwright.runtime.profiling.free_lines import FreeLine
from meshwright.runtime.profiling.tasks import BlockTask
from meshwright.runtime.profiling.values import rows_below
from meshwright.testing.models import CASES, LENGTH, VOCAB
from meshwright.testing.spawn import alone
from tests.traces import zoo_graph

CPU = torch.device("cpu")


def problem_of(name: str, precision: str = "fp32", *pins: str) -> Problem:
    case, dtype = CASES[name], torch.float32
    graph = zoo_graph(case, dtype=dtype)
    return make_problem(graph, Cluster.local(2), precision=precision, constraints=pins)


def measured(problem: Problem, tasks: list[BlockTask]) -> list[BlockRecord]:
    """In a forked child: autograd's threads must not start in this process."""
    return alone(_measured, problem.graph, tasks)


def _measured(graph: Graph, tasks: list[BlockTask]) -> list[BlockRecord]:
    return [measure_block(graph, task, CPU, budget_s=0.005) for task in tasks]


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_every_block_of_every_model(name: str) -> None:
    problem = problem_of(name)
    smallest: dict[tuple[str, int], BlockTask] = {}
    for task in sorted(block_tasks(problem), key=lambda task: -task.samples):
        smallest[task.pattern, task.tp] = task
    tasks = list(smallest.values())
    assert {task.tp for task in tasks} == {1, 2}
    # Layers that tensor parallelism leaves alone are the same work at tp 1 and tp 2.
    patterns = {block.pattern for block in problem.graph.blocks}
    assert {task.pattern for task in tasks if task.tp == 1} == patterns
    for task, record in zip(tasks, measured(problem, tasks), strict=True):
        assert record.key == task.key
        assert (record.samples, record.tp) == (task.samples, task.tp)
        assert record.forward.median_s > 0 and record.backward.median_s > 0
        assert record.no_grad_forward and record.backward_input and record.backward_weight


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "resnet50"])
def test_bfloat16(name: str) -> None:
    """Other tensors are kept: halves of activations, and casts of weights."""
    saved = []
    for precision in ("bf16-autocast", "fp32"):
        problem = problem_of(name, precision)
        tasks = [t for t in block_tasks(problem) if t.samples == 4 and t.tp == 1][:3]
        saved.append([record.saved_bytes for record in measured(problem, tasks)])
    half, full = saved
    assert len(half) == len(full) == 3
    assert half != full


def test_a_block_runs_all_its_ops() -> None:
    problem = problem_of("gpt2")
    task = next(t for t in block_tasks(problem) if t.pattern == "transformer.h.*" and t.tp == 1)
    block = next(b for b in problem.graph.blocks if b.pattern == task.pattern)
    products = sum("addmm" in op.target or "linear" in op.target
                   for op in problem.graph.block_ops(block))  # fmt: skip
    assert products == 4
    assert alone(_products, problem.graph, task) == (products, 2 * products)


def _products(graph: Graph, task: BlockTask) -> tuple[int, int]:
    """Matrix products of a forward and of its backward."""
    layer = bench(graph, task, CPU).layer()
    counts = []
    for run in (layer.forward, layer.backward):
        events: Counter[str] = Counter()
        with torch.profiler.profile() as profiled:
            run()
        events.update(event.name for event in profiled.events())
        counts.append(events["aten::addmm"] + events["aten::mm"])
    return counts[0], counts[1]


def test_saved_bytes_are_those_of_the_users_module() -> None:
    problem = problem_of("gpt2")
    found = [t for t in block_tasks(problem) if t.pattern == "transformer.h.*" and t.tp == 1]
    records = measured(problem, found)
    for task, record in zip(found, records, strict=True):
        assert record.saved_bytes == alone(_saved_by_user, task.samples), task.samples


def _saved_by_user(samples: int) -> int:
    """What autograd keeps of a block of the user's model beside parameters and its input."""
    block = CASES["gpt2"].model(torch.float32).transformer.h[1]
    x = torch.randn(samples, LENGTH, 32, requires_grad=True)
    there = {storage_key(t) for t in (x, *block.parameters(), *block.buffers())}
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        block(x)
    storages = {storage_key(t): t.untyped_storage().nbytes() for t in kept}
    return sum(nbytes for key, nbytes in storages.items() if key not in there)


def test_the_cost_model_agrees_on_what_is_saved() -> None:
    problem = problem_of("gpt2")
    task = next(t for t in block_tasks(problem) if t.pattern == "transformer.h.*" and t.tp == 2)
    block = next(b for b in problem.graph.blocks[2:] if b.pattern == task.pattern)
    layout = next(x for x in problem.layouts((("tp", 2),)) if x.pattern == block.pattern)
    device = problem.tables.device_names[0]
    cost = problem.tables.block(
        block, layout, BlockSpot(task.samples, 1, (("tp", 2),), device, (), ((),))
    )
    (record,) = measured(problem, [task])
    assert record.saved_bytes == cost.saved_bytes + sum(cost.saved_outputs)


def test_memory_does_not_grow_from_run_to_run() -> None:
    problem = problem_of("gpt2")
    task = block_tasks(problem)[0]
    first, later = alone(_memory_twice, problem.graph, task)
    assert first == later
    assert first[1] > 0


def _memory_twice(graph: Graph, task: BlockTask) -> list[tuple[int, int]]:
    layer = bench(graph, task, CPU).layer()
    return [memory_of(layer), memory_of(layer)]


def test_whole_numbers_are_legal() -> None:
    gpt2 = problem_of("gpt2").graph
    names = dict(zip(gpt2.input_names, gpt2.inputs, strict=True))
    assert rows_below(gpt2, names["input_ids"]) == VOCAB
    assert 1 < rows_below(gpt2, names["labels"]) <= VOCAB
    bert = problem_of("bert_mlm").graph
    names = dict(zip(bert.input_names, bert.inputs, strict=True))
    assert rows_below(bert, names["attention_mask"]) == 0
    images = problem_of("resnet50").graph
    labels = next(n for n in images.inputs if images.tensors[n].dtype == "int64")
    assert rows_below(images, labels) == 8


def test_free_lines_give_the_shapes_of_real_ones() -> None:
    line, x = FreeLine(4, 1), torch.randn(4, 6)
    assert line.all_reduce(x) is x
    assert line.all_gather(x).shape == (4, 4, 6)
    assert line.reduce_scatter(x).shape == (6,)
    parts = [torch.randn(2, 6) for _ in range(4)]
    shapes = [(2, 6), (2, 6), (2, 5), (0, 6)]
    assert [tuple(t.shape) for t in line.all_to_all(parts, shapes)] == shapes


def test_nothing_is_allocated_by_free_collectives() -> None:
    made: list[torch.Tensor] = []
    line, x = FreeLine(4, 1), torch.randn(4, 6)
    with watching(made.extend):
        line.all_reduce(x), line.all_gather(x), line.reduce_scatter(x)
    assert {storage_key(t) for t in made} <= {storage_key(x)}
