"""The original module's state dict, whole, from the parts that ranks hold."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from meshwright.ir.comm.by_store import of_all
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Kind
from meshwright.runtime.job.weights import model_tensors
from meshwright.runtime.job.whole import whole_buffers, whole_parameters
from meshwright.runtime.step.finite import check_state

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job


def full_state(job: "Job", *, everyone: bool = False) -> dict[str, Tensor]:
    """Module path -> whole tensor on the CPU, for all parameters and buffers, on rank 0.

    Others get an empty dict, unless it is for `everyone`. One tensor at a time is put together.
    Tied parameters come under their first path. What the training step never reads is not in it.
    """
    found = {}
    for values in (whole_parameters, whole_buffers):
        for fqn, whole in values(job, everyone=everyone):
            if everyone or job.parts.rank == 0:
                found[fqn] = whole.cpu()
    return found


def persistent(model: nn.Module) -> tuple[str, ...]:
    """The names of `model.state_dict()`, tied ones under each of theirs."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        own = [name for name, p in module._parameters.items() if p is not None]
        own += [
            name for name, b in module._buffers.items()
            if b is not None and name not in module._non_persistent_buffers_set
        ]  # fmt: skip
        found += [f"{path}.{name}" if path else name for name in own]
    return tuple(found)


def check_writable(job: "Job", what: str, absent: Iterable[str] = ()) -> None:
    """Every rank calls it before something is written.

    PlanError names what has no values (`absent`: more of them), NonFinite what is not finite.
    """
    mine = frozenset((*job.missing, *absent))
    if names := sorted(frozenset[str]().union(*of_all(mine))):
        raise PlanError(
            f"{what} is not written: {len(names)} tensors have no values, such as {names[0]!r}; "
            "the model was on the meta device: give them values before compile(), or job.load() a "
            "checkpoint that has them"
        ).on_all_ranks()
    check_state(job, what)


def export(job: "Job", folder: Path) -> Path | None:
    """Writes `model.safetensors` (on rank 0): the state dict of the user's module.

    Tied names are written once, as Hugging Face does; the header maps the others to the first, as
    `safetensors.torch.load_model` expects. What training never read is as the user's module has it,
    or a checkpoint that was loaded; PlanError names what has values nowhere.
    """
    names = persistent(job.model)
    check_writable(job, "the export", job.unread.absent(names) if job.parts.rank == 0 else ())
    content = full_state(job)
    if job.parts.rank != 0:
        return None
    content |= {n: x.cpu().clone() for n, x in job.unread.values.items()}
    written, aliases = _once(job.model, names, content)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(written, path, metadata={"format": "pt", **aliases})
    return path


def sync_to(job: "Job", model: nn.Module) -> None:
    """Copies the job's parameters and buffers into a module; every rank has one and calls it."""
    tensors = model_tensors(model)
    wanted = {
        t.fqn: t for t in job.graph.tensors.values()
        if t.name in job.parts.owners and t.kind in (Kind.PARAMETER, Kind.BUFFER)
    }  # fmt: skip
    problem = ""
    if absent := sorted(wanted.keys() - tensors.keys()):
        problem = f"it has no {absent[0]!r}"
    elif meta := [name for name in wanted if tensors[name].is_meta]:
        problem = f"{meta[0]!r} is on the meta device and cannot hold values: use job.export"
    else:
        other = [n for n, t in wanted.items() if tuple(tensors[n].shape) != t.shape]
        problem = f"{other[0]!r} has another shape than in the job" if other else ""
    found = {rank: text for rank, text in enumerate(of_all(problem)) if text}
    if found:
        rank, text = next(iter(found.items()))
        text = f"the module cannot take the job's weights: {text} (rank {rank})"
        raise PlanError(text).on_all_ranks()
    with torch.no_grad():
        for values in (whole_parameters, whole_buffers):
            for fqn, whole in values(job, everyone=True):
                tensors[fqn].copy_(whole)
        for name, value in job.unread.values.items():
            if name in tensors and not tensors[name].is_meta:
                tensors[name].copy_(value)


def _once(
    model: nn.Module, names: Sequence[str], content: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is written, and further names of the same tensors."""
    tensors = model_tensors(model)
    known = {id(tensors[name]): name for name in reversed([*content]) if name in tensors}
    written: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name in names:
        first = known[id(tensors[name])]
        if first == name or first not in names:
            written[name] = content[first].contiguous()
        else:
            aliases[name] = first
    return written, aliases
