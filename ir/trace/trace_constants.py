"""Values that the model's code reads while it is traced, where they depend on no data.

A mask made of shapes alone has known values although its tensor is fake. When the code asks for one
(`if mask.all()`, `.item()`), the calls that made it are done again on real tensors. An `assert` on
other values is taken to hold, and values are taken to be finite.
"""

import ast
import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.ir.deadline import check_time
from meshwright.ir.torch_private import (
    DATA,
    DATA_SET,
    GRAD_FN,
    REQUIRES_GRAD,
    leaves,
    map_tensors,
    no_modes,
    storage_key,
)
from meshwright.ir.trace.checked_counts import picked_count
from meshwright.ir.trace.explain import is_users
from meshwright.ir.trace.finite_checks import FiniteChecks
from meshwright.ir.trace.forbidden import assigns_data, changes_training
from meshwright.ir.trace.hooks import Unhooked

Tensor = torch.Tensor
LARGEST = 1 << 24
"""Elements of a tensor that is made again."""
_EXPORT = tuple(f"{Path(torch.__file__).parent / name}/" for name in ("export", "_subclasses"))
"""Where torch's export is written."""
_READS = frozenset(
    [
        Tensor.__bool__,
        Tensor.item,
        Tensor.tolist,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
    ]
)
_FACTORIES = frozenset(
    "arange full zeros ones eye linspace tensor scalar_tensor tril_indices triu_indices zeros_like "
    "ones_like full_like new_zeros new_ones new_full new_tensor".split()
)
_IN_PLACE = frozenset(
    ["__setitem__"]
    + [f"__i{x}__" for x in "add and floordiv lshift matmul mod mul or pow rshift sub truediv "
                            "xor".split()]
)  # fmt: skip
_SIZED_BY_VALUES = frozenset(
    "repeat_interleave nonzero argwhere masked_select unique_consecutive arange __getitem__".split()
)
"""What gives results of a size that values decide: counts, masks, ends."""
_RANDOM = ("rand", "bernoulli", "dropout", "normal", "multinomial", "uniform", "empty")


@dataclass(frozen=True, slots=True)
class _Made:
    """The call that made a tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None
    """Which of several results."""


Own = Mapping[int, tuple[torch.nn.Module, str]]
"""Identity of a parameter or buffer of the user's model -> module of the copy, and name there."""


class KnownValues(TorchFunctionMode):
    """Within it, reads of values that depend on no data succeed, and code that reaches the user's
    model from outside (a loss function that sums its weights) gets the tensors of the copy."""

    def __init__(self, own: Own | None = None) -> None:
        super().__init__()
        self._own = own or {}
        self._made = WeakTensorKeyDictionary()
        self._finite = FiniteChecks()
        self._lost: set[int] = set()
        """Memory that was written to."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        check_time()
        kwargs = kwargs or {}
        # Most calls ask for a shape or a dtype, which is no value and watched by nobody.
        plain = not kwargs and getattr(func, "__name__", "") == "__get__"
        if plain and id(args[0]) not in self._own and func != DATA and func != GRAD_FN:
            asked = func(*args)
            if isinstance(asked, Tensor):
                self._note(_Made(func, args, kwargs, None), list(args), asked)
            return asked
        if func is Tensor.__iter__ and args[0].ndim:  # else its parts would come from nowhere
            return iter(self.__torch_function__(Tensor.unbind, types, (args[0],)))
        given = leaves((args, kwargs))
        if self._own and any(id(x) in self._own for x in given):
            args, kwargs = map_tensors(self._copied, (args, kwargs))
            given = leaves((args, kwargs))
        self._check_training(func, args)
        if func == DATA:
            return args[0].detach()
        if func == DATA_SET and _asked_by_user(sys._getframe(1)):
            raise assigns_data()
        if func in _READS and args[0] in self._made and self._is_known(args[0]):
            return self._done_again(func, args, kwargs)
        args = self._picked_by_places(func, self._with_known_ends(func, args))
        if self._sized_by_known(func, given):
            func, args, kwargs, given = _as_constant(self._done_again(func, args, kwargs), given)
        if func in (Tensor.__bool__, Tensor.item) and args[0].dtype == torch.bool:
            holds = self._finite.usual(args[0])
            holds = asserted(sys._getframe(1)) if holds is None else holds
            if holds is not None:
                return holds
        if (count := picked_count(func, args, sys._getframe(1))) is not None:
            return count
        result = func(*args, **kwargs)
        if func == GRAD_FN and result is not None and _asked_by_user(sys._getframe(1)):
            return Unhooked(result)
        self._finite.note(func, args, result)
        self._note(_Made(func, args, kwargs, None), given, result)
        return result

    def _copied(self, tensor: Tensor) -> Tensor:
        """What the copy that is traced has in the place of the user's tensor."""
        if id(tensor) not in self._own:
            return tensor
        module, name = self._own[id(tensor)]
        found: Tensor = getattr(module, name)
        return found

    def _check_training(self, func: Any, args: tuple[Any, ...]) -> None:
        if func is Tensor.requires_grad_ or func == REQUIRES_GRAD:
            wanted = args[1] if len(args) > 1 else True
            if args[0].requires_grad == wanted or _is_of_export(sys._getframe(2)):
                return  # as of every tensor that is made while a model is copied
            for module, name in self._own.values():
                # Asked of the module's own tables: as attributes they would be looked up in Python.
                if args[0] is module._parameters.get(name) or args[0] is module._buffers.get(name):
                    raise changes_training(f"{name} of {type(module).__name__}", wanted)

    def _note(self, made: _Made, flat: list[Any], result: Any) -> None:
        """`flat`: what its arguments hold."""
        name = getattr(made.function, "__name__", "")
        given = [x for x in flat if isinstance(x, Tensor)]
        written = [x for x in leaves(made.kwargs.get("out")) if isinstance(x, Tensor)]
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            written += given[:1]
        if written:
            self._lost.update(map(storage_key, written))
            return
        if _is_random(name):
            return
        if name not in _FACTORIES and (not given or not all(x in self._made for x in given)):
            return
        # What is handed back as it came, `x.contiguous()`, `view._base`, is known by what made it.
        if isinstance(result, Tensor):
            if result not in self._made:
                self._made[result] = made
        elif isinstance(result, tuple):
            for index, part in enumerate(result):
                if isinstance(part, Tensor) and part not in self._made:
                    self._made[part] = replace(made, index=index)

    def _is_known(self, tensor: Tensor) -> bool:
        made: _Made = self._made[tensor]
        if storage_key(tensor) in self._lost or tensor.numel() > LARGEST:
            return False
        given = (x for x in leaves((made.args, made.kwargs)) if isinstance(x, Tensor))
        return all(self._is_known(x) for x in given if x in self._made)

    def _with_known_ends(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of a call that picks slices, whose ends are numbers where they were tensors of
        known values: torch would read these where nobody is asked."""
        if getattr(func, "__name__", "") != "__getitem__":
            return args
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        ends = [y for x in index if isinstance(x, slice) for y in (x.start, x.stop, x.step)]
        if not any(isinstance(x, Tensor) for x in ends):
            return args
        return args[0], tuple(self._known_slice(x) if isinstance(x, slice) else x for x in index)

    def _known_slice(self, part: slice) -> slice:
        def number(end: Any) -> Any:
            known = isinstance(end, Tensor) and end in self._made and self._is_known(end)
            return self._done_again(Tensor.__index__, (end,), {}) if known else end

        return slice(number(part.start), number(part.stop), number(part.step))

    def _picked_by_places(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of a call that picks by a mask whose values are known: the places that it has,
        so that the result has a size."""
        if getattr(func, "__name__", "") != "__getitem__" or not isinstance(args[1], Tensor):
            return args
        tensor, mask = args
        if tensor in self._made or mask.dtype != torch.bool or mask not in self._made:
            return args
        if not self._is_known(mask):
            return args
        places = self._done_again(torch.nonzero, (mask,), {})
        with no_modes():
            listed = places.t().tolist()
        return tensor, tuple(torch.tensor(x, device=mask.device) for x in listed)

    def _sized_by_known(self, func: Any, given: list[Any]) -> bool:
        """Whether it is a call whose result's size is for values to say, and these are known."""
        name = getattr(func, "__name__", "")
        if name not in _SIZED_BY_VALUES:
            return False
        tensors = [x for x in given if isinstance(x, Tensor)]
        if name == "__getitem__" and not any(x.dtype == torch.bool for x in tensors[1:]):
            return False
        return bool(tensors) and all(x in self._made and self._is_known(x) for x in tensors)

    def _real(self, tensor: Tensor) -> Tensor:
        made: _Made = self._made[tensor]
        result = self._done_again(made.function, made.args, made.kwargs)
        found: Tensor = result if made.index is None else result[made.index]
        return found

    def _done_again(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # `zeros_like` and the like read only the shape of a tensor that is not known.
        real = lambda x: self._real(x) if x in self._made else torch.empty_like(x, device="cpu")  # noqa: E731
        with no_modes():
            args, kwargs = map_tensors(real, (args, dict(kwargs)))
            return func(*args, **kwargs)


def _as_constant(
    real: Tensor, given: list[Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]:
    """The call that makes a tensor of these values, on the device of what it was made of."""
    device = next(x.device for x in given if isinstance(x, Tensor))
    with no_modes():
        listed = real.tolist()
    return torch.tensor, (listed,), {"dtype": real.dtype, "device": device}, []


@cache
def _is_random(name: str) -> bool:
    return any(word in name for word in _RANDOM)


def _is_of_export(frame: FrameType) -> bool:
    """Whether it is torch's export that calls, which makes tensors of its own for all parameters:
    to look for each of these among all that a model has took a twentieth of a large one's trace."""
    return frame.f_code.co_filename.startswith(_EXPORT)


def _asked_by_user(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and is_users(frame)


def asserted(frame: FrameType | None) -> bool | None:
    """What the condition must be for the `assert` to hold that the user's code is in, if any."""
    while frame is not None and _is_between(frame):
        if frame.f_code.co_name.startswith("_check"):  # torch._check and its kin
            return True
        frame = frame.f_back
    if frame is None:
        return None
    for first, last, holds in _assertions(frame.f_code.co_filename):
        if first <= frame.f_lineno <= last:
            return holds
    return None


def _is_between(frame: FrameType) -> bool:
    code = frame.f_code
    return "/torch/" in code.co_filename or code.co_name == "__torch_function__"


@cache
def _assertions(file: str) -> tuple[tuple[int, int, bool], ...]:
    """First and last lines of the assertions of a file, and the value that they ask for."""
    tree = ast.parse("".join(linecache.getlines(file)))
    return tuple(
        (node.lineno, node.test.end_lineno or node.lineno, not _negates(node.test))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    )


def _negates(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
