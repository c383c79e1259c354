"""Numbers of ranks' parts are those of the whole batch, however it is split."""

import itertools

import pytest
import torch
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.ir.layout import numbering as module
from meshwright.ir.layout.layout import Axis, R, Shard
from meshwright.ir.layout.nesting import nests, tensor_runs
from meshwright.ir.layout.numbering import Numbering, numbering
from meshwright.ir.random.strided import filled, span

DP, EVEN = Axis(2, (3, 1), 4), Axis(2, (4, 2), 6)
TWO, THREE = Axis(2), Axis(3)
S = Shard


def _whole(shape, batch, axis) -> Tensor:
    """Number of each element of the batch, by moving dims about."""
    count = torch.Size(shape).numel()
    if not isinstance(batch, Shard):
        return torch.arange(count).view(shape)
    dim, outer = batch.dim, batch.outer
    samples = axis.whole or shape[dim] // outer
    sizes = (*shape[:dim], outer, shape[dim] // outer // samples, *shape[dim + 1 :])
    return torch.arange(count).view(samples, *sizes).movedim(0, dim + 1).reshape(shape)


def _numbers(found: Numbering, first: int, count: int) -> Tensor:
    made = torch.tensor(found.first + first * found.per_sample)
    sizes = filled(found.sizes, count)
    for size, stride in zip(sizes, found.strides, strict=True):
        made = made.unsqueeze(-1) + torch.arange(size) * stride
    assert int(made.max() - made.min()) + 1 == span(sizes, found.strides)
    return made


@pytest.mark.parametrize(
    ("shape", "layout", "axes"),
    [
        ((8, 6, 4), {"dp": S(0)}, {"dp": Axis(2, (3, 1), 8)}),
        ((8, 6), {"dp": S(0)}, {"dp": TWO}),
        ((4,), {"dp": S(0)}, {"dp": DP}),
        ((4, 1, 1), {"dp": S(0)}, {"dp": DP}),
        ((), {}, {"dp": DP}),
        ((4, 6, 8), {"dp": S(0), "tp": S(2)}, {"dp": DP, "tp": TWO}),
        ((4, 6, 8), {"dp": S(0), "tp": S(1)}, {"dp": DP, "tp": THREE}),
        ((4, 6, 9), {"dp": S(0), "tp": S(2)}, {"dp": DP, "tp": TWO}),
        ((4, 6, 24), {"dp": S(0), "tp": S(2, 3)}, {"dp": DP, "tp": TWO}),
        ((4, 6, 24), {"dp": S(0), "tp": S(2, 3, 2)}, {"dp": DP, "tp": THREE}),
        ((24, 5), {"dp": S(0, 2)}, {"dp": DP}),
        ((5, 24), {"dp": S(1, 2)}, {"dp": DP}),
        ((24, 5), {"dp": S(0), "tp": S(0, 4)}, {"dp": DP, "tp": TWO}),
        ((48, 5), {"dp": S(0), "tp": S(0, 8)}, {"dp": DP, "tp": TWO}),
        ((48, 5), {"dp": S(0, 2), "tp": S(0)}, {"dp": DP, "tp": TWO}),
        ((48, 10), {"dp": S(0, 2), "tp": S(1)}, {"dp": DP, "tp": TWO}),
        ((4, 8, 16), {"dp": S(0), "r": S(2), "c": S(2, 2)}, {"dp": DP, "r": TWO, "c": TWO}),
        ((4, 8, 32), {"r": S(2, 2), "c": S(2, 8), "s": S(1)}, {"r": TWO, "c": TWO, "s": THREE}),
        ((4, 8), {"dp": R, "tp": S(1, 2)}, {"dp": DP, "tp": TWO}),
        ((6, 8), {"dp": S(0), "ep": S(0)}, {"dp": EVEN, "ep": TWO}),
        ((5, 24), {"dp": S(1, 2), "ep": S(1, 2)}, {"dp": EVEN, "ep": TWO}),
        ((24, 5), {"dp": S(0), "cp": S(0, 6), "ep": S(0)}, {"dp": EVEN, "cp": TWO, "ep": TWO}),
    ],
)
def test_all_ranks_number_alike(shape, layout, axes):
    assert nests(shape, layout, axes)
    batch = layout.get("dp")
    whole = _whole(shape, batch, axes.get("dp"))
    for place in itertools.product(*(range(axis.size) for axis in axes.values())):
        coordinates = dict(zip(axes, place, strict=True))
        part, first = whole, 0
        for dim, runs in enumerate(tensor_runs(shape, layout, axes, coordinates)):
            part = torch.cat([part.narrow(dim, *run) for run in runs], dim)
        if isinstance(batch, Shard):
            samples = axes["dp"].whole or shape[0]
            first = axes["dp"].span(samples, coordinates["dp"])[0]
        found = numbering(shape, layout, axes, coordinates)
        assert torch.equal(_numbers(found, first, part.numel()).reshape(part.shape), part), found


def test_what_lies_in_order_says_no_more():
    found = numbering((4, 6, 8), {"dp": S(0)}, {"dp": DP, "tp": TWO}, {"dp": 1, "tp": 0})
    assert found == Numbering(0, (-1,), (1,), 48)


def test_parts_at_no_equal_distances_are_refused():
    with pytest.raises(PlanError, match=r"begin at \[0, 1, 5\], not at equal distances"):
        module._strided([0, 1, 5], 1)
