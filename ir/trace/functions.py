"""Custom autograd.Functions as operators, so that a trace keeps the backward that they define.

A trace would record what their forward does, and autograd would derive its gradient: for a function
such as a straight-through rounding that is another one. Within `own_functions`, each call becomes
one operator, whose forward and backward are the user's (`ir.ops.functions`).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from meshwright.ir.errors import TraceError
from meshwright.ir.graph.inner_flops import ProductCounter
from meshwright.ir.ops.functions import PLAIN, WITH_PRODUCTS
from meshwright.ir.text.digest import digest
from meshwright.ir.torch_private import leaves, no_modes, operator_library, storage_key

_LIBRARIES = {space: operator_library(space) for space in (PLAIN, WITH_PRODUCTS)}
_NAMES: dict[str, type] = {}
"""Operator, with its namespace -> the class that it stands for."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, FunctionType)

_apply: Any = Function.__dict__["apply"]


@contextmanager
def own_functions() -> Iterator[None]:
    """Calls of functions from outside torch are recorded whole."""
    Function.apply = classmethod(_recorded)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = _apply  # type: ignore[method-assign]


def _original(kind: type, *args: Any) -> Any:
    return _apply.__get__(None, kind)(*args)


def _recorded(kind: type, *args: Any, **kwargs: Any) -> Any:
    if kind is CheckpointFunction:
        # What to compute again is for a plan to say; its own forward would record no gradients.
        run, _, *given = args
        return run(*given)
    if kind.__module__.split(".")[0] == "torch" or not any(isinstance(x, Tensor) for x in args):
        return _apply.__get__(None, kind)(*args, **kwargs)
    _check(kind, args)
    with no_modes(), torch.no_grad(), ProductCounter() as counted:
        result = _original(kind, *args)
    many = isinstance(result, tuple | list)
    results = tuple(result) if many else (result,)
    if not all(isinstance(x, Tensor) for x in results):
        raise TraceError(f"{kind.__qualname__}.forward returns something that is not a tensor")
    space = WITH_PRODUCTS if counted.flops else PLAIN
    operator = _operator(space, kind, args, len(results))
    found = operator(*(x for x in args if isinstance(x, Tensor)))
    return (found,) if many and len(results) == 1 else found


def _check(kind: type, args: tuple[Any, ...]) -> None:
    """What is not a tensor becomes part of the operator, so it must not hold tensors."""
    for value in args:
        if not isinstance(value, Tensor):
            for leaf in leaves(value):
                if not isinstance(leaf, _PLAIN):
                    raise TraceError(
                        f"the autograd.Function {kind.__qualname__} is given a "
                        f"{type(leaf).__name__}, whose tensors a plan cannot see: pass tensors and "
                        "plain values"
                    )


def _operator(space: str, kind: type, args: tuple[Any, ...], results: int) -> Any:
    """The operator of the function with these arguments, made if need be."""
    fixed = [None if isinstance(x, Tensor) else str(x) for x in args]
    stem = re.sub(r"\W+", "_", f"{kind.__module__}_{kind.__qualname__}").strip("_")
    name = base = f"{stem}_{digest([fixed, results])[:8]}"
    count = 1
    while _NAMES.get(f"{space}::{name}", kind) is not kind:
        count += 1
        name = f"{base}_{count}"
    if f"{space}::{name}" not in _NAMES:
        _NAMES[f"{space}::{name}"] = kind
        _define(space, name, kind, args, results)
    return getattr(getattr(torch.ops, space), name).default


def _define(space: str, name: str, kind: type, args: tuple[Any, ...], results: int) -> None:
    places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
    fixed = [None if isinstance(x, Tensor) else x for x in args]
    made = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    library = _LIBRARIES[space]
    library.define(f"{name}({', '.join(f'Tensor x{i}' for i in places)}) -> {made}")
    run = _runner(kind, places, fixed, results)
    for key in ("CompositeExplicitAutograd", "Autograd"):
        library.impl(name, run, key)
    torch.library.register_fake(f"{space}::{name}", run, lib=library)


def _runner(
    kind: type, places: list[int], fixed: list[Any], results: int
) -> Callable[..., Any]:  # fmt: skip
    def run(*tensors: Tensor) -> Any:
        given = list(fixed)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        result = _original(kind, *given)
        memory = {storage_key(x) for x in tensors}
        # An operator's result is a tensor of its own.
        made = tuple(
            x.clone() if storage_key(x) in memory else x
            for x in (result if isinstance(result, tuple | list) else (result,))
        )
        return made[0] if results == 1 else made

    return run
