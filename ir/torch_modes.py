"""Ways of torch that are not public to see operators as they run, and to trace with less work.

Checked on the versions that `ir.torch_private` names.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import FrameSummary, StackSummary
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import _lazy_graph_module, proxy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from meshwright.ir.torch_private import is_fake
from meshwright.ir.watched_sums import Sums

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def no_python_of_graphs() -> AbstractContextManager[Any]:
    """Inside, graphs of torch become Python when somebody calls them, not whenever they change: an
    export of a model with many layers changes its graph some thirty times, and calls none."""
    lazily: Any = getattr(_lazy_graph_module, "_use_lazy_graph_module", None)
    found: AbstractContextManager[Any] = lazily(True) if lazily else nullcontext()
    return found


class _ShortTrace:
    """Stands for torch's `CapturedTraceback`, which looks up the text of every frame of an operator
    call, a hundred or so; torch then keeps those of a `forward`. This has the innermost of these
    that is none of torch's own."""

    def __init__(self, frames: list[FrameSummary]) -> None:
        self._frames = frames

    @classmethod
    def extract(cls, **_: Any) -> "_ShortTrace":
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and not code.co_filename.startswith(_TORCH):
                return cls([FrameSummary(code.co_filename, frame.f_lineno, code.co_name)])
            frame = frame.f_back
        return cls([])

    def summary(self) -> StackSummary:
        return StackSummary.from_list(self._frames)


@contextmanager
def short_traces() -> Iterator[None]:
    """Inside, nodes of graphs that are traced say where the user's code made them and no more."""
    module: Any = proxy
    usual = getattr(module, "CapturedTraceback", None)
    if usual is None:
        yield
        return
    module.CapturedTraceback = _ShortTrace
    try:
        yield
    finally:
        module.CapturedTraceback = usual


Opened = Mapping[Any, Callable[..., Any]]
"""Operator -> the function of operators that it stands for."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Callable[[list[Tensor]], None], opened: Opened) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._opened = seen, opened
        self._sums = Sums()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        opened = self._opened.get(func)
        # What stands for an operator may read values, which those of a dry run do not have.
        if opened and not any(map(is_fake, tree_leaves((args, kwargs)))):
            with self:
                result = opened(*args, **(kwargs or {}))
        else:
            func = self._sums.as_unwatched(func, args)
            result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self._sums.note(func, made)
        self._seen(made)
        return result


def watching(
    seen: Callable[[list[Tensor]], None], opened: Opened = MappingProxyType({})
) -> AbstractContextManager[Any]:
    """Inside, `seen` gets what every operator returns, in forward and backward, and what those that
    are `opened` make inside of themselves."""
    return _Watch(seen, opened)


class _PrivateUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, called: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = called

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._called(func, args, kwargs or {}, result)
        return result


def recording(
    called: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
) -> AbstractContextManager[Any]:
    """Inside, `called` gets every operator with its arguments and results, below autograd."""
    return _PrivateUse(called)


def is_watched() -> bool:
    """Whether operators are seen one by one, by `watching` or as fake tensors: torch.compile does
    nothing then."""
    return _get_current_dispatch_mode() is not None
