"""Border transfers against brute force: a global value cut, moved and put together again."""

import pytest
import torch

from meshwright.ir.layout.border import Side, forward_transfers, gradient_transfers, piece_view
from meshwright.ir.layout.layout import RP, Shard

SHARES = [
    ((4,), (4,)),
    ((2, 2), (4,)),
    ((3, 1), (1, 1, 1, 1)),
    ((2, 3), (1, 1, 3)),
    ((1,) * 15, (15,)),
    ((15,), (1,) * 15),
    ((5, 0, 5), (3, 7)),
]
PLACEMENTS = [Shard(0), Shard(1), Shard(1, outer=2), Shard(0, inner=2), Shard(2, outer=3)]


def _side(shares, tp, first):
    return Side(shares, tp, tuple(range(first, first + len(shares) * tp)))


def _whole(placement, samples):
    shape = [2, 3, 5]
    shape[placement.dim] = placement.outer * samples * placement.inner
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def _local(whole, placement, span, samples):
    d, size = placement.dim, whole.shape[placement.dim]
    per_sample = size // placement.outer // samples
    sections = whole.chunk(placement.outer, d)
    start, stop = span
    return torch.cat(
        [s.narrow(d, start * per_sample, (stop - start) * per_sample) for s in sections], d
    )


def _cut(part, placement, samples, span):
    view, dim, start, length = piece_view(tuple(part.shape), placement, samples, span)
    return part.view(view).narrow(dim, start, length)


def _parts(whole, placement, side, samples):
    return {
        side.rank(dp, tp): (share, _local(whole, placement, span, samples).contiguous())
        for dp, (share, span) in enumerate(zip(side.shares, side.spans(), strict=True))
        for tp in range(side.replica)
    }


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("tps", [(1, 1), (1, 2), (4, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_sharded_values_and_gradients_arrive(shares, tps, placement):
    samples = sum(shares[0])
    source, target = _side(shares[0], tps[0], 0), _side(shares[1], tps[1], 100)
    whole = _whole(placement, samples)
    sides = _parts(whole, placement, source, samples), _parts(whole, placement, target, samples)
    for transfers, (held, wanted) in (
        (forward_transfers(placement, source, target), sides),
        (gradient_transfers(placement, source, target), sides[::-1]),
    ):
        got = {rank: torch.full_like(part, -1) for rank, (_, part) in wanted.items()}
        for t in transfers:
            piece = _cut(held[t.source][1], placement, held[t.source][0], t.source_span)
            _cut(got[t.target], placement, wanted[t.target][0], t.target_span).copy_(piece)
        for rank, (_, part) in wanted.items():
            assert torch.equal(got[rank], part)


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_replicated_values_reach_all_and_their_gradients_are_summed(shares):
    source, target = _side(shares[0], 2, 0), _side(shares[1], 3, 100)
    reached = [t.target for t in forward_transfers(RP, source, target)]
    assert sorted(reached) == sorted(target.devices)
    back = gradient_transfers(RP, source, target)
    for tp in range(source.replica):  # each summand of the target's dp reaches each tp rank once
        ranks = {source.rank(dp, tp) for dp in range(len(source.shares))}
        arrived = [(t.source - 100) // target.replica for t in back if t.target in ranks]
        assert sorted(arrived) == list(range(len(target.shares)))


def test_fifteen_to_one_moves_each_sample_once():
    many, one = _side((1,) * 15, 1, 0), _side((15,), 1, 15)
    moved = forward_transfers(Shard(0), many, one)
    assert [t.target_span for t in moved] == [(i, i + 1) for i in range(15)]
    assert [(t.source, t.target) for t in gradient_transfers(Shard(0), many, one)] == [
        (15, i) for i in range(15)
    ]
