"""Jobs of one device that tests of GPUs take steps with."""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.kernels import KERNELS
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.capture import recorder
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.testing.models import CASES
from tests.traces import zoo_graph

BATCH, STEPS, RATE = 4, 3, 0.1


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
    "captured": JobCase("llama", "fp32", {"num_microbatches": 4}, {"capture": True}),
    "captured bf16": JobCase(
        "gpt2", "bf16", {"num_microbatches": 2, "recompute": "full"}, {"capture": True}
    ),
    "compiled": JobCase("gpt2", "fp32", stage={"compile": True}),
}


def cluster(device: str, *, captured: bool = False) -> Cluster:
    """One device of the kind; what is predicted of it does not matter here. Plans whose calls are
    recorded are for GPUs, and run on CPUs where they are told to."""
    if device == "cpu" and not captured:
        return Cluster.local(1)
    return Cluster.preset("h100-sxm", num_nodes=1, devices_per_node=1)


def model_of(case: JobCase) -> nn.Module:
    """The model in float32, or float64, with the same weights each time."""
    with torch.device("cpu"):
        return CASES[case.model].model(_dtype(case))


def _dtype(case: JobCase) -> torch.dtype:
    return torch.float64 if case.precision == "fp64" else torch.float32


def made(case: JobCase, device: str) -> tuple[nn.Module, Graph, Plan]:
    """The model and its plan."""
    zoo, dtype, model = CASES[case.model], _dtype(case), model_of(case)
    with torch.device("cpu"):
        kernels = KERNELS if case.kernels else ()
        graph = zoo_graph(zoo, BATCH, dtype, case.precision, kernels)
        where = cluster(device, captured="capture" in case.stage)
        problem = make_problem(graph, where, precision=case.precision, optimizer="sgd")
        plan = build_plan(problem, uniform_choice(problem, **case.choice), predict=False)
    stage = dict(case.stage)
    if "saved" in stage:
        patterns = {block.pattern for block in graph.blocks}
        stage["saved"] = {pattern: {"*": stage["saved"]} for pattern in patterns}
    plan = replace(plan, stages=tuple(replace(one, **stage) for one in plan.stages))
    return model, graph, plan


def batches(case: JobCase, device: str, steps: int = STEPS) -> list[Any]:
    zoo = CASES[case.model]
    with torch.device("cpu"):
        found = [zoo.example(BATCH, seed, _dtype(case)) for seed in range(steps)]
    return [{name: x.to(device) for name, x in batch.items()} for batch in found]


def job_of(case: JobCase, device: str, **more: Any) -> Job:
    model, graph, plan = made(case, device)
    recorder.TAPES = "capture" in case.stage
    warnings.filterwarnings("ignore", "offload on cpu")  # which is what this is about there
    return compile_job(
        model, plan, optimizer=lambda given: torch.optim.SGD(given, lr=RATE),
        loss_fn=CASES[case.model].loss_fn, device=device, graph=graph, **more,
    )  # fmt: skip
