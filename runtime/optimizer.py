"""The user's optimizer over what this rank holds."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.ir.errors import PlanError
from meshwright.runtime.choice import check_tensors
from meshwright.runtime.gradsync.base import Held
from meshwright.runtime.updates import stepped_by_kernel

OptimizerChoice = str | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
_BY_NAME: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def make_optimizer(
    choice: OptimizerChoice,
    held: Sequence[Held],
    lr: float | None,
    model: nn.Module,
    *,
    by_kernel: bool = False,
) -> torch.optim.Optimizer:
    """An optimizer over the held tensors, which are whole parameters or rows of them; `by_kernel`:
    one whose step is our kernel."""
    made = _made(choice, held, lr, model)
    return stepped_by_kernel(made) if by_kernel else made


def _made(
    choice: OptimizerChoice, held: Sequence[Held], lr: float | None, model: nn.Module
) -> torch.optim.Optimizer:
    """As torch has it.

    An instance over `model.parameters()` is rebuilt with its class, groups and settings; a callable
    gets the list of tensors. What steps each element by itself is exact on rows; `check_choice`
    says of others where they cannot run.
    """
    tensors = [h.tensor for h in held if h.param.requires_grad and h.tensor.numel()]
    if isinstance(choice, torch.optim.Optimizer):
        return _rebuilt(choice, held, model)
    if not isinstance(choice, str):
        # A list of one group may be empty: a stage may have nothing to train.
        made = choice([{"params": tensors}])
        check_tensors(made, tensors)
        return made
    if choice not in _BY_NAME:
        raise PlanError(f"optimizer {choice!r} is none of {', '.join(_BY_NAME)}; pass a callable")
    kind, defaults = _BY_NAME[choice]
    settings = defaults | ({} if lr is None else {"lr": lr})
    if tensors and "fused" in inspect.signature(kind).parameters:
        settings["fused"] = True
    return kind([{"params": tensors}], **settings)


def _rebuilt(
    optimizer: torch.optim.Optimizer, held: Sequence[Held], model: nn.Module
) -> torch.optim.Optimizer:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    by_fqn: dict[str, list[nn.Parameter]] = {}
    for h in held:
        if h.param.requires_grad and h.tensor.numel():
            by_fqn.setdefault(h.param.fqn, []).append(h.tensor)
    groups = []
    for group in optimizer.param_groups:
        fqns = [name for parameter in group["params"] for name in names.get(id(parameter), [])]
        tensors = [tensor for fqn in fqns for tensor in by_fqn.get(fqn, [])]
        groups.append({**group, "params": tensors})
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    return type(optimizer)(groups, **settings)
