"""Cases of buckets that are packed and unpacked, and how far kernels are off."""

import json

import torch
from torch import Tensor

from meshwright.ir import launch
from meshwright.ir.kernels import bucket

RANKS = 3
SHAPES = ((7, 5), (1,), (3, 1000), (2, 3, 4), (0, 6), (1025,))
"""Rows that ranks share unevenly, a single one, one that takes several programs, none at all."""
WHOLE = ((48, 16), (7, 16), (12, 1024), (24,), (8, 8), (4096,))
"""All of whose pieces lie at multiples of 16 bytes, the last one's of one rank but for its end."""
CASES = [
    (source, flat, scale)
    for source, flat in (
        ("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32"),
        ("float32", "bfloat16"), ("bfloat16", "bfloat16"),
    )
    for scale in (1.0, 0.5)
]  # fmt: skip


def _chunks(tensors: list[Tensor]) -> list[int]:
    """By rows, as ZeRO cuts parameters."""
    return [-(-len(x) // RANKS) * (x.numel() // max(len(x), 1)) for x in tensors]


def difference(source: str, flat: str, scale: float) -> float:
    """Of what the operators make from what plain indexing does: how far at most, relative."""
    return max(_difference(shapes, source, flat, scale) for shapes in (SHAPES, WHOLE))


def _difference(shapes: tuple[tuple[int, ...], ...], source: str, flat: str, scale: float) -> float:
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(getattr(torch, source)) for shape in shapes]
    tensors[2] = tensors[2].t().contiguous().t()  # as gradients of weights may lie
    given: list[Tensor | None] = [*tensors]
    given[3] = None
    chunks = _chunks(tensors)
    rows = bucket.table([x.numel() for x in tensors], chunks, RANKS)
    # What lies there before is overwritten, room that nothing fills too.
    made = bucket.pack(given, rows, chunks, RANKS, scale, getattr(torch, flat))
    wanted = torch.zeros(RANKS, sum(chunks), dtype=torch.float64, device="cpu")
    before = 0
    for x, chunk in zip(given, chunks, strict=True):
        values = [] if x is None else x.reshape(-1).double().split(chunk or 1)
        for rank, own in enumerate(values):
            wanted[rank, before : before + len(own)] = own * scale
        before += chunk
    worst = _apart(made, wanted.to(made))
    back = [torch.full(x.shape, 9.0, dtype=x.dtype) for x in tensors]
    full = bucket.packed(tensors, torch.zeros(RANKS, sum(chunks), dtype=made.dtype), chunks)
    bucket.unpack(full, back, rows, chunks)
    for x, y in zip(tensors, back, strict=True):
        worst = max(worst, _apart(y, x.to(made.dtype).to(x.dtype)))
    return worst


def _apart(found: Tensor, wanted: Tensor) -> float:
    """Relative, element by element."""
    far = (found.double() - wanted.double()).abs() / wanted.double().abs().clamp(min=1e-30)
    return far.max().item() if far.numel() else 0.0


def main() -> None:
    """Prints which way was taken and how far each case is off, as JSON."""
    print(json.dumps([launch.way("test", torch.zeros(1)), *(difference(*case) for case in CASES)]))


if __name__ == "__main__":
    main()
