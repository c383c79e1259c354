"""Ops that must know the mesh: what generated code calls as `sharded.<name>(comm, ...)`."""

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.codegen.attention.dropped import attention
from meshwright.codegen.attention.ring import ring_attention
from meshwright.codegen.attention.windowed import windowed_attention
from meshwright.codegen.collectives import together
from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.collectives.products import columns, rows
from meshwright.codegen.sharded.dropout import dropout, gelu_dropout, seeded
from meshwright.codegen.sharded.halo import windowed
from meshwright.codegen.sharded.noise import drop, each_sample, noise, random_slope
from meshwright.codegen.sharded.routing import (
    experts_here,
    find_route,
    routed_experts,
    rows_home,
    rows_out,
)
from meshwright.codegen.sharded.statistics import batch_norm
from meshwright.codegen.sharded.vocabulary import cross_entropy_total, linear_cross_entropy
from meshwright.ir.graph.expert_form import of_some
from meshwright.ir.kernels import load


def owned(index: Tensor, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Index into this rank's part (0 where it is another's), and where it is another's."""
    local = index - start
    foreign = (local < 0) | (local >= size)
    return local.masked_fill(foreign, 0), foreign


def summed(comm: Comm, x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """The sum over the axes, whose gradient every rank has."""
    for axis in axes:
        x = comm.all_reduce(x, axis, "identity")
    return x


def embedding(
    comm: Comm,
    weight: Tensor,
    indices: Tensor,
    axes: tuple[str, ...],
    start: int,
    size: int,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Vocabulary-parallel lookup: rows that other ranks own are zeros, the sum is the lookup."""
    local, foreign = owned(indices, start, size)
    padding = padding_idx - start if 0 <= padding_idx - start < size else -1
    rows = torch.embedding(weight, local, padding, scale_grad_by_freq, sparse)
    return rows.masked_fill(foreign.unsqueeze(-1), 0.0)


def places(comm: Comm, indices: Tensor, path: str) -> Tensor:
    """Where rows of a table stand among those that are here."""
    here = comm.rows_here(path)
    return indices if here is None else here.places(indices)


def looked_up(
    comm: Comm,
    weight: Tensor,
    indices: Tensor,
    path: str,
    padding_idx: int = -1,
) -> Tensor:
    """Lookup in a table of which only some rows are here."""
    found = torch.embedding(weight, places(comm, indices, path))
    if padding_idx < 0:
        return found
    return torch.where((indices == padding_idx).unsqueeze(-1), found.detach(), found)


def bags_looked_up(
    comm: Comm,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    path: str,
    mode: int = 0,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bags of this rank's samples, from a table of which only some rows are here."""
    here, padding_idx = comm.rows_here(path), None if padding_idx == -1 else padding_idx
    if here is not None and padding_idx is not None:
        rows = here.rows
        place = int(torch.searchsorted(rows, padding_idx))
        is_here = place < len(rows) and int(rows[place]) == padding_idx
        padding_idx = place if is_here else None
    return embedding_bag(
        comm, weight, places(comm, indices, path), offsets, mode, per_sample_weights,
        include_last_offset, padding_idx,
    )  # fmt: skip


def update(comm: Comm, buffer: Tensor) -> Tensor:
    """The buffer that an op changes in place; a copy when the change must not last."""
    return buffer if comm.training and not comm.recomputing else buffer.clone()


def cross_entropy_sum(
    comm: Comm,
    logits: Tensor,
    target: Tensor,
    axes: tuple[str, ...],
    start: int,
    size: int,
    classes: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Summed cross-entropy of logits [N, classes] whose classes are split over the axes.

    The result is the whole sum on every rank, and each rank gets the gradient of its own classes:
    Megatron-LM's vocabulary-parallel cross-entropy, plus class weights and label smoothing.
    """
    ignored = target == ignore_index
    local, foreign = owned(target.masked_fill(ignored, 0), start, size)
    largest = logits.detach().amax(1)
    for axis in axes:
        largest = comm.max_over(largest, axis)
    shifted = logits - largest.unsqueeze(1)
    own = shifted.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(foreign, 0.0)
    sums = torch.stack([shifted.exp().sum(1), own])
    total, picked = summed(comm, sums, axes).unbind(0)
    log_total = total.log()
    loss = log_total - picked
    if weight is not None:
        loss = loss * weight[target.masked_fill(ignored, 0)]
    loss = loss.masked_fill(ignored, 0.0).sum()
    if not label_smoothing:
        return loss
    scale = logits.new_ones(classes) if weight is None else weight
    smooth = log_total * scale.sum() - summed(comm, shifted @ scale[start : start + size], axes)
    smooth = smooth.masked_fill(ignored, 0.0).sum()
    return loss * (1 - label_smoothing) + smooth * (label_smoothing / classes)


def embedding_bag(
    comm: Comm,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int = 0,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    axes: tuple[str, ...] = (),
    start: int = 0,
    size: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bags of this rank's samples; rows split over `axes` if there are any.

    Offsets count from the rank's first index. Foreign rows weigh nothing, and a mean is divided by
    the number of all rows of the bag, so that the sum over the axes is the result.
    """
    offsets = offsets - offsets[:1]
    if not axes:
        plain: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.aten.embedding_bag.padding_idx(
            weight, indices, offsets, False, mode, False, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
        return plain
    local, foreign = owned(indices, start, size)
    scale = per_sample_weights
    if scale is None:
        scale = torch.ones(indices.shape, dtype=weight.dtype, device=weight.device)
    bags: tuple[Tensor, Tensor, Tensor, Tensor] = torch.embedding_bag(
        weight, local, offsets, False, 0, False, scale.masked_fill(foreign, 0.0),
        include_last_offset,
    )  # fmt: skip
    if mode == 0:
        return bags
    last = offsets.new_tensor([] if include_last_offset else [indices.numel()])
    count = torch.cat([offsets, last]).diff().clamp(min=1)
    return (bags[0] / count.unsqueeze(1), *bags[1:])


def index(
    comm: Comm, self: Tensor, indices: tuple[Tensor | None, ...], starts: tuple[int, ...],
    per_sample: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """Indexing along dims that are split as the index is: positions count from the rank's first,
    which is `starts`, or `per_sample` elements for each sample before."""
    first = [
        start + comm.sample_offset * step for start, step in zip(starts, per_sample, strict=True)
    ]
    local = [i if i is None else i - at for i, at in zip(indices, first, strict=True)]
    found: Tensor = torch.ops.aten.index.Tensor(self, local)
    return found


def experts(
    comm: Comm,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    start: int,
    **weights: Tensor | str | None,
) -> Tensor:
    """The rank's experts: an index outside them adds nothing, so the sum over the axes is all."""
    local, form = top_k_index - start, of_some(weights.get("form"))
    given = {**weights, "form": form}
    found: Tensor = torch.ops.meshwright.experts(hidden, local, top_k_weights, **given)
    return found


def kernel_of(name: str) -> Callable[..., object]:
    """Find what emitted code calls of a kernel in a user's file; PlanError if there is none."""
    found: Callable[..., object] = load(name).run
    return found


def tapped(
    comm: Comm, made: Tensor, read: Tensor, index: int, window: tuple[tuple[int, ...], ...]
) -> Tensor:
    """What a layer made, as it is; whoever has taps gets to know what it read, and the gradient."""
    return comm.tap(index, made, read, window)


FUNCTIONS: dict[str, Callable[..., object]] = {
    "sharded.embedding": embedding,
    "sharded.embedding_bag": embedding_bag,
    "sharded.looked_up": looked_up,
    "sharded.bags_looked_up": bags_looked_up,
    "sharded.cross_entropy_sum": cross_entropy_sum,
    "sharded.cross_entropy_total": cross_entropy_total,
    "sharded.linear_cross_entropy": linear_cross_entropy,
    "sharded.batch_norm": batch_norm,
    "sharded.index": index,
    "sharded.experts": experts,
    "sharded.routed_experts": routed_experts,
    "sharded.find_route": find_route,
    "sharded.rows_out": rows_out,
    "sharded.experts_here": experts_here,
    "sharded.rows_home": rows_home,
    "sharded.ring_attention": ring_attention,
    "sharded.windowed_attention": windowed_attention,
    "sharded.windowed": windowed,
    "sharded.dropout": dropout,
    "sharded.gelu_dropout": gelu_dropout,
    "sharded.attention": attention,
    "sharded.seeded": seeded,
    "sharded.noise": noise,
    "sharded.each_sample": each_sample,
    "sharded.drop": drop,
    "sharded.random_slope": random_slope,
    "sharded.update": update,
    "sharded.columns": columns,
    "sharded.rows": rows,
    "sharded.tapped": tapped,
    **together.FUNCTIONS,
}
"""Form target -> function."""
