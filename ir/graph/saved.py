"""What autograd keeps for the backward of a call: asked of autograd itself, on fake tensors.

Each distinct call (operator, arguments, shapes) runs once with hooks on what is saved; so there is
no table of rules to go stale, and equal layers cost one look-up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.torch_private import storage_key
from meshwright.ir.trace.flat_trace import RawOp


@dataclass(frozen=True, slots=True)
class SavedOfCall:
    """What one call keeps; tensors as positions among its inputs and outputs."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    extra_bytes: int
    shares: tuple[int | None, ...]
    """Per output: the input whose memory it shares, if any."""


class Memory:
    """Looks up what calls keep; remembers the calls it has seen."""

    def __init__(self) -> None:
        self._seen: dict[Any, SavedOfCall] = {}

    def of(self, op: RawOp, fakes: Mapping[str, torch.Tensor]) -> SavedOfCall:
        if op.name == "aten.scaled_dot_product_attention.default":
            # With dropout plain torch keeps every score on a CPU, we keep few; kernels keep none.
            op = replace(op, args=op.args | {"dropout_p": 0.0})
        key = (op.name, op.grad, tuple((k, _keyed(v, fakes)) for k, v in op.args.items()),
               _wiring(op.inputs))  # fmt: skip
        if key not in self._seen:
            self._seen[key] = _ask(op, fakes)
        return self._seen[key]


def _wiring(names: tuple[str, ...]) -> tuple[int, ...]:
    """Which inputs are the same tensor."""
    return tuple(names.index(name) for name in names)


def _keyed(value: Arg, fakes: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        fake = fakes[value.name]
        return (tuple(fake.shape), fake.stride(), fake.dtype, fake.requires_grad)
    if isinstance(value, tuple):
        return tuple(_keyed(item, fakes) for item in value)
    return value


def to_call(value: Arg, tensors: Mapping[str, torch.Tensor], dtype: bool = False) -> Any:
    """The Python value of an argument; `dtype` tells that a string names a dtype."""
    if isinstance(value, Ref):
        return tensors[value.name]
    if isinstance(value, tuple):
        return [to_call(item, tensors) for item in value]
    if dtype and isinstance(value, str):
        return getattr(torch, value)
    return value


def call(op: RawOp, tensors: Mapping[str, torch.Tensor]) -> list[Any]:
    """Run the call on `tensors`; its results in order."""
    return call_target(op.target, op.args, tensors)


def call_target(
    target: Any, args: Mapping[str, Arg], tensors: Mapping[str, torch.Tensor]
) -> list[Any]:
    """Run an operator on arguments given as data."""
    positional, keyword = [], {}
    for argument in target._schema.arguments:
        # A dtype is an int in the schema's Python form.
        is_dtype = "ScalarType" in str(argument.real_type)
        value = to_call(args[argument.name], tensors, is_dtype)
        if argument.kwarg_only and value is None:
            continue  # its default, also where that is a memory format
        if argument.kwarg_only:
            keyword[argument.name] = value
        else:
            positional.append(value)
    result = target(*positional, **keyword)
    return list(result) if isinstance(result, list | tuple) else [result]


def _ask(op: RawOp, fakes: Mapping[str, torch.Tensor]) -> SavedOfCall:
    names = list(dict.fromkeys(op.inputs))
    wide = op.name.startswith(_RECURRENT)
    leaves = {n: _leaf(fakes[n], wide) for n in names}
    owners = {storage_key(leaf): n for n, leaf in leaves.items()}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with (
        torch.set_grad_enabled(op.grad),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        results = call(op, leaves)
    made = {
        storage_key(r): i for i, r in reversed(list(enumerate(results)))
        if isinstance(r, torch.Tensor)
    }  # fmt: skip
    extra = {
        storage_key(t): t.untyped_storage().nbytes()
        for t in kept
        if storage_key(t) not in owners and storage_key(t) not in made
    }
    stored = {storage_key(t) for t in kept}
    return SavedOfCall(
        tuple(op.inputs.index(n) for k, n in owners.items() if k in stored),
        tuple(i for k, i in made.items() if k in stored and k not in owners),
        sum(extra.values()) * fakes[names[0]].element_size() // 8 if wide else sum(extra.values()),
        tuple(
            op.inputs.index(owners[storage_key(r)])
            if isinstance(r, torch.Tensor) and storage_key(r) in owners
            else None
            for r in results
        ),
    )


# In float32 they call a kernel whose workspace has no size on fake tensors, in float64 they do not.
_RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_")


def _leaf(fake: torch.Tensor, wide: bool) -> torch.Tensor:
    dtype = torch.float64 if wide and fake.is_floating_point() else fake.dtype
    leaf = torch.empty_strided(fake.shape, fake.stride(), dtype=dtype)
    return leaf.requires_grad_(fake.requires_grad)
