"""Hooks on gradients: a trace does not see them, so a model that has some is refused.

Generated code makes gradients, splits them and sums them between ranks; no hook runs then.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.ir.errors import TraceError
from meshwright.ir.torch_private import backward_hooks, backward_hooks_of_all, gradient_hooks
from meshwright.ir.trace.explain import user_line_here
from meshwright.ir.trace.stand_ins import standing_in

_WAY_OUT = (
    "gradients are split and summed between ranks without it: change them in the optimizer (a "
    "subclass whose step does it), scale the loss, or put a torch.autograd.Function whose backward "
    "does it into the forward"
)
_REGISTERING = ("register_hook", "register_post_accumulate_grad_hook")


def check_hooks(model: nn.Module) -> None:
    """Raise a TraceError if a parameter or module has a hook on its gradients."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            for hook in gradient_hooks(parameter):
                where = f"{path}.{name}" if path else name
                raise TraceError(
                    f"parameter {where} has a gradient hook, {_named(hook)}: {_WAY_OUT}"
                )
        for hook in backward_hooks(module):
            what = f"module {path}" if path else f"the model ({type(module).__name__})"
            raise TraceError(f"{what} has a backward hook, {_named(hook)}: {_WAY_OUT}")
    for hook in backward_hooks_of_all():
        raise TraceError(f"all modules have a backward hook, {_named(hook)}: {_WAY_OUT}")


def _named(hook: Any) -> str:
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


@contextmanager
def no_gradient_hooks() -> Iterator[None]:
    """Inside, code of a model that registers hooks on gradients ends in a TraceError."""
    with ExitStack() as stack:
        for name in _REGISTERING:
            stack.enter_context(mock.patch.object(Tensor, name, _refused(name)))
        many = "register_multi_grad_hook"
        stack.enter_context(standing_in(torch.autograd.graph, many, _refused(many)))
        enter = saved_tensors_hooks.__enter__

        def checked(hooks: saved_tensors_hooks) -> None:
            kind = type(hooks)
            if kind is saved_tensors_hooks or kind.__module__.split(".")[0] != "torch":
                where, line = user_line_here()
                raise TraceError(
                    f"{where}: `{line}` changes how tensors are saved for the backward "
                    f"({kind.__name__}), which generated code does not do: what is kept, computed "
                    "again or moved to the host is for the plan to say (recompute, saved=...)"
                )
            enter(hooks)

        stack.enter_context(mock.patch.object(saved_tensors_hooks, "__enter__", checked))
        yield


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> None:
        where, line = user_line_here()
        raise TraceError(f"{where}: `{line}` puts a hook on a gradient: {_WAY_OUT}")

    refuse.__name__ = name
    return refuse


class Unhooked:
    """Stands for a node of autograd; takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.register_hook = _refused("register_hook")
        self.register_prehook = _refused("register_prehook")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)
