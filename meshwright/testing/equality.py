"""Compares a parallel job on forked ranks with plain training of the same model in one process."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.plain import plain_step
from meshwright.testing.spawn import alone, run_ranks

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Difference:
    """Largest relative differences; `rel <= 1e-9` is the project's bar in float64."""

    loss: float
    parameters: float
    worst: str
    """Name of the parameter that differs most."""
    losses: tuple[float, ...]

    @property
    def worst_of_both(self) -> float:
        return max(self.loss, self.parameters)


def check_equal(
    case: Any,
    plan: Plan,
    graph: Graph,
    steps: int = 3,
    timeout_s: float = 300.0,
    run: Callable[..., list[Any]] = run_ranks,
) -> Difference:
    """Trains `case` (name, build, batch, loss_fn) both ways with Adam in float64."""
    (found,) = check_each_equal(case, [(plan, graph)], steps, timeout_s, run)
    return found


def check_each_equal(
    case: Any,
    planned: Sequence[tuple[Plan, Graph]],
    steps: int = 3,
    timeout_s: float = 300.0,
    run: Callable[..., list[Any]] = run_ranks,
    device: str = "cpu",
) -> list[Difference]:
    """The same of several plans for as many ranks, one after the other in the same processes, on
    devices of a kind. What they are compared with is on the CPU."""
    model = case.model()
    jobs = [(plan, graph, _batches(case, plan.global_batch_size, steps)) for plan, graph in planned]
    (world,) = {plan.world_size for plan, _ in planned}
    results = run(world, _train_each, model, jobs, case.loss_fn, device, timeout_s=timeout_s)
    normed = _normed(model)
    return [
        _difference(case, plan, graph, steps, [rank[number] for rank in results], normed)
        for number, (plan, graph) in enumerate(planned)
    ]


def _difference(
    case: Any,
    plan: Plan,
    graph: Graph,
    steps: int,
    results: Sequence[tuple[list[float], dict[str, Tensor]]],
    normed: bool,
) -> Difference:
    parts = plan.num_microbatches if normed else 1
    wanted_losses, wanted = _wanted(case, plan.global_batch_size, steps, parts)
    for losses, _ in results:
        assert losses == results[0][0], "ranks report different losses"
    losses, state = results[0]
    differences = {name: _relative(state[name], wanted[name]) for name in state if name in wanted}
    assert len(differences) >= len(graph.parameters)
    worst = max(differences, key=lambda name: differences[name])
    loss = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, wanted_losses, strict=True))
    return Difference(loss, differences[worst], worst, tuple(losses))


@lru_cache(maxsize=8)
def _wanted(
    case: Any, batch_size: int, steps: int, parts: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The reference of a case; plans of one model follow each other, and share it."""
    batches = _batches(case, batch_size, steps)
    return alone(reference, case.model(), batches, case.loss_fn, parts)  # type: ignore[no-any-return]


def _batches(case: Any, batch_size: int, steps: int) -> list[Any]:
    seeds = range(100, 100 + steps)
    return [_double(case.batch(batch_size, torch.Generator().manual_seed(i))) for i in seeds]


def _normed(model: nn.Module) -> bool:
    """Batch-norm sees one micro-batch at a time, by contract."""
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def reference(
    model: nn.Module, batches: list[Any], loss_fn: Any, parts: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final parameters of plain autograd on whole batches, or on `parts` of them."""
    model.train()
    optimizer = torch.optim.Adam(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE
    )
    losses = [plain_step(model, loss_fn, optimizer, batch, parts) for batch in batches]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _train_each(
    model: nn.Module, jobs: Sequence[tuple[Plan, Graph, list[Any]]], loss_fn: Any, device: str
) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [_train(copy.deepcopy(model), *job, loss_fn, device) for job in jobs]


def _train(
    model: nn.Module, plan: Plan, graph: Graph, batches: list[Any], loss_fn: Any, device: str
) -> tuple[list[float], dict[str, Tensor]]:
    job = compile_job(
        model, plan, optimizer="adam", lr=LEARNING_RATE, loss_fn=loss_fn, device=device, graph=graph
    )
    losses = [float(job.step(batch)) for batch in batches]
    state = full_state(job)
    job.close()
    return losses, state


def _relative(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest element of the tensor, or to the length of one
    Adam step where that is larger: a parameter whose true gradient is zero (the bias of attention
    keys) is moved by rounding alone, and has no size of its own to compare with."""
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(LEARNING_RATE))


def _double(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _double(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_double(value) for value in batch)
    return batch.double() if torch.is_tensor(batch) and batch.is_floating_point() else batch
