"""Ops that know the mesh, against the whole op in float64, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.codegen.attention.dropped import attention
from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded import dropout, sharded
from meshwright.codegen.sharded.statistics import batch_norm
from meshwright.testing.simulated import simulate

F64 = torch.float64


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=F64, generator=generator)


def rows(whole: Tensor, sizes: tuple[int, ...], rank: int) -> Tensor:
    return torch.split_with_sizes(whole, sizes)[rank].clone().requires_grad_()


def span(comm: Comm, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Where the rank's rows begin, and how many they are."""
    rank = comm.coordinates["tp"]
    return sum(sizes[:rank]), sizes[rank]


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    (y * random(*y.shape)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("sizes", [(4, 4), (3, 3, 2), (7, 1)])
@pytest.mark.parametrize("padding", [-1, 0, 5])
def test_embedding_rows(sizes: tuple[int, ...], padding: int) -> None:
    indices = torch.tensor([[0, 5, 7], [2, 2, 5]])
    weight = random(8, 3)
    expected = gradient(lambda w: torch.embedding(w, indices, padding), weight)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = rows(weight, sizes, comm.coordinates["tp"])
        part = sharded.embedding(comm, mine, indices, ("tp",), *span(comm, sizes), padding)
        whole = comm.all_reduce(part, "tp", "identity")
        (whole * random(*whole.shape)).sum().backward()
        assert mine.grad is not None
        return whole.detach(), mine.grad

    results = simulate({"tp": len(sizes)}, body)
    for whole, _ in results:
        torch.testing.assert_close(whole, expected[0])
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), expected[1])


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("scaled", [False, True])
def test_embedding_bag_rows(mode: int, scaled: bool) -> None:
    if mode and scaled:
        return  # torch has per-sample weights for sums only
    indices, offsets = torch.tensor([0, 5, 7, 2, 2, 5]), torch.tensor([0, 2, 2])
    weight, sizes = random(8, 3), (5, 3)
    scale = random(6) if scaled else None
    expected = gradient(
        lambda w: torch.embedding_bag(w, indices, offsets, False, mode, False, scale)[0], weight
    )

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = rows(weight, sizes, comm.coordinates["tp"])
        part = sharded.embedding_bag(
            comm, mine, indices, offsets + 3, mode, scale, False, None, ("tp",), *span(comm, sizes)
        )[0]
        whole = comm.all_reduce(part, "tp", "identity")
        (whole * random(*whole.shape)).sum().backward()
        assert mine.grad is not None
        return whole.detach(), mine.grad

    results = simulate({"tp": 2}, body)
    torch.testing.assert_close(results[0][0], expected[0])
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), expected[1])


@pytest.mark.parametrize("sizes", [(4, 4), (3, 3, 2)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_classes(sizes: tuple[int, ...], weighted: bool, smoothing: float) -> None:
    logits, target = random(5, 8) * 50, torch.tensor([0, 7, -100, 3, 4])
    weight = random(8).abs() if weighted else None
    expected = gradient(
        lambda x: functional.cross_entropy(
            x, target, weight, reduction="sum", label_smoothing=smoothing
        ),
        logits,
    )

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        mine = rows(logits.T, sizes, comm.coordinates["tp"])
        loss = sharded.cross_entropy_sum(
            comm,
            mine.T,
            target,
            ("tp",),
            *span(comm, sizes),
            sum(sizes),
            weight,
            label_smoothing=smoothing,
        )
        (loss * random()).backward()
        assert mine.grad is not None
        return loss.detach(), mine.grad

    results = simulate({"tp": len(sizes)}, body)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(torch.cat([grad for _, grad in results]).T, expected[1])


@pytest.mark.parametrize("channels", [(), (2, 2), (3, 1)])
def test_batch_norm_is_synchronised(channels: tuple[int, ...]) -> None:
    shares = (3, 1) if not channels else (4,)
    x, scale, shift = random(4, 4, 3), random(4), random(4)
    running = torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64)
    expected = gradient(
        lambda v: torch.batch_norm(v, scale, shift, *running, True, 0.1, 1e-5, False), x
    )

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        dp, tp = comm.coordinates["dp"], comm.coordinates["tp"]
        mine = rows(x, shares, dp).detach()
        parts = [value.split(channels)[tp] if channels else value for value in (scale, shift)]
        mine = (mine.split(channels, 1)[tp] if channels else mine).clone().requires_grad_()
        own = torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64)
        y = batch_norm(
            comm, mine, *parts, *own, 0.1, 1e-5, axes=("dp",), count=12,
            channel_axis="tp" if channels else "", channels=channels,
        )  # fmt: skip
        factor = rows(random(4, 4, 3), shares, dp)
        (y * (factor.split(channels, 1)[tp] if channels else factor)).sum().backward()
        torch.testing.assert_close(own, running)
        assert mine.grad is not None
        return y.detach(), mine.grad, own[0]

    results = simulate({"dp": len(shares), "tp": max(len(channels), 1)}, body)
    for i in range(2):
        together = torch.cat([result[i] for result in results], 1 if channels else 0)
        torch.testing.assert_close(together, expected[i])


def test_buffers_change_once() -> None:
    comm = Comm({}, {}, {})
    buffer = torch.zeros(3)
    assert sharded.update(comm, buffer) is buffer
    comm.recomputing = True
    assert sharded.update(comm, buffer) is not buffer
    comm.recomputing, comm.training = False, False
    assert sharded.update(comm, buffer) is not buffer


def _dropped(comm: Comm, x: Tensor, start: int, per_sample: int, **part: Any) -> Tensor:
    comm.block, comm.step, comm.sample_offset = "h.0", 3, start
    return dropout.dropout(comm, x, 0.5, "drop/dropout", per_sample, **part)


def test_dropout_masks_belong_to_samples() -> None:
    comm = Comm({}, {"tp": 1}, {"tp": 0}, seed=7)
    x = torch.ones(8, 100)
    whole = _dropped(comm, x, 0, 200)
    halves = [_dropped(comm, x[:4], 0, 200), _dropped(comm, x[4:], 2, 200)]
    assert torch.equal(whole, torch.cat(halves))
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < (whole > 0).float().mean() < 0.6
    assert not torch.equal(whole[:2], whole[2:4]), "samples differ"
    assert torch.equal(whole, _dropped(comm, x, 0, 200)), "the same again when recomputed"
    comm.training = False
    assert _dropped(comm, x, 0, 200) is x


def test_a_part_of_a_sample_drops_its_part() -> None:
    comm, x = Comm({}, {}, {}), torch.ones(4, 50)
    whole = _dropped(comm, x, 1, 50)
    parts = [
        _dropped(comm, x[:, at : at + 25], 1, 50, first=at, sizes=(-1, 25), strides=(50, 1))
        for at in (0, 25)
    ]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_dropout_of_all_and_of_nothing() -> None:
    comm, x = Comm({}, {}, {}), torch.ones(4, 50)
    assert dropout.dropout(comm, x, 0.0, "op") is x
    assert not dropout.dropout(comm, x, 1.0, "op").any()
    comm.still = True
    assert torch.equal(dropout.dropout(comm, x, 0.5, "op"), 2 * x)


def test_attention_dropout_belongs_to_samples_and_leaves_the_generator_alone() -> None:
    comm = Comm({}, {"tp": 1}, {"tp": 0})
    q, k, v = (random(4, 2, 5, 3) + i for i in range(3))
    state = torch.get_rng_state()
    whole = attention(comm, q, k, v, "sdpa", dropout_p=0.5, rows=1, per_sample=50)
    comm.sample_offset = 2
    second = attention(comm, q[2:], k[2:], v[2:], "sdpa", dropout_p=0.5, rows=1, per_sample=50)
    assert torch.equal(whole[2:], second)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_random_op_without_a_form_is_seeded() -> None:
    comm = Comm({}, {"tp": 1}, {"tp": 0})
    first, second = (
        sharded.FUNCTIONS["sharded.seeded"](comm, "aten.rand.default", "noise", size=(4,))
        for _ in range(2)
    )
    assert isinstance(first, Tensor) and isinstance(second, Tensor) and torch.equal(first, second)
