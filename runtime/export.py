"""The original module's state dict, whole, from the parts that ranks hold."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from meshwright.ir.graph import Kind
from meshwright.runtime.gradsync.base import Held
from meshwright.runtime.pieces import pieces

if TYPE_CHECKING:
    from meshwright.runtime.job import Job


def full_state(job: "Job") -> dict[str, Tensor]:
    """Module path -> whole tensor on the CPU, for all parameters and buffers, on rank 0.

    Others get an empty dict. One tensor at a time is put together. Tied parameters come under their
    first path. What the training step never reads is not in it.
    """
    parts = job.parts
    counted: dict[str, list[Held]] = {}
    for h in parts.counted:
        counted.setdefault(h.param.name, []).append(h)
    found = {}
    for tensor in job.graph.tensors.values():
        if tensor.kind not in (Kind.PARAMETER, Kind.BUFFER) or tensor.name not in parts.owners:
            continue
        whole = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype), device=job.device)
        if tensor.kind is Kind.PARAMETER:
            for h in counted.get(tensor.name, []):
                for piece in pieces(h.param.runs, h.rows):
                    piece.of_global(whole).copy_(piece.of_local(h.tensor.detach()))
        elif parts.owners[tensor.name] == parts.rank:
            whole.copy_(parts.any_tensor(tensor.name))
        summed = _sum_to_first(whole, job.plan.world_size)
        if parts.rank == 0:
            found[tensor.fqn] = summed.cpu()
    return found


def _sum_to_first(x: Tensor, world_size: int) -> Tensor:
    """The sum over ranks, on rank 0; each element is nonzero on one rank only."""
    if world_size == 1:
        return x
    sendable = x.to(torch.uint8) if x.dtype is torch.bool else x
    dist.reduce(sendable, dst=0)
    return sendable.to(x.dtype)


def export(job: "Job", folder: Path) -> Path | None:
    """Writes `model.safetensors` (on rank 0): the state dict of the user's module.

    Tied names are written once, as Hugging Face does; the header maps the others to the first, as
    `safetensors.torch.load_model` expects. What training never read comes from the user's module.
    """
    state = full_state(job)
    if job.parts.rank != 0:
        return None
    own = job.model.state_dict()
    first = {name: names[0] for names in job.graph.tied for name in names}
    content = {}
    aliases = {}
    for name, tensor in own.items():
        if first.get(name, name) != name:
            aliases[name] = first[name]
        elif name in state:
            content[name] = state[name].contiguous()
        elif not tensor.is_meta:
            content[name] = tensor.detach().cpu().clone()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(content, path, metadata={"format": "pt", **aliases})
    return path
