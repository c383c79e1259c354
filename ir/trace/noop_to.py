"""`module.to(...)` in a model's forward, where it changes nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.trace.explain import user_line_here


@contextmanager
def parameters_stay() -> Iterator[None]:
    """Inside, modules may be cast and moved to what they are: torch would swap their parameters,
    which cannot be done to those of a trace. Anything else is a TraceError."""
    with mock.patch.object(nn.Module, "_apply", _kept):
        yield


def _kept(module: nn.Module, function: Callable[[Tensor], Tensor], *_: Any) -> nn.Module:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        changed = function(tensor)
        if _told(changed) != _told(tensor):
            raise TraceError(_message(module, name, tensor, changed))
    return module


def _message(module: nn.Module, name: str, before: Tensor, after: Tensor) -> str:
    where, line = user_line_here()
    return (
        f"{where}: `{line}` changes {name} of {type(module).__name__} from {_told(before)} to "
        f"{_told(after)} while the model runs: do it before planning, or cast the tensor that is "
        "used"
    )


def _told(tensor: Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"
