"""What single ops make is made again or moved away, and training stays the same in float64."""

import gc
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import filter as filter_names
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx, nn

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import BlockCode, Call
from meshwright.forms.retention.offload import HostMemory
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.keeping import Keeping, makers
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.ir.plan.verify import check
from meshwright.ir.torch_modes import watching
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.record.tensors import TensorTracker
from meshwright.runtime.stage.keeping import FormRuns, Keeper, Script
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES
from meshwright.testing.spawn import run_ranks
from meshwright.testing.split_all import split_all
from tests import dropout_jobs, model_axes
from tests.codegen.quick import QUICK
from tests.traces import zoo_graph

pytestmark = pytest.mark.filterwarnings("ignore:offload on cpu")
Policy = dict[str, Keeping]
MIXED: Policy = {"attn/*": "recompute", "mlp.*": "offload", "mlp.act/tanh": "keep"}


def with_saved(plan: Plan, graph: Graph, policy: Policy) -> Plan:
    """The plan with a policy for the patterns that have such ops."""
    stages = []
    for index, stage in enumerate(plan.stages):
        saved = {}
        for block in plan.stage_blocks(graph, index):
            keys = makers(graph, block)
            saved[block.pattern] = {
                pattern: how for pattern, how in policy.items() if filter_names(keys, pattern)
            }
        stages.append(replace(stage, saved={name: said for name, said in saved.items() if said}))
    assert any(stage.saved for stage in stages)
    found = replace(plan, stages=tuple(stages))
    check(found, graph)
    return found


@dataclass(frozen=True)
class Case:
    model: str
    policy: Policy
    world: int = 1
    choice: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "all_again": Case("gpt2", {"*": "recompute"}, 4, {"pp": 2, "tp": 2, "num_microbatches": 2}),
    "all_away": Case("gpt2", {"*": "offload"}, 2,
                     {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
    "halves": Case("gpt2", MIXED, 2,
                   {"pp": 2, "num_microbatches": 4, "schedule": "zero_bubble"}),
    "uneven": Case("gpt2", MIXED, 3, {"tp": 3}),
    "rings_and_experts": Case("mixtral", {"*": "recompute"}, 4, {"model": (("cp", 2), ("ep", 2))}),
}  # fmt: skip


@cache
def traced(name: str) -> Graph:
    case = CASES[name]
    return zoo_graph(case, 8)


@pytest.mark.sampled
@pytest.mark.parametrize("name", RUNS)
def test_training_stays_the_same(name: str) -> None:
    run = RUNS[name]
    graph = traced(run.model)
    problem = make_problem(graph, Cluster.local(run.world), precision="fp64", optimizer="adam")
    if tp := run.choice.get("tp"):
        problem.solved[model_mesh({"tp": tp}), ""] = split_all(graph, tp)
    if axes := run.choice.get("model"):
        problem.solved[axes, ""] = solve_layouts(graph, axes, usual(axes, QUICK))
    plan = build_plan(problem, uniform_choice(problem, **run.choice), predict=False)
    plan = with_saved(plan, graph, run.policy)
    difference = check_equal(CASES[run.model], plan, graph, steps=3)
    assert difference.loss <= 1e-9 and difference.parameters <= 1e-9, str(difference)


def test_masks_are_those_of_the_forward() -> None:
    plan = dropout_jobs.plan_for(2, dp_replicate=2, num_microbatches=2)
    plan = with_saved(plan, dropout_jobs.graph(), {"*": "recompute"})
    for found in run_ranks(2, dropout_jobs.losses, plan, 0):
        assert found == pytest.approx(dropout_jobs.alone(), rel=1e-10)


def test_operands_are_gathered_again() -> None:
    """Megatron's sequence parallelism: parts are kept, and gathered again for the weights."""
    case = model_axes.forms.case()
    graph = model_axes.traced(case)
    plan = model_axes.plan_of(graph, [model_axes.Part("1d_sequence", shares=(2,))], count=2)
    plan = with_saved(plan, graph, {"up/linear<": "recompute", "act/*": "recompute"})
    difference = check_equal(case, plan, graph, steps=3)
    assert difference.worst_of_both <= 1e-9, str(difference)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(self.norm(self.up(x)).relu()), y)


def _normed() -> nn.Module:
    torch.manual_seed(0)
    return _Normed().double().train()


def test_buffers_are_updated_once() -> None:
    x, y = torch.randn(8, 4).double(), torch.randn(8, 1).double()
    graph = trace(_normed(), (x, y))
    problem = make_problem(graph, Cluster.local(1), precision="fp64", optimizer="sgd")
    plan = with_saved(build_plan(problem, uniform_choice(problem), predict=False), graph,
                      {"*": "recompute"})  # fmt: skip
    model, wanted = _normed(), _normed()
    job = compile_job(model, plan, graph=graph, optimizer="sgd", lr=0.1, device="cpu")
    for _ in range(3):
        job.step((x, y))
    found = full_state(job)
    job.close()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wanted(x, y).backward()
        optimizer.step()
    for name, tensor in wanted.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


class _Chain(nn.Module):
    """Of what it makes, its backward needs what sigmoid and relu make."""

    def forward(self, comm: Comm, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.matmul(x, w)
        s = torch.sigmoid(h)
        return (torch.matmul(torch.relu(s), w).sum(),)


SIZE, EACH = 32, 32 * 32 * 8


def _call(saved: Policy) -> Call:
    module = fx.symbolic_trace(_Chain())
    for node in module.graph.nodes:
        if node.op.startswith("call"):
            node.meta["key"] = node.name
    return Call("chain", BlockCode("chain", module), (), (), (), saved=saved)


def _run_chain(saved: Policy) -> tuple[int, int, list[torch.Tensor]]:
    """Bytes between forward and backward, while the backward has all it needs; gradients."""
    call = _call(saved)
    x, w = (torch.randn(SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
            .requires_grad_() for i in range(2))  # fmt: skip
    comm = Comm({}, {}, {})
    tracker = TensorTracker()
    tracker.label("inputs", [x, w])
    given = sum(tracker._bytes)
    with watching(tracker.see):
        script = Script.of(call)
        keeper = Keeper(call, script, FormRuns(torch.device("cpu"), [script]))
        (out,) = keeper.run(comm, w, x)
        between = sum(tracker._bytes) - given
        keeper.prepare(comm, nullcontext)
        during = sum(tracker._bytes) - given
        out.backward()
    tracker.stop()
    assert x.grad is not None and w.grad is not None
    return between, during, [x.grad, w.grad]


@pytest.mark.parametrize(
    ("policy", "between", "during"),
    [
        ({}, 2, 2),
        ({"matmul": "recompute"}, 2, 2),  # the backward needs it no more than before
        ({"sigmoid": "recompute"}, 2, 2),  # from the product, which is held for it
        ({"relu": "recompute"}, 1, 2),
        ({"matmul": "recompute", "sigmoid": "recompute"}, 1, 2),
        ({"*": "recompute"}, 0, 2),
        ({"*": "offload"}, 2, 2),
        ({"*": "recompute", "sigmoid": "offload"}, 1, 2),
    ],
)
def test_what_is_held(policy: Policy, between: int, during: int) -> None:
    gc.disable()  # so that nothing may wait for it
    try:
        found = _run_chain(policy)
    finally:
        gc.enable()
    loss = 8
    assert found[:2] == (between * EACH + loss, during * EACH + loss)
    for gradient, wanted in zip(found[2], _run_chain({})[2], strict=True):
        assert torch.equal(gradient, wanted)


def test_what_is_offloaded_leaves_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, int]] = []
    for name in ("produced", "fetch"):
        plain = getattr(HostMemory, name)

        def noted(self: HostMemory, parts: Any, name: str = name, plain: Any = plain) -> None:
            away = [p for p in parts if (p.here is None) == (name == "fetch")]
            plain(self, parts)
            moved.append((name, len(away)))
            assert all((p.here is None) == (name == "produced") for p in parts)

        monkeypatch.setattr(HostMemory, name, noted)
    _run_chain({"*": "offload"})
    assert moved == [("produced", 2), ("fetch", 2)]


def test_offload_says_that_a_cpu_has_one_memory() -> None:
    with pytest.warns(UserWarning, match="the host's memory is the device's"):
        HostMemory(torch.device("cpu"))
