"""Between whole tensors and what the ranks store: for tests, for loading and for checking."""

import torch
from torch import Tensor

from meshwright.ir.layout.layout import Axis, Placement, Shard
from meshwright.ir.layout.nesting import Runs, dim_runs


def held(whole: Tensor, runs: tuple[Runs, ...]) -> Tensor:
    """What a rank with these elements of each dim stores; the tensor itself if all of it."""
    for dim, found in enumerate(runs):
        if found != ((0, whole.shape[dim]),):
            parts = [whole.narrow(dim, start, length) for start, length in found]
            whole = torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
    return whole


def part(whole: Tensor, placement: Placement, axis: Axis, coordinate: int) -> Tensor:
    """What the rank at `coordinate` of a single axis stores of a whole tensor."""
    if not isinstance(placement, Shard):
        return whole
    runs: list[Runs] = [((0, size),) for size in whole.shape]
    split = {"": (placement, axis)}
    runs[placement.dim] = dim_runs(whole.shape[placement.dim], split, {"": coordinate})
    return held(whole, tuple(runs))
