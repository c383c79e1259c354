"""Keeps a model in float64 that asks for float32 inside, as norms, rotary angles and routers do.

Such a cast rounds at 1e-7, so two right computations of a step would differ by more than the 1e-9
that equality is held to. The mode changes only what dtype is asked for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_METHODS: Any = torch.Tensor  # the types of torch lack its complex casts
_SHORT: dict[Any, Callable[..., Any]] = {
    _METHODS.float: _METHODS.double, _METHODS.cfloat: _METHODS.cdouble,
}  # fmt: skip


class _Wider(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = _SHORT.get(func, func)
        return func(*map(_wider, args), **{k: _wider(v) for k, v in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


@contextmanager
def all_double() -> Iterator[None]:
    """Within it, float64 is what there is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(before)
