"""Jobs of one device against plain PyTorch on the same device, and against themselves."""

import copy
import tempfile
import warnings
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.kernels import KERNELS
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.testing.models import CASES
from meshwright.testing.plain import plain_step
from tests.gpu.devices import DEVICES, on_each

BATCH, STEPS, RATE = 4, 3, 0.1
BOUNDS = {"fp64": (1e-11, 1e-9), "fp32": (1e-5, 1e-3), "tf32": (3e-3, 5e-2), "bf16": (3e-2, 0.15)}
"""Of the loss, relative, and of the way that parameters went, relative to its length. Where numbers
are rounded it is compared with what is not: plain PyTorch in float32."""


@dataclass(frozen=True)
class JobCase:
    """A model, a precision, and what its plan does with memory."""

    model: str
    precision: str
    choice: dict[str, Any] = field(default_factory=dict)
    stage: dict[str, Any] = field(default_factory=dict)
    kernels: bool = False


JOBS = {
    "gpt2 fp64": JobCase("gpt2", "fp64"),
    "gpt2 fp32": JobCase("gpt2", "fp32", {"num_microbatches": 2}),
    "gpt2 tf32": JobCase("gpt2", "tf32"),
    "gpt2 bf16": JobCase("gpt2", "bf16", {"num_microbatches": 2}),
    "gpt2 bf16 kernels": JobCase("gpt2", "bf16", kernels=True),
    "llama fp32 kernels": JobCase("llama", "fp32", {"num_microbatches": 2}, kernels=True),
    "recompute": JobCase("llama", "fp32", {"num_microbatches": 2, "recompute": "full"}),
    "recompute bf16": JobCase("llama", "bf16", {"recompute": "full"}),
    "update on host": JobCase(
        "gpt2", "fp32", {"num_microbatches": 2}, {"store": FormChoice(form="update_on_host")}
    ),
    "on host": JobCase("gpt2", "bf16", stage={"store": FormChoice(form="on_host")}),
    "saved on host": JobCase("gpt2", "fp32", {"num_microbatches": 2}, {"saved": "offload"}),
    "compiled": JobCase("gpt2", "fp32", stage={"compile": True}),
}


def cluster(device: str) -> Cluster:
    """One device of the kind; what is predicted of it does not matter here."""
    if device == "cpu":
        return Cluster.local(1)
    return Cluster.preset("h100-sxm", num_nodes=1, devices_per_node=1)


def made(case: JobCase, device: str) -> tuple[nn.Module, Graph, Plan]:
    """The model in float32, or float64, and its plan."""
    zoo = CASES[case.model]
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    with torch.device("cpu"):
        model = zoo.model(dtype)
        kernels = KERNELS if case.kernels else ()
        graph = mw.trace(
            copy.deepcopy(model), zoo.example(BATCH, dtype=dtype), zoo.loss_fn,
            kernels=kernels, precision=case.precision,
        )  # fmt: skip
        problem = make_problem(graph, cluster(device), precision=case.precision, optimizer="sgd")
        plan = build_plan(problem, uniform_choice(problem, **case.choice), predict=False)
    stage = dict(case.stage)
    if "saved" in stage:
        patterns = {block.pattern for block in graph.blocks}
        stage["saved"] = {pattern: {"*": stage["saved"]} for pattern in patterns}
    plan = replace(plan, stages=tuple(replace(one, **stage) for one in plan.stages))
    return model, graph, plan


def batches(case: JobCase, device: str, steps: int = STEPS) -> list[Any]:
    zoo = CASES[case.model]
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    with torch.device("cpu"):
        found = [zoo.example(BATCH, seed, dtype) for seed in range(steps)]
    return [{name: x.to(device) for name, x in batch.items()} for batch in found]


def job_of(case: JobCase, device: str, **more: Any) -> Job:
    model, graph, plan = made(case, device)
    warnings.filterwarnings("ignore", "offload on cpu")  # which is what this is about there
    return compile_job(
        model, plan, optimizer=lambda given: torch.optim.SGD(given, lr=RATE),
        loss_fn=CASES[case.model].loss_fn, device=device, graph=graph, **more,
    )  # fmt: skip


def plain(case: JobCase, device: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of plain PyTorch on the device, and parameters before and after."""
    model = made(case, device)[0].to(device)
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss_fn = CASES[case.model].loss_fn
    losses = [plain_step(model, loss_fn, optimizer, x) for x in batches(case, device)]
    return losses, start, {name: x.detach() for name, x in model.named_parameters()}


@dataclass(frozen=True)
class Apart:
    """How far a job is from plain PyTorch."""

    loss: float
    way: float
    worst: str
    checked: tuple[str, ...]
    device: str


def apart(name: str, device: str) -> Apart:
    """Trains both ways. The job is compared with PyTorch by itself, too, before it trains."""
    case = JOBS[name]
    losses, start, wanted = plain(case, device)
    job = job_of(case, device, check=True)
    where = {held.tensor.device.type for held in job.parts.held}
    found = [float(job.step(batch)) for batch in batches(case, device)]
    state = full_state(job)
    checked = job.checked
    assert checked is not None
    job.close()
    ways = {
        name: float((state[name].to(x) - x).norm() / (x - start[name]).norm())
        for name, x in wanted.items() if (x - start[name]).norm() > 1e-6 * x.norm()
    }  # fmt: skip
    assert len(ways) > len(wanted) / 2
    worst = max(ways, key=ways.__getitem__)
    loss = max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True))
    return Apart(loss, ways[worst], worst, checked.checked, "+".join(sorted(where)))


@cache
def _all(device: str) -> dict[str, Apart]:
    found: dict[str, Apart] = on_each(device, apart, [*JOBS])
    return found


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_job_trains_as_plain_pytorch_does(device: str, name: str) -> None:
    found, (loss, way) = _all(device)[name], BOUNDS[JOBS[name].precision]
    assert found.loss <= loss and found.way <= way, found
    assert any("one step of the plan" in text for text in found.checked), found
    on_host = "store" in JOBS[name].stage
    assert found.device == ("cpu" if on_host else device)


def _again(name: str, device: str) -> float:
    """How far a job that goes on from a checkpoint is from the one that wrote it."""
    case = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        first = job_of(case, device, check=False)
        data = batches(case, device, 4)
        for batch in data[:2]:
            first.step(batch)
        first.save(folder)
        other = job_of(case, device, check=False)
        other.load(folder)
        losses = [[float(job.step(batch)) for batch in data[2:]] for job in (first, other)]
        states = [full_state(job) for job in (first, other)]
    far = max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])
    return max(far, *(abs(a - b) for a, b in zip(*losses, strict=True)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_goes_on_where_it_was(device: str) -> None:
    names = ["gpt2 fp32", "gpt2 bf16", "on host"]
    for name, far in on_each(device, _again, names).items():
        assert far <= 1e-6, f"{name}: {far}"
