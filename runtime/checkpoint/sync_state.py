"""What forms of synchronisation keep between steps, in a checkpoint: of each rank its own.

No other layout of ranks could take it, as only the form knows what it means; who goes on under
another plan has to say that it may be lost.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.forms.running import Held, SyncState
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.nesting import whole_runs
from meshwright.ir.plan.plan import Stage
from meshwright.runtime.checkpoint.boxes import Boxed
from meshwright.runtime.checkpoint.manifest import StoredTensor, SyncValues
from meshwright.runtime.checkpoint.shard_boxes import pieces
from meshwright.runtime.checkpoint.values import decode, dtype_named, encode

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job


def kept(job: "Job") -> tuple[dict[str, Boxed], dict[str, SyncValues]]:
    """What the forms of this rank keep: tensors by their names in the checkpoint, and the rest."""
    tensors: dict[str, Boxed] = {}
    rest: dict[str, SyncValues] = {}
    for index, stage in job.parts.stages.items():
        state = stage.sync.state()
        if not state:
            continue
        where = f"{index}/{job.parts.rank}"
        values = {}
        for name, value in _own_states(job, index) if stage.sync.own_states else ():
            tensors[f"sync/{where}/{name}"] = _boxed(value)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel():
                tensors[f"sync/{where}/{key}"] = _boxed(value)
            else:
                values[key] = encode(value, f"{key} of the form {job.plan.stages[index].sync_form}")
        rest[where] = SyncValues(_layout(job.plan.stages[index]), values)
    return tensors, rest


def room(
    job: "Job", found: Mapping[str, SyncValues], stored: Mapping[str, StoredTensor]
) -> tuple[dict[int, SyncState], dict[str, Boxed]]:
    """What each form of this rank is to load, and its tensors, which are to be filled; PlanError if
    the checkpoint has what no form of the plan can take."""
    for where, entry in found.items():
        stage = int(where.partition("/")[0])
        _check(job, stage, entry.layout)
    states: dict[int, SyncState] = {}
    fills: dict[str, Boxed] = {}
    for index in job.parts.stages:
        where = f"{index}/{job.parts.rank}"
        values = found[where].values if where in found else {}
        state = {key: decode(value) for key, value in values.items()}
        prefix = f"sync/{where}/"
        for name, tensor in stored.items() if where in found else ():
            if name.startswith(prefix):
                x = torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype), device=job.device)
                state[name.removeprefix(prefix)] = x
                fills[name] = _boxed(x)
        for name, h in _held(job, index).items():
            for key in [key for key in state if key.startswith(name)]:
                job.optimizer.state[h.tensor][key.removeprefix(name)] = state.pop(key)
        states[index] = state
    return states, fills


def _held(job: "Job", stage: int) -> dict[str, Held]:
    """Beginning of the names of what the optimizer keeps -> what it is of."""
    held = job.parts.stages[stage].sync.held
    return {f"optim/{h.param.fqn}/": h for h in held if h.param.requires_grad and h.tensor.numel()}


def _own_states(job: "Job", stage: int) -> Iterator[tuple[str, Tensor]]:
    """What the optimizer keeps of a stage whose replicas step parameters of their own."""
    for name, h in _held(job, stage).items():
        for key, value in job.optimizer.state.get(h.tensor, {}).items():
            if isinstance(value, Tensor):
                yield f"{name}{key}", value


def _boxed(x: Tensor) -> Boxed:
    shape = tuple(x.shape)
    return Boxed(shape, tuple((piece, x) for piece in pieces(whole_runs(shape))))


def _layout(stage: Stage) -> str:
    """What two plans have in common where a form can go on from what it kept."""
    settings = sorted(stage.sync.settings.items()) if stage.sync else []
    own = "".join(f", {path}: {what}" for path, what in sorted(stage.by_parameter.items()))
    mesh = {axis: size for axis, size in sorted(stage.mesh.items()) if size > 1}
    return (
        f"{stage.sync_form} {settings} of {stage.first} to {stage.last}, zero {stage.zero}{own}, "
        f"{mesh} on ranks {list(stage.devices)}"
    )


def _check(job: "Job", stage: int, layout: str) -> None:
    stages = job.plan.stages
    own = _layout(stages[stage]) if stage < len(stages) else f"{len(stages)} stages"
    if own != layout:
        raise PlanError(
            f"the checkpoint has what a form of synchronisation kept between steps ({layout}), and "
            f"this plan has {own}: load it under a plan that has the same stage, or lose it with "
            "load(..., drop_sync_state=True)"
        )
