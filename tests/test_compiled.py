"""Compiled blocks equal one process, compile once, and are chosen where a profile says they pay."""

import ast
import os
from contextlib import nullcontext
from dataclasses import replace
from shutil import which
from typing import Any

import pytest
import torch
from torch import fx

from meshwright.codegen.lower.lower import lower
from meshwright.codegen.passes import compiled
from meshwright.codegen.passes.compiled import Region
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MeshwrightError, PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.ir.profile.profile import BlockRecord
from meshwright.ir.torch_modes import watching
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.notes import notes_of
from meshwright.planner.search.search import search_problem
from meshwright.profiling.work import block_tasks
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.compiling import check_compiler
from meshwright.runtime.profiling.blocks import measure_block
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES
from meshwright.testing.spawn import alone
from tests.compiled_blocks import profiled
from tests.overlap_plans import planned
from tests.planner.problems import traced


def of_plan(model: str, batch: int, overlap: str = "none", **choice: Any) -> tuple[Graph, Plan]:
    graph, plan = planned(model, batch, overlap, **choice)
    stages = tuple(replace(stage, compile=True) for stage in plan.stages)
    return graph, replace(plan, stages=stages)


def regions(module: fx.GraphModule) -> list[Region]:
    return [part for part in module.children() if isinstance(part, Region)]


@pytest.mark.parametrize(
    ("level", "choice"),
    [
        ("blocks", {"tp": 2, "num_microbatches": 2, "recompute": "full"}),
        ("none", {"tp": 1, "dp_shard": 2, "zero": 3, "num_microbatches": 2}),
    ],
    ids=["halves", "zero3"],
)
def test_regions_equal_one_process(
    level: str, choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of torch.compile but its last step, which takes long."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    graph, plan = of_plan("gpt2", 12, level, **choice)
    difference = check_equal(CASES["gpt2"], plan, graph, steps=2)
    assert difference.worst_of_both <= 1e-9, str(difference)


@pytest.mark.skipif(which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_kernels_of_torch_compile_equal_one_process() -> None:
    graph, plan = of_plan("gpt2", 4, tp=1, pp=2, num_microbatches=2)
    difference = check_equal(CASES["gpt2"], plan, graph, steps=2)
    assert difference.worst_of_both <= 1e-9, str(difference)


def test_equal_blocks_share_what_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    graph, plan = of_plan("gpt2", 4, tp=1, num_microbatches=2)
    (program,) = lower(graph, plan, 0)
    modules = {id(call.code): call.code.module for call in program.calls}
    count = sum(len(regions(module)) for module in modules.values())
    layers = [c.code for c in program.calls if c.block.startswith("transformer.h.")]
    assert len(layers) > 2 and len({id(code) for code in layers[1:]}) == 1
    assert alone(_compilations, graph, plan) == [count, count, count]


def _compilations(graph: Graph, plan: Plan) -> list[int]:
    """After each of three steps; the last is watched, where nothing is compiled."""
    from torch._dynamo.utils import counters

    case = CASES["gpt2"]
    # What tests before this one compiled in the process of which this is a copy.
    before = int(counters["stats"]["unique_graphs"])
    job = compile_job(case.model(), plan, optimizer="sgd", lr=1e-3, loss_fn=case.loss_fn,
                      device="cpu", graph=graph)  # fmt: skip
    found = []
    for number in range(3):
        with watching(lambda made: None) if number == 2 else nullcontext():
            job.step(case.example(4))
        found.append(int(counters["stats"]["unique_graphs"]) - before)
    return found


def test_collectives_stand_between_regions() -> None:
    graph, plan = of_plan("gpt2", 6, tp=2, num_microbatches=2)
    (program,) = lower(graph, plan, 0)
    layer = program.calls[1].code.module
    assert len(regions(layer)) == 3  # attention, sum and norm, perceptron
    outside = [n for n in layer.graph.nodes if n.op not in ("placeholder", "output")]
    targets = [n.target for n in outside if n.op == "call_method"]
    assert [t for t in targets if t != "pad"] == ["identity", "all_reduce"] * 2
    for part in regions(layer):
        assert all("comm" not in n.name for n in part.code.graph.nodes)
    assert program.source.count("@torch.compile(") >= 3
    nodes = ast.walk(ast.parse(program.source))
    defined = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    assert len(set(defined)) == len(defined) == program.source.count("\ndef ")


def test_files_and_rules() -> None:
    graph, plan = of_plan("gpt2", 4, tp=2, num_microbatches=2)
    assert loads(dumps(plan)).stages == plan.stages
    plain = replace(plan, stages=(replace(plan.stages[0], compile=False),))
    assert "compile" not in dumps(plain)
    split = replace(plan.schedule, rows=("0F0 0I0 0W0 0F1 0I1 0W1",))
    found = replace(plan, schedule=split).verify(graph)
    assert [(f.rule, f.severity) for f in found] == [("compile", "error")]
    saved = replace(plan.stages[0], saved={"transformer.h.*": {"mlp.act": "recompute"}})
    found = replace(plan, stages=(saved,)).verify()
    assert [f.rule for f in found] == ["compile"]


def test_what_is_missing_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = of_plan("gpt2", 4, tp=2, num_microbatches=2)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MeshwrightError, match="no-such-compiler"):
        check_compiler(plan, "cpu")
    check_compiler(replace(plan, stages=(replace(plan.stages[0], compile=False),)), "cpu")


@pytest.mark.parametrize("ratio", [0.5, 1.5, 0.0])
def test_search_compiles_where_that_was_measured_to_pay(ratio: float) -> None:
    best = search_problem(profiled(ratio, "pp=1", "tp=1"), "ilp")
    assert all(stage.compile == (ratio == 0.5) for stage in best.stages)
    assert any("not tried" in note for note in best.notes) == (ratio == 0.0)
    assert best.predicted and best.evidence and best.evidence.bound_s <= best.predicted.step_s


def test_pins() -> None:
    found = {}
    for asked in ("true", "false"):
        problem = profiled(0.5, "pp=1", "tp=1", f"compile={asked}")
        best = search_problem(problem, "ilp")
        assert all(stage.compile == (asked == "true") for stage in best.stages)
        assert best.predicted
        found[asked] = best.predicted.step_s
    assert found["true"] < found["false"]
    unknown = make_problem(traced("gpt2"), Cluster.local(1), constraints=("compile=true",))
    plan = build_plan(unknown, uniform_choice(unknown))
    first, *_ = notes_of(unknown, plan)
    assert plan.stages[0].compile and "nobody has measured them" in first
    with pytest.raises(PlanError, match="recompute=full"):
        make_problem(traced("gpt2"), Cluster.local(1),
                     constraints=("compile=true", "saved=selective"))  # fmt: skip


def test_compiled_blocks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    problem = make_problem(traced("gpt2"), Cluster.local(2), precision="fp64")
    tasks = [t for t in block_tasks(problem, compiled=True) if t.compiled]
    assert len(tasks) == len(block_tasks(problem))
    record = alone(_record, problem.graph, next(t for t in tasks if t.tp == 2))
    assert record.key.endswith("+compiled") and record.backward_input is None
    assert record.forward.median_s > 0 and record.saved_bytes > 0 and record.no_grad_forward


def _record(graph: Graph, task: Any) -> BlockRecord:
    return measure_block(graph, task, torch.device("cpu"), budget_s=0.005)
