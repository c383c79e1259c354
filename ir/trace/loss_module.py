"""The training step as one module: model and loss function under one positional forward.

The same convention serves tracing and running: a batch is a dict of keyword inputs, or a tuple of
positional ones. A loss function gets the output and the batch, of a tuple its last item; one that
takes the output alone gets only that, and the model the whole batch.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
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
object with fields, is the dict of its fields. Items may be dicts, lists and tuples in turn."""
LossFn = Callable[..., torch.Tensor]
_WITHIN = "."
"""Between the names of an item and of what is inside it."""
_PLACE_DIGITS = 4
"""Of the place of an item in a tuple; a longer number is a name."""


def flatten_batch(batch: Batch) -> dict[str, torch.Tensor]:
    """The tensors of a batch by input name: keys or fields, or "0", "1", ... of a tuple; of what is
    inside another item with its name before, as "features.ids"."""
    found = dict(_leaves(_items(batch), ""))
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise TraceError(
                f"input {name!r} is a {type(value).__name__}; the inputs of a training step must "
                "be tensors: fix other values with functools.partial or in the model's config"
            )
        check_tensor(f"input {name!r}", value, of_batch=True)
    return found


def _leaves(items: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    """Depth first; None stands for an input that is not there."""
    for key, value in items.items():
        name = f"{before}{key}"
        if not isinstance(key, str) or _WITHIN in key:
            raise TraceError(
                f"input {name!r}: keys of a batch must be texts without {_WITHIN!r}, which stands "
                "for what is inside of another item"
            )
        if isinstance(value, Mapping | list | tuple):
            inside = list(_leaves(_inside(name, value), f"{name}{_WITHIN}"))
            if not inside:
                raise TraceError(f"input {name!r} has no tensor inside; leave it out")
            yield from inside
        elif _fields(value) is not None:
            raise TraceError(
                f"input {name!r} is a {type(value).__name__}; the inputs of a training step must "
                "be tensors: put what is in it into a dict, or into the batch itself"
            )
        elif value is not None:
            yield name, value


def _inside(name: str, value: Mapping[str, Any] | Sequence[Any]) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        if any(str(inner).isdigit() for inner in value):
            raise TraceError(
                f"input {name!r} has keys that are numbers; give them names, or make it a tuple"
            )
        return value
    if type(value) not in (list, tuple):
        raise TraceError(
            f"input {name!r} is a {type(value).__name__}: only dicts, lists and tuples may be "
            "inside a batch"
        )
    return _placed(f"input {name!r}", value)


def _placed(what: str, values: Sequence[Any]) -> dict[str, Any]:
    """Items by their places. None at the end would be lost: nothing behind it says how long the
    whole is."""
    if len(values) and values[-1] is None:
        raise TraceError(f"{what} ends with None, which stands for what is not there: leave it out")
    return {str(index): value for index, value in enumerate(values)}


def nested_batch(named: Mapping[str, torch.Tensor]) -> dict[str, Any] | tuple[Any, ...]:
    """The batch of which `flatten_batch` gives these tensors; lists come back as tuples."""
    tree: dict[str, Any] = {}
    for name, value in named.items():
        *path, last = name.split(_WITHIN)
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = value
    return _closed(tree)  # type: ignore[no-any-return]


def _closed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(map(_is_place, node)):
        last = max(map(int, node))
        return tuple([_closed(node.get(str(index))) for index in range(last + 1)])
    return {key: _closed(value) for key, value in node.items()}


def _is_place(key: str) -> bool:
    """Whether a name is one of those that items of a tuple have, and no other number."""
    return key.isascii() and key.isdecimal() and len(key) <= _PLACE_DIGITS and key == str(int(key))


def _items(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, torch.Tensor):
        return {"0": batch}
    if isinstance(batch, Mapping):
        return dict(batch.items())
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return _placed("a batch", batch)
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
        self._of_output = loss_fn is not None and takes_output_alone(loss_fn)
        self.names = tuple(names)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        if self.copies is None or self.casts is None:
            return self._loss(tensors)
        with self.casts.around(self.model), WideLosses(self.casts, self.copies):
            return self._loss(tensors)

    def _loss(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        batch = nested_batch(dict(zip(self.names, tensors, strict=True)))
        if isinstance(batch, tuple):
            return self._positional(batch)
        # What only a loss function reads is not for the model.
        by_name = self.loss_fn is not None and not self._of_output
        accepted = keyword_names(self.model) if by_name else None
        read = {k: v for k, v in batch.items() if accepted is None or k in accepted}
        output = self.model(**self._cast(read))
        return self._lost(output, batch)

    def _lost(self, output: Any, *batch: Any) -> torch.Tensor:
        if self.loss_fn is None:
            return find_loss(output)
        given = () if self._of_output else batch
        return find_loss(self.loss_fn(self._wide(output), *given))

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

    def _positional(self, batch: tuple[Any, ...]) -> torch.Tensor:
        if self.loss_fn is None or self._of_output:
            return self._lost(self.model(*self._cast(batch)))
        if len(batch) < 2:
            raise TraceError(
                "a loss function of output and target needs a batch of at least two tensors, "
                "(input, target); got one. One that takes the output alone, loss_fn(output), "
                "needs no target"
            )
        return self._lost(self.model(*self._cast(batch[:-1])), batch[-1])


def takes_output_alone(loss_fn: LossFn) -> bool:
    """Whether a loss function gets the model's output and nothing else. TraceError where that
    cannot be known: it takes a second argument that has a value already."""
    try:
        known = inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):
        return False
    kinds = inspect.Parameter
    placed = [p for p in known.parameters.values() if p.kind is not kinds.KEYWORD_ONLY]
    if any(p.kind is kinds.VAR_POSITIONAL for p in placed):
        return False
    placed = [p for p in placed if p.kind is not kinds.VAR_KEYWORD]
    if len(placed) > 1 and not any(placed[1].default is x for x in (kinds.empty, None)):
        raise TraceError(
            f"loss function: nobody can tell whether its second argument {placed[1].name!r}, which "
            f"is {placed[1].default!r} by default, shall be the batch; put a * before it, or give "
            "the batch's argument no default"
        )
    return len(placed) == 1


def keyword_names(model: nn.Module) -> frozenset[str] | None:
    """Give the keyword inputs that the model's forward takes; None if it takes any. A wrapper that
    hands on all that it gets, as peft's and DataParallel are, takes what the model inside takes."""
    given = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = frozenset(p.name for p in given if p.kind in kinds)
    if named or not any(p.kind is p.VAR_KEYWORD for p in given):
        return named
    inner = _wrapped(model)
    return None if inner is None else keyword_names(inner)


def _wrapped(model: nn.Module) -> nn.Module | None:
    """The model inside of a wrapper, by the names that peft and torch give it."""
    if callable(base := getattr(model, "get_base_model", None)):
        found = base()
    else:
        found = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
    return found if isinstance(found, nn.Module) and found is not model else None


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
