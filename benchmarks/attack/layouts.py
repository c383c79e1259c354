"""Small models with one rare op each, under every kind of layout, against plain PyTorch.

Each is trained in float64 by one process and as each plan says; losses, parameters and buffers must
be equal to rounding, or the product must say in words why not.
"""

import copy
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attack.noisy import NOISY
from benchmarks.attack.odd_modules import MODULES
from benchmarks.attack.odd_ops import OPS, Model
from benchmarks.attack.result import Result
from benchmarks.attack.shared import SHARED
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, model_mesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.plain import plain_step
from meshwright.testing.spawn import RankFailed, alone, run_ranks
from meshwright.testing.split_all import split_all

MODELS = {**OPS, **MODULES, **NOISY, **SHARED}
STEPS, BATCH, LR = 2, 8, 0.1
NEAR = 1e-8

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "one": {},
    "x2": {"num_microbatches": 2},
    "dp2": {"dp_replicate": 2},
    "zero3": {"dp_shard": 2, "zero": 3},
    "recompute": {"recompute": "full", "num_microbatches": 2},
    "tp2": {"tp": 2},
    "tp3": {"tp": 3},
    "pp2": {"pp": 2, "num_microbatches": 2},
    "pp2_tp2": {"pp": 2, "tp": 2, "num_microbatches": 2},
    "zero2_tp2": {"dp_shard": 2, "zero": 2, "tp": 2},
}


@dataclass(frozen=True)
class Trained:
    """What training leaves."""

    losses: tuple[float, ...]
    state: Mapping[str, Tensor]
    """Parameters and buffers by name."""


def attacks(size: int, seed: int) -> Iterator[Result]:
    """`size` percent of the models, under all layouts."""
    count = max(1, len(MODELS) * size // 100)
    names = list(MODELS)
    for i in range(count):
        yield from attack(names[(seed + i * len(names) // count) % len(names)], tuple(LAYOUTS))


def attack(name: str, layouts: tuple[str, ...]) -> Iterator[Result]:
    """One model under these layouts."""
    model = MODELS[name]
    batches = [model.batch(BATCH, torch.Generator().manual_seed(i)) for i in range(STEPS)]
    start = time.perf_counter()
    try:
        graph = trace(model.made(), batches[0], model.loss)
    except MeshwrightError as error:
        yield Result(f"{name}: traced", True, f"refused: {error}", time.perf_counter() - start)
        return
    wanted: dict[int, Trained] = {}
    for layout in layouts:
        start = time.perf_counter()
        held, what = _judged(model, graph, batches, LAYOUTS[layout], wanted)
        yield Result(f"{name}: {layout}", held, what, time.perf_counter() - start)


def _judged(
    model: Model, graph: Graph, batches: list[Any], choice: dict[str, Any],
    wanted: dict[int, Trained],
) -> tuple[bool, str]:  # fmt: skip
    try:
        plan = plan_of(graph, choice)
    except MeshwrightError as error:
        return True, f"refused: {error}"
    parts = plan.num_microbatches if model.per_microbatch else 1
    if parts not in wanted:
        wanted[parts] = (
            run_ranks(1, _train, model, plan_of(graph, {}), graph, batches)[0]
            if model.drawn
            else alone(reference, model, batches, parts)
        )
    try:
        found = run_ranks(plan.world_size, _train, model, plan, graph, batches, timeout_s=60)[0]
    except RankFailed as error:
        return refused(str(error))
    used = {tensor.fqn for tensor in graph.tensors.values()}
    return compared(found, wanted[parts], used)


def plan_of(graph: Graph, choice: dict[str, Any]) -> Plan:
    """The plan of a choice; all that can be split on tp is."""
    sizes = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1} | choice
    world = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"] * sizes["pp"]
    problem = make_problem(graph, Cluster.local(world), precision="fp64", optimizer="sgd")
    if tp := choice.get("tp"):
        problem.solved[model_mesh({"tp": tp}), ""] = split_all(graph, tp)
    return build_plan(problem, uniform_choice(problem, **choice), predict=False)


def reference(model: Model, batches: list[Any], parts: int = 1) -> Trained:
    """Plain training; batches in `parts` where statistics are those of a micro-batch."""
    module = model.made().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    losses = [plain_step(module, model.loss, optimizer, batch, parts) for batch in batches]
    return Trained(tuple(losses), copy.deepcopy(dict(module.state_dict())))


def refused(text: str) -> tuple[bool, str]:
    """Whether one of the ranks refused in words; the others wait for it."""
    lines = text.strip().splitlines()
    for line in lines:
        if line.startswith("meshwright.ir.errors."):
            return True, f"refused: {line}"
    return False, lines[-1]


def _train(model: Model, plan: Plan, graph: Graph, batches: list[Any]) -> Trained:
    job = compile_job(
        model.made(), plan, optimizer="sgd", lr=LR, loss_fn=model.loss, device="cpu", graph=graph
    )
    losses = [float(job.step(batch)) for batch in batches]
    state = full_state(job)
    job.close()
    return Trained(tuple(losses), state)


def compared(found: Trained, wanted: Trained, used: Set[str]) -> tuple[bool, str]:
    off = max(
        abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found.losses, wanted.losses, strict=True)
    )
    worst, where = off, "loss"
    for name, value in wanted.state.items():
        if name not in found.state:
            if name in used:
                return False, f"{name} is missing"
            continue
        off = _apart(found.state[name], value)
        if not off <= worst:
            worst, where = off, name
    return worst <= NEAR, f"{where} is {worst:.1e} off" if worst > NEAR else f"equal to {worst:.0e}"


def _apart(found: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    found, wanted = found.to(kind), wanted.to(kind)
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))
