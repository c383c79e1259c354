"""Boxes of a tensor that is split over model axes and, in rows, over dp_shard."""

from itertools import product

import pytest
import torch

from meshwright.forms.flat import chunk_rows
from meshwright.ir.layout.layout import Axis, Layout, Shard
from meshwright.ir.layout.nesting import tensor_runs
from meshwright.runtime.checkpoint.shard_boxes import pieces

SHAPE = (12, 10)
AXES = {"tp_depth": Axis(2), "tp_row": Axis(2), "tp_col": Axis(3)}
LAYOUTS: tuple[Layout, ...] = (
    {},
    {"tp_col": Shard(0, 2, 2)},
    {"tp_row": Shard(1), "tp_col": Shard(0)},
    {"tp_depth": Shard(0, 2), "tp_row": Shard(0), "tp_col": Shard(1)},
    {"tp_depth": Shard(0), "tp_row": Shard(0, 2), "tp_col": Shard(0, 4)},
)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_boxes_of_all_ranks_are_the_tensor(layout: Layout, shards: int) -> None:
    whole = torch.arange(120).view(SHAPE)
    seen = torch.zeros(SHAPE, dtype=torch.int64)
    for at in product(*(range(axis.size) for axis in AXES.values())):
        runs = tensor_runs(SHAPE, layout, AXES, dict(zip(AXES, at, strict=True)))
        height, width = (sum(length for _, length in found) for found in runs)
        local = torch.full((height, width), -1)
        for piece in pieces(runs):
            piece.of_local(local).copy_(piece.of_global(whole))
        assert (local >= 0).all() and torch.equal(local.flatten().sort()[0], local.flatten())
        for shard in range(shards):
            rows = chunk_rows(height, shards, shard)
            for piece in pieces(runs, rows):
                assert torch.equal(piece.of_local(local[rows[0] : rows[1]]), piece.of_global(whole))
                piece.of_global(seen).add_(1)
    copies = 12
    for axis in layout:
        copies //= AXES[axis].size
    assert (seen == copies).all()


def test_a_scalar_is_one_box_of_the_first_shard() -> None:
    assert len(pieces(())) == len(pieces((), (0, 1))) == 1
    assert pieces((), (1, 1)) == ()
