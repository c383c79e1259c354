"""The training step as one module: model and loss function under one positional forward.

The same convention serves tracing and running: a batch is a dict of keyword inputs, or a tuple of
positional ones whose last goes to the loss function.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.ir.errors import TraceError

Batch = Mapping[str, Any] | Sequence[Any] | torch.Tensor
LossFn = Callable[..., torch.Tensor]


def flatten_batch(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a batch by input name: dict keys, or "0", "1", ... of a tuple."""
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    items = (
        dict(batch.items())
        if isinstance(batch, Mapping)
        else {str(index): value for index, value in enumerate(batch)}
    )
    for name, value in items.items():
        if not isinstance(value, torch.Tensor | None):
            raise TraceError(
                f"input {name!r} is a {type(value).__name__}; the inputs of a training step must "
                "be tensors: fix other values with functools.partial or in the model's config"
            )
    return {name: value for name, value in items.items() if value is not None}


class TrainingStep(nn.Module):
    """Forward and loss of one batch: positional tensors, in the order of `names`, to a scalar."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.names = tuple(names)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        if all(name.isdigit() for name in self.names):
            return self._positional(tensors)
        batch = dict(zip(self.names, tensors, strict=True))
        if self.loss_fn is None:
            return find_loss(self.model(**batch))
        accepted = keyword_names(self.model)
        output = self.model(**{k: v for k, v in batch.items() if accepted is None or k in accepted})
        return find_loss(self.loss_fn(output, batch))

    def _positional(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.loss_fn is None:
            return find_loss(self.model(*tensors))
        if len(tensors) < 2:
            raise TraceError(
                "a loss function needs a batch of at least two tensors, (input, target); got one"
            )
        return find_loss(self.loss_fn(self.model(*tensors[:-1]), tensors[-1]))


def keyword_names(model: nn.Module) -> frozenset[str] | None:
    """Keyword inputs that the model's forward takes; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        return frozenset(named) if named else None
    return frozenset(p.name for p in parameters)


def find_loss(output: Any) -> torch.Tensor:
    """The scalar loss in what a model or loss function returned."""
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise TraceError(
            f"the model returned a {type(output).__name__} without a loss; pass loss_fn=..., or "
            "inputs with labels so that the output has a `.loss`"
        )
    if loss.numel() != 1:
        raise TraceError(
            f"the loss has shape {tuple(loss.shape)}; it must be one number: take its mean or sum, "
            "or pass loss_fn=..."
        )
    return loss.reshape(())
