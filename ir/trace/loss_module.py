"""The training step as one module: model and loss function under one positional forward.

The same convention serves tracing and running: a batch is a dict of keyword inputs, or a tuple of
positional ones whose last goes to the loss function.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from meshwright.ir.errors import TraceError
from meshwright.ir.precision import CopyTypes
from meshwright.ir.torch_private import map_tensors
from meshwright.ir.trace.forbidden import check_tensor
from meshwright.ir.trace.module_numbers import ModuleCasts
from meshwright.ir.trace.wide_losses import WideLosses, widened

Batch = Any
"""A dict of keyword inputs, a tuple of positional ones, or one tensor; a dataclass, or another
object with fields, is the dict of its fields."""
LossFn = Callable[..., torch.Tensor]


def flatten_batch(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a batch by input name: keys or fields, or "0", "1", ... of a tuple."""
    items = _items(batch)
    for name, value in items.items():
        if isinstance(value, Mapping | list | tuple) or _fields(value) is not None:
            raise TraceError(
                f"input {name!r} is a {type(value).__name__}; the inputs of a training step must "
                "be tensors: put what is in it into the batch itself, under names of its own"
            )
        if not isinstance(value, torch.Tensor | None):
            raise TraceError(
                f"input {name!r} is a {type(value).__name__}; the inputs of a training step must "
                "be tensors: fix other values with functools.partial or in the model's config"
            )
        if value is not None:
            check_tensor(f"input {name!r}", value, of_batch=True)
    return {name: value for name, value in items.items() if value is not None}


def _items(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, torch.Tensor):
        return {"0": batch}
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return {str(index): value for index, value in enumerate(batch)}
    found = _fields(batch)
    if found is None:
        raise TraceError(
            f"a batch is a {type(batch).__name__}; it must be a dict of tensors by input name, a "
            "tuple or list of tensors in the order of forward's arguments, or a dataclass"
        )
    return found


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass, an attrs class or the like, by name."""
    if isinstance(value, type | torch.Tensor):
        return None
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(value, "__attrs_attrs__"):
        return {field.name: getattr(value, field.name) for field in value.__attrs_attrs__}
    if isinstance(value, SimpleNamespace):
        return dict(vars(value))
    if callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__"):
        return {str(key): value[key] for key in value.keys()}
    return None


class TrainingStep(nn.Module):
    """Forward and loss of one batch: positional tensors, in the order of `names`, to a scalar."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        names: Sequence[str],
        copies: CopyTypes | None = None,
    ) -> None:
        """`copies`: what the model reads of parameters; it gets inputs in that dtype, and a loss
        function its output in that of the parameters."""
        super().__init__()
        self.copies = copies
        self.casts = ModuleCasts(copies) if copies else None
        self.model = model
        self.loss_fn = loss_fn
        self.names = tuple(names)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        if self.copies is None or self.casts is None:
            return self._loss(tensors)
        with self.casts.around(self.model), WideLosses(self.casts, self.copies):
            return self._loss(tensors)

    def _loss(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if all(name.isdigit() for name in self.names):
            return self._positional(tensors)
        batch = dict(zip(self.names, tensors, strict=True))
        if self.loss_fn is None:
            return find_loss(self.model(**self._cast(batch)))
        accepted = keyword_names(self.model)
        read = {k: v for k, v in batch.items() if accepted is None or k in accepted}
        output = self.model(**self._cast(read))
        return find_loss(self.loss_fn(self._wide(output), batch))

    def _cast(self, given: Any) -> Any:
        """Inputs of the model: those with fractions in the dtype of its parameters."""
        copies = self.copies
        if copies is None:
            return given
        read = copies.read_by("")
        return map_tensors(lambda x: x.to(read) if x.is_floating_point() else x, given)

    def _wide(self, output: Any) -> Any:
        """What a loss function gets: a loss is not rounded as products are."""
        copies, casts = self.copies, self.casts
        if copies is None or casts is None:
            return output
        return map_tensors(partial(widened, casts, copies), output)

    def _positional(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.loss_fn is None:
            return find_loss(self.model(*self._cast(tensors)))
        if len(tensors) < 2:
            raise TraceError(
                "a loss function needs a batch of at least two tensors, (input, target); got one"
            )
        output = self.model(*self._cast(tensors[:-1]))
        return find_loss(self.loss_fn(self._wide(output), tensors[-1]))


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
