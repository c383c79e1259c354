"""What a model may not hold, and its code may not do, while it is traced; each is told in words."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.errors import TraceError
from meshwright.ir.torch_private import ENGINE, own_dispatch, read_compiler_rules, wraps_tensors
from meshwright.ir.trace.explain import user_line_here
from meshwright.ir.trace.stand_ins import standing_in

_DENSE = "a plan splits dense tensors only"


def check_modules(model: nn.Module) -> None:
    """Raise a TraceError if part of the model is TorchScript, or is peft's and puts an adapter into
    a parameter and takes it out again in each call."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"module {path or 'of the model'} is TorchScript ({type(module).__name__}), whose "
                "calls cannot be traced: use the nn.Module that it was made from"
            )
        if type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft."):
            raise TraceError(
                f"module {path}: peft's adapter of the parameter {module.parameter_name} "
                "(target_parameters) changes the module in each call, which a graph cannot hold; "
                "nearest: adapters of linear layers (target_modules)"
            )


def check_tensor(what: str, tensor: Tensor, *, of_batch: bool = False) -> None:
    """Raise a TraceError if a tensor of the model or of a batch is of a special kind.

    One of a batch may be a subclass whose data are its own, as those of torchvision are.
    """
    kind = type(tensor).__name__
    if tensor.is_nested:
        raise TraceError(f"{what} is a nested tensor; {_DENSE}: pad it, and pass a mask")
    if tensor.layout is not torch.strided:
        raise TraceError(
            f"{what} is a sparse tensor ({tensor.layout}); {_DENSE}: pass its indices and values "
            "as dense tensors, and use gather, index_add or scatter_add; or call .to_dense()"
        )
    if tensor.is_quantized:
        raise TraceError(
            f"{what} is a quantised tensor ({tensor.dtype}); {_DENSE}: keep integers and their "
            "scales in two tensors"
        )
    if wraps_tensors(tensor) if of_batch else own_dispatch(tensor):
        raise TraceError(
            f"{what} is a {kind}, a kind of tensor with operators of its own; {_DENSE}: keep its "
            "parts as plain tensors; `mw.quantise` does so for weights in few bits"
        )


@contextmanager
def forbidden() -> Iterator[None]:
    """Inside, code that the graph of a forward cannot hold ends in a TraceError."""
    # torch's compiler keeps a table of torch's functions, made at its first use: not from these.
    read_compiler_rules()
    with ExitStack() as stack:
        module, name = ENGINE
        stack.enter_context(standing_in(module, name, _no_gradients))
        stack.enter_context(standing_in(torch.func, "grad", _no_gradients))
        stack.enter_context(standing_in(torch._VF, "_pack_padded_sequence", _no_packing))
        for name in _NESTED:
            stack.enter_context(standing_in(torch.nested, name, _no_nesting))
        yield


_NESTED = ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow")


def _no_gradients(*_: Any, **__: Any) -> Any:
    where, line = user_line_here()
    raise TraceError(
        f"{where}: `{line}` computes gradients inside the step (torch.autograd.grad, backward, "
        "torch.func): a plan is made for a forward and the backward of its loss; write the "
        "gradient as operators of the forward, or leave it out"
    )


def _no_packing(*_: Any, **__: Any) -> Any:
    where, line = user_line_here()
    raise TraceError(
        f"{where}: `{line}` packs sequences by their lengths, so that sizes depend on values, "
        "which are not known when a plan is made: run the recurrent layer on padded sequences and "
        "mask what comes after their ends"
    )


def _no_nesting(*_: Any, **__: Any) -> Any:
    where, line = user_line_here()
    raise TraceError(f"{where}: `{line}` makes a nested tensor; {_DENSE}: pad it, and pass a mask")


def changes_training(path: str, wanted: bool) -> TraceError:
    """The error for `requires_grad_` on a parameter in a forward."""
    where, line = user_line_here()
    return TraceError(
        f"{where}: `{line}` changes requires_grad of {path} to {wanted} while the model runs: "
        "which parameters are trained is fixed when the model is traced; set it before planning, "
        "and use .detach() where a use of it shall get no gradient"
    )


def assigns_data() -> TraceError:
    """The error for `tensor.data = ...` in a forward."""
    where, line = user_line_here()
    return TraceError(
        f"{where}: `{line}` assigns to .data, which a graph cannot hold: keep state in buffers, "
        "and change parameters in the optimizer"
    )
