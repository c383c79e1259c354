"""Cases of kernels that read and write the memory of other ranks, and how far they are off."""

import json
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from meshwright.ir.kernels import gather_linear, linear_scatter, reduce_norm

RANKS = (1, 3)
DTYPES = {"float32": 2e-5, "float16": 4e-3}
"""Error against the reference in float64, relative to its largest value. The interpreter multiplies
no bfloat16."""


def _normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def _addresses(tensors: list[Tensor]) -> Tensor:
    return torch.tensor([x.data_ptr() for x in tensors])


def _far(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    scale = max(1.0, wanted.double().abs().max().item()) if wanted.numel() else 1.0
    worst = (found.double() - wanted.double()).abs().max().item() / scale if wanted.numel() else 0.0
    return worst if worst == worst else float("inf")


def _sums(dtype: torch.dtype, ranks: int) -> Iterator[float]:
    """One shot and two, RMSNorm and LayerNorm; rows that ranks do not share evenly, fewer than
    ranks, and a row wider than what is summed at once."""
    for (rows, width), centred in product(((5, 37), (1, 8), (2, 1100)), (False, True)):
        summands = [_normal(dtype, rows, width) for _ in range(ranks)]
        residual, gain = _normal(dtype, rows, width), _normal(dtype, width)
        bias = _normal(dtype, width) if centred else None
        exact = [None if x is None else x.double() for x in (residual, gain, bias)]
        wanted = reduce_norm.reference([x.double() for x in summands], *exact, 1e-5)
        found = []
        for one_shot in (True, False):
            own = [x.clone() for x in summands]
            peers = _addresses(own)
            if not one_shot:
                for rank in range(ranks):
                    reduce_norm.sum_rows(peers, own[rank], rank)
            made = reduce_norm.norm_rows(
                peers, dtype, residual, gain, bias, 1e-5, one_shot=one_shot
            )
            assert len(made) == (4 if centred else 3)
            yield from (_far(x, y) for x, y in zip(made[:2], wanted, strict=True))
            yield _far(made[-1], (wanted[0].var(-1, correction=0) if centred else
                                  wanted[0].square().mean(-1)).add(1e-5).rsqrt())  # fmt: skip
            found.append(made)
        # Both ways have the same bits.
        yield from (_far(x, y) for x, y in zip(*found, strict=True))


SHAPES = ((1, 3, 5, 7, True), (2, 4, 20, 130, False), (1, 130, 70, 9, True))
"""Outer, inner (rows of a rank in a run), inner dim, columns, with a bias: tiny, odd, several tiles
of columns, of rows and of the inner dim."""


def _gathered(dtype: torch.dtype, ranks: int) -> Iterator[float]:
    for outer, inner, k, n, biased in SHAPES:
        parts = _normal(dtype, ranks, outer * inner, k)
        weight = _normal(dtype, n, k)
        bias = _normal(dtype, n) if biased else None
        wanted = gather_linear.reference(
            parts.double(), weight.double(), None if bias is None else bias.double(), inner
        )
        signals = torch.full((ranks,), 4, dtype=torch.int32)
        for rank in range(ranks):
            found = gather_linear.product(parts, signals, 3, weight, bias, inner, rank)
            yield _far(found, wanted)


def _scattered(dtype: torch.dtype, ranks: int) -> Iterator[float]:
    for outer, inner, k, n, biased in SHAPES:
        rows = outer * inner
        xs = [_normal(dtype, ranks * rows, k) for _ in range(ranks)]
        weights = [_normal(dtype, n, k) for _ in range(ranks)]
        bias = _normal(dtype, n) if biased else None
        wide = None if bias is None else bias.double() * ranks
        exact = linear_scatter.reference(
            [x.double() for x in xs], [w.double() for w in weights], wide
        )
        wanted = exact.view(outer, ranks, inner, n).transpose(0, 1).reshape(ranks, rows, n)
        slots = [torch.full((ranks, rows, n), float("nan"), dtype=dtype) for _ in range(ranks)]
        signals = [torch.full((ranks,), 6, dtype=torch.int32) for _ in range(ranks)]
        for rank, (x, weight) in enumerate(zip(xs, weights, strict=True)):
            linear_scatter.product(
                x, weight, bias, _addresses(slots), _addresses(signals), 7, inner, rank
            )
        for rank in range(ranks):
            # Every sender has said that its part is there.
            yield 0.0 if signals[rank].tolist() == [7] * ranks else float("inf")
            found = linear_scatter.sum_parts(slots[rank], signals[rank], 7)
            yield _far(found, wanted[rank])


def _by_descriptor(dtype: torch.dtype, ranks: int) -> Iterator[float]:
    """Products as sm_90 has them, of weights that descriptors can read, as they are and transposed;
    what they cannot read goes by addresses."""
    device, gather_linear.device_of = gather_linear.device_of, lambda x: "sm_90"
    try:
        for k, n, read in ((72, 264, 1), (40, 16, 2), (9, 8, 0)):
            parts = _normal(dtype, ranks, 6, k)
            weight = _normal(dtype, k, n).T if read == 2 else _normal(dtype, n, k)
            assert gather_linear.how(weight)["READ"] == (0 if dtype is torch.float32 else read)
            signals = torch.full((ranks,), 4, dtype=torch.int32)
            found = gather_linear.product(parts, signals, 3, weight, None, 3, ranks - 1)
            yield _far(found, gather_linear.reference(parts.double(), weight.double(), None, 3))
    finally:
        gather_linear.device_of = device


CASES = {"reduce_norm": _sums, "gather_linear": _gathered, "linear_scatter": _scattered,
         "by_descriptor": _by_descriptor}  # fmt: skip


def main() -> None:
    """Prints the errors of all cases, as JSON."""
    found = {}
    for (kernel, run), dtype, ranks in product(CASES.items(), DTYPES, RANKS):
        torch.manual_seed(0)
        errors = list(run(getattr(torch, dtype), ranks))
        found[f"{kernel} {dtype} {ranks}"] = errors
    print(json.dumps(found))


if __name__ == "__main__":
    main()
