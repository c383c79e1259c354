"""Trains one odd model both ways on one device: under a searched plan, and in plain PyTorch."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.attack.result import Result
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.trace.loss_module import LossFn, TrainingStep, flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job

STEPS, BAR, LEARNING_RATE = 4, 1e-11, 0.1
Draw = Callable[[torch.Generator], Any]


def vectors(generator: torch.Generator) -> Any:
    """Eight samples with classes."""
    x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(4, (8,), generator=generator)}


@dataclass(frozen=True, slots=True)
class Odd:
    """A model that is unusual in one way."""

    build: Callable[[], nn.Module]
    expected: Literal["exact", "refused"] = "exact"
    says: str = ""
    """What a refusal must name."""
    draw: Draw = vectors
    loss: Callable[[nn.Module], LossFn] | None = None
    """Makes the loss function for a model."""
    around: Callable[[], Any] | None = None
    """Sets something up for all of it; gives a function that takes it away again."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def made(self) -> tuple[nn.Module, LossFn | None]:
        """The model with the same weights every time, and its loss function."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build()
        return model, self.loss(model) if self.loss else None


def attempt(name: str, odd: Odd) -> Result:
    """Whether the model trains as in plain PyTorch, or is refused in words, as expected of it."""
    started = time.perf_counter()
    undo = odd.around() if odd.around else lambda: None
    try:
        apart, where = _apart(odd)
        held = odd.expected == "exact" and apart <= BAR
        what = f"{where} differs by {apart:.1e}"
    except MeshwrightError as error:
        held = odd.expected == "refused" and odd.says in str(error)
        what = f"refused: {error}"
    finally:
        undo()
    return Result(name, held, what, time.perf_counter() - started)


def _apart(odd: Odd) -> tuple[float, str]:
    """The largest difference of any loss, parameter or buffer, and which it is."""
    batches = [odd.draw(torch.Generator().manual_seed(i)) for i in range(STEPS)]
    model, loss_fn = odd.made()
    graph = trace(model, batches[0], loss_fn)
    plan = search(
        graph, Cluster.local(1), precision="fp64", optimizer="sgd", progress=False
    )  # fmt: skip
    job = compile_job(model, plan, optimizer=_sgd, loss_fn=loss_fn, device="cpu", graph=graph)
    losses = [float(job.step(batch)) for batch in batches]
    state = full_state(job)
    job.close()
    wanted_losses, wanted = _plain(odd, batches)
    apart = {"the loss": max(abs(a - b) for a, b in zip(losses, wanted_losses, strict=True))}
    for name, tensor in wanted.items():
        if name in state and tensor.numel():
            apart[name] = float((state[name] - tensor).abs().max())
    worst = max(apart, key=lambda name: apart[name])
    return apart[worst], worst


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def _plain(odd: Odd, batches: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    model, loss_fn = odd.made()
    optimizer = _sgd([p for p in model.parameters() if p.requires_grad])
    losses = []
    for batch in batches:
        values = flatten_batch(batch)
        optimizer.zero_grad()
        loss = TrainingStep(model, loss_fn, tuple(values))(*values.values())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return losses, {name: x.detach().to(_wide(x)) for name, x in state.items()}


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64
