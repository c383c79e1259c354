"""The user's optimizer over what this rank holds."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.forms.running import Held
from meshwright.forms.updates import fuse, update
from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import leaves
from meshwright.runtime.checkpoint.shard_boxes import pieces
from meshwright.runtime.job.choice import check_tensors
from meshwright.runtime.step.planned_updates import (
    JoinedOptimizers,
    PlannedUpdates,
    members_of,
)
from meshwright.runtime.step.updates import stepped_by_kernel

OptimizerChoice = (
    str | PlannedUpdates | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]
)


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
    if lr is not None and not 0.0 <= lr < float("inf"):
        raise PlanError(f"lr is {lr:g}; it must be at least 0 and finite; nearest is 0, or 0.001")
    made = _made(choice, held, lr, model)
    for member in members_of(made):
        fuse(member)
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            f"{type(made).__name__} asks for a closure that computes the loss: no job can"
        )
    return stepped_by_kernel(made) if by_kernel else made


def _made(
    choice: OptimizerChoice, held: Sequence[Held], lr: float | None, model: nn.Module
) -> torch.optim.Optimizer:
    """As torch has it.

    An instance over `model.parameters()` is rebuilt with its class, groups and settings; a callable
    gets the list of tensors. What steps each element by itself is exact on rows; `check_choice`
    says of others where they cannot run.
    """
    named = [(h.param.fqn, h.tensor) for h in held if h.param.requires_grad and h.tensor.numel()]
    if isinstance(choice, PlannedUpdates):
        return choice.make(named, lr, fused=True)
    tensors = [tensor for _, tensor in named]
    if lr is not None and not isinstance(choice, str):
        raise PlanError(f"lr={lr} is for an optimizer by name; set it in the one that you pass")
    if isinstance(choice, JoinedOptimizers):
        return JoinedOptimizers([_rebuilt(member, held, model) for member in choice.members])
    if isinstance(choice, torch.optim.Optimizer):
        return _rebuilt(choice, held, model)
    if not isinstance(choice, str):
        # A list of one group may be empty: a stage may have nothing to train.
        made = choice([{"params": tensors}])
        check_tensors(made, tensors)
        return made
    return update(choice).make(tensors, lr, fused=True)


def _rebuilt(
    optimizer: torch.optim.Optimizer, held: Sequence[Held], model: nn.Module
) -> torch.optim.Optimizer:
    """The user's, over what this rank holds, with its state if it has stepped before."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    by_fqn: dict[str, list[Held]] = {}
    for h in held:
        if h.param.requires_grad and h.tensor.numel():
            by_fqn.setdefault(h.param.fqn, []).append(h)
    groups, states = [], []
    for group in optimizer.param_groups:
        found = [
            (h, p) for p in group["params"] for fqn in _paths(p, names) for h in by_fqn.get(fqn, [])
        ]
        states += [(h, p) for h, p in found if p in optimizer.state]
        groups.append({**group, "params": [h.tensor for h, _ in found]})
    made = like(optimizer, groups)
    for h, p in states:
        kept = {key: _part(h, key, value) for key, value in optimizer.state[p].items()}
        made.state[h.tensor] = {key: _as_stepped(h, p, value) for key, value in kept.items()}
    return made


def _paths(parameter: nn.Parameter, names: dict[int, list[str]]) -> list[str]:
    if not parameter.requires_grad:
        return []
    if id(parameter) not in names:
        raise PlanError(
            f"the optimizer trains a parameter of shape {tuple(parameter.shape)} that the model "
            "does not have; make the optimizer of model.parameters()"
        )
    return names[id(parameter)]


_OF_TORCH = ("defaults", "state", "param_groups", "step", "_opt_called", "_step_count")
"""What an optimizer has of its own, and what a scheduler puts there."""


def like(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """A new optimizer of the same class over other tensors; its attributes go along."""
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    settings |= {k: v for k, v in vars(optimizer).items() if k in accepted and k not in _OF_TORCH}
    try:
        made = type(optimizer)(groups, **settings)
    except TypeError as error:
        raise PlanError(
            f"{type(optimizer).__name__} cannot be made again for the tensors of a rank ({error}); "
            "pass a callable that makes one from parameters"
        ) from error
    for name, value in vars(optimizer).items():
        of_tensors = any(isinstance(x, nn.Parameter | torch.optim.Optimizer) for x in leaves(value))
        if name in _OF_TORCH or (of_tensors and name in vars(made)):
            continue
        if of_tensors:
            raise PlanError(
                f"{type(optimizer).__name__} keeps parameters in its attribute {name!r}, which are "
                "not those that a rank holds; pass a callable that makes one from parameters"
            )
        vars(made)[name] = copy.copy(value)
    return made


def _as_stepped(held: Held, whole: nn.Parameter, value: Any) -> Any:
    """State in the dtype of the user's parameter follows it into that which the job steps it in."""
    if isinstance(value, Tensor) and value.ndim and value.dtype == whole.dtype:
        return value.to(held.tensor.dtype)
    return value


def _part(held: Held, key: str, value: Any) -> Any:
    """What belongs to a held tensor of a state of the whole parameter."""
    if not isinstance(value, Tensor) or (not value.ndim and held.param.global_shape):
        return copy.deepcopy(value)
    if tuple(value.shape) != held.param.global_shape:
        raise PlanError(
            f"your optimizer has stepped, and keeps {key} of shape {tuple(value.shape)} for "
            f"{held.param.fqn!r}, which has {held.param.global_shape}: pass a new optimizer"
        )
    part = torch.zeros_like(held.tensor, dtype=value.dtype, requires_grad=False)
    for piece in pieces(held.param.runs, held.rows):
        piece.of_local(part).copy_(piece.of_global(value))
    return part
