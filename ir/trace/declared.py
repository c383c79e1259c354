"""Experts that their author declares: what a module computes, written with `mix_experts`.

Code that loops over experts and looks at which tokens came cannot be traced, as its course depends
on values. A declaration is another forward of the same module, with the same arguments, that routes
tokens as the module does and hands the rest to one operator. It is used while a model is traced;
the module's own forward stays as it is, and a job's check compares the two.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from meshwright.ir.errors import TraceError
from meshwright.ir.graph.expert_form import ExpertForm
from meshwright.ir.graph.experts import EXPERTS

Forward = Callable[..., Any]
Declared = TypeVar("Declared", bound=nn.Module | type[nn.Module])
_ATTRIBUTE = "_meshwright_experts"


def declare_experts(what: Declared, forward: Forward) -> Declared:
    """Trace a module, or all of a class, as `forward(module, *its arguments)` says; returns it."""
    if not (
        isinstance(what, nn.Module) or (isinstance(what, type) and issubclass(what, nn.Module))
    ):
        raise TraceError(
            f"declare_experts: {what!r} is neither a module nor a class of modules; give it the "
            "layer that routes tokens to experts"
        )
    if not callable(forward):
        raise TraceError(f"declare_experts: {forward!r} is no function (module, *arguments)")
    if isinstance(what, nn.Module):
        vars(what)[_ATTRIBUTE] = forward  # not a submodule, not a parameter
    else:
        setattr(what, _ATTRIBUTE, staticmethod(forward))
    return what


def experts_by(forward: Forward) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Declare the class below, as a decorator: `@experts_by(routed)` above `class Mixture`."""
    return lambda what: declare_experts(what, forward)


def declared_forward(module: nn.Module) -> Forward | None:
    """What was declared of a module, or of the class that its forward is of; None if nothing."""
    if own := vars(module).get(_ATTRIBUTE):
        return own  # type: ignore[no-any-return]
    for base in type(module).__mro__:
        if _ATTRIBUTE in vars(base):
            return getattr(base, _ATTRIBUTE)  # type: ignore[no-any-return]
        if "forward" in vars(base):
            return None
    return None


def use_declared(copy: nn.Module) -> None:
    """Give the modules of a (copied) model the forward that was declared of them."""
    for module in copy.modules():
        if forward := declared_forward(module):
            module.forward = MethodType(forward, module)


def mix_experts(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    act: str = "silu",
    up: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    form: ExpertForm | str = "",
) -> torch.Tensor:
    """Tokens [..., H] through the experts that each picked, summed by weight: [..., H].

    `index` and `weights` are [..., K]; an index outside [0, E) is a token that is dropped. Weights
    of experts are `gate_up` [E, 2I, H] (or [E, I, H] without a gate, or with `up` [E, I, H] beside
    it) and `down` [E, H, I], biases [E, 2I] and [E, H]; words of `form` say what is stored
    otherwise (`ir.graph.experts.ExpertForm`). `act` names a file of `ir/gates`.
    """
    rows, picked, scale = (_rows(x) for x in (hidden, index, weights))
    scale = scale if scale.dtype == hidden.dtype else scale.to(hidden.dtype)
    made: torch.Tensor = EXPERTS(
        rows, picked, scale, gate_up, down, act, up, gate_up_bias, down_bias, str(form)
    )
    return made if hidden.ndim == 2 else made.view(hidden.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[T, n] of [..., n], without an operator that does nothing."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
