"""A stage's tensors on one rank: sliced from the user's model, or constants of the graph."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from meshwright.codegen.lower.program import StageProgram
from meshwright.forms.running import Held, Slot
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.graph.param import Param
from meshwright.ir.precision import CopyTypes
from meshwright.runtime.checkpoint.shard_boxes import pieces


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by module path, tied ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def stage_tensors(
    program: StageProgram,
    graph: Graph,
    source: Mapping[str, Tensor],
    device: torch.device,
    *,
    as_traced: bool = False,
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Graph tensor name -> local tensor, and the module paths that have no values yet (meta).
    `as_traced`: parameters have the dtypes of the graph; else those of the user's."""
    found: dict[str, Tensor] = {}
    missing = []
    for param in program.params:
        if param.kind is Kind.CONSTANT and param.fqn not in source:
            found[param.name] = _constant(param, graph, device)
            continue
        is_parameter = param.kind is Kind.PARAMETER
        cast = getattr(torch, param.dtype) if is_parameter and as_traced else None
        local = _local(param, source, device, cast)
        if source[param.fqn].is_meta:
            missing.append(param.fqn)
        found[param.name] = nn.Parameter(local, param.requires_grad) if is_parameter else local
    return found, tuple(missing)


def _constant(param: Param, graph: Graph, device: torch.device) -> Tensor:
    value, dtype = graph.tensors[param.name].value, getattr(torch, param.dtype)
    return torch.tensor(value, dtype=dtype, device=device).view(param.global_shape)


def _local(
    param: Param,
    source: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if param.fqn not in source:
        raise PlanError(f"the model has no parameter or buffer {param.fqn!r}, which the plan needs")
    whole = source[param.fqn].detach()
    if tuple(whole.shape) != param.global_shape:
        raise PlanError(
            f"{param.fqn!r} has shape {tuple(whole.shape)}, the plan is for {param.global_shape}"
        )
    local = torch.empty(param.local_shape, dtype=dtype or whole.dtype, device=device)
    if not whole.is_meta:
        for piece in pieces(param.runs):
            piece.of_local(local).copy_(piece.of_global(whole))
    return local


def fill_stepped(held: Sequence[Held], source: Mapping[str, Tensor]) -> None:
    """What the optimizer steps, and blocks read copies of, gets the user's values."""
    for h in held:
        whole = source[h.param.fqn].detach()
        if not whole.is_meta:
            for piece in pieces(h.param.runs, h.rows):
                piece.of_local(h.tensor.detach()).copy_(piece.of_global(whole))


def slots(
    program: StageProgram, tensors: Mapping[str, Tensor], copies: CopyTypes | None = None
) -> tuple[Slot, ...]:
    """The stage's parameters with the calls that read them, which may be copies."""
    readers: dict[str, list[int]] = {}
    for index, call in enumerate(program.calls):
        for name in dict.fromkeys(call.params):
            readers.setdefault(name, []).append(index)
    found = []
    for param in program.params:
        whole = tensors[param.name]
        if isinstance(whole, nn.Parameter) and param.name in readers:
            is_copy = copies and param.requires_grad and whole.dtype == copies.read
            own = (copies.stepped, copies.summed) if copies and is_copy else (None, None)
            found.append(Slot(param, whole, tuple(readers[param.name]), *own))
    return tuple(found)
