"""What the allocator holds beyond live tensors, seen while a model trains by itself.

The kernel is asked for pages at the peak and wherever a hole does not fit; both depend on the sizes
and the order of the tensors, so it is the model's own blocks that run.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.codegen.lower.lower import lower
from meshwright.codegen.lower.stage_context import where
from meshwright.forms.running import Held
from meshwright.ir.graph.graph import Graph
from meshwright.ir.heap import give_back_freed_memory
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.profile import MemoryRecord
from meshwright.ir.torch_modes import watching
from meshwright.ir.torch_private import on_gradient
from meshwright.runtime.profiling.bench import Bench, BenchBlock
from meshwright.runtime.profiling.tasks import BlockTask
from meshwright.runtime.record.resident import peak_bytes, reset_peak
from meshwright.runtime.record.tensors import TensorTracker, optimizer_tensors
from meshwright.runtime.step.optimizer import make_optimizer

_STEPS = 5
"""Until memory is faulted in and no longer grows much."""


@dataclass(frozen=True, slots=True)
class Grown:
    """What training took in one way."""

    held_bytes: int
    """By the process, beyond what it had before."""
    moving_bytes: int
    """Of the live tensors at their peak, those that come and go with micro-batches."""
    state_bytes: int
    """Of these, parameters, gradients and the optimizer's."""
    gradients_bytes: int
    """All gradients: they go when a step begins and come with its first backward."""

    @property
    def beyond_bytes(self) -> int:
        return max(0, self.held_bytes - self.moving_bytes - self.state_bytes)


def grown(graph: Graph, plan: Plan, device: torch.device) -> Grown:
    """Some steps of the whole model in this process, which should have just begun."""
    gc.collect()
    before = _begin(device)
    stack = _stack(graph, plan, device)
    optimizer = make_optimizer(plan.optimizer, _held(stack), None, stack.module)
    for _ in range(_STEPS):
        _step(stack, plan, optimizer)
    most = _resident(device) - before
    tracker = TensorTracker()
    tracker.label("parameters", stack.given)
    tracker.label("optimizer", optimizer_tensors(optimizer))
    handles = on_gradient(stack.parameters, lambda p: tracker.label("gradients", [p.grad]))
    with watching(tracker.see):
        _step(stack, plan, optimizer)
    for handle in handles:
        handle.remove()
    peak = tracker.peak()
    tracker.stop()
    gradients = sum(p.nbytes for p in stack.parameters if p.requires_grad)
    return Grown(most, peak.rest_bytes, peak.peak_bytes - peak.rest_bytes, gradients)


def _stack(graph: Graph, plan: Plan, device: torch.device) -> BenchBlock:
    at = where(graph, plan, 0, 0)
    task = BlockTask(key="", pattern="", plan=plan, stage=0, dtypes={})
    return Bench(graph, task, at, lower(graph, plan, 0)[0], device).layer()


def _held(stack: BenchBlock) -> list[Held]:
    """What the optimizer gets."""
    program, own = stack.module.program, stack.tensors
    return [
        Held(param, 0, tensor, None, True)
        for param in program.params
        if isinstance(tensor := own[param.name], nn.Parameter)
    ]


def _step(stack: BenchBlock, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    stack.forget_gradients()
    for _ in range(plan.num_microbatches):
        stack.forward()
        stack.backward()
    optimizer.step()


def _begin(device: torch.device) -> int:
    """What the process holds now; freed memory that a fork inherits is given back first."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_reserved(device)
    give_back_freed_memory()
    return reset_peak()


def _resident(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_bytes()


def memory_records(model: str, found: Sequence[Grown]) -> list[MemoryRecord]:
    """Two ratios that fit what was found: of tensors that come and go with micro-batches, and of
    gradients, that come and go with steps. What stays leaves no holes.

    `model`: fingerprint of its graph, since others leave other holes.
    """
    moving, gradients = _fit(
        [g.moving_bytes for g in found],
        [g.gradients_bytes for g in found],
        [g.beyond_bytes for g in found],
    )
    return [
        MemoryRecord(name=f"fragmentation {model}", value=moving, unit="ratio"),
        MemoryRecord(name=f"fragmentation_gradients {model}", value=gradients, unit="ratio"),
    ]


def _fit(xs: Sequence[float], ys: Sequence[float], goals: Sequence[float]) -> tuple[float, float]:
    """Least squares of a x + b y, neither negative."""
    xx, yy = sum(x * x for x in xs), sum(y * y for y in ys)
    xy = sum(x * y for x, y in zip(xs, ys, strict=True))
    xg = sum(x * g for x, g in zip(xs, goals, strict=True))
    yg = sum(y * g for y, g in zip(ys, goals, strict=True))
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (xg * yy - yg * xy) / determinant, (yg * xx - xg * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if b > 0:
            return 0.0, yg / yy
    return max(0.0, xg / max(xx, 1.0)), 0.0
