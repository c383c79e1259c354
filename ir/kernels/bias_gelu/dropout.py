"""GELU of a sum with a bias, and dropout of it, in one pass; nothing is kept but what came in.

Each sample has a seed, from which both directions draw its mask: by torch the numbers of a
generator that starts from it, as `masks` does for dropout alone; by Triton Philox's, counted by the
place of an element in its sample. Masks depend on which way it is, but not on how a batch is laid
out.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.kernels.bias_gelu.share import kind, share_of
from meshwright.ir.launch import (
    TAKEN,
    Build,
    block,
    held_dtype,
    jit,
    programs,
    tl,
    warps,
    way,
    wide,
)


def masks(
    x: Tensor, p: float, seeds: Sequence[int], dim: int, outer: int, per_sample: int
) -> Tensor:
    """Which elements of x are kept, whose dim `dim` holds, in `outer` sections, `per_sample`
    elements of each sample; -1: all of x is one sample's."""
    generator = torch.Generator(x.device)

    def mask(slab: tuple[int, ...], seed: int) -> Tensor:
        generator.manual_seed(seed)
        kept = torch.empty(slab, dtype=torch.bool, device=x.device)
        return kept.bernoulli_(1 - p, generator=generator)

    shape = tuple(x.shape)
    if dim < 0:
        return mask(shape, seeds[0])
    slab = (*shape[:dim], outer, per_sample, *shape[dim + 1 :])
    return torch.stack([mask(slab, seed) for seed in seeds], dim + 1).view(shape)


def reference(
    x: Tensor, bias: Tensor, tanh: bool, p: float, seeds: Sequence[int], dim: int, outer: int,
    per_sample: int,
) -> Tensor:  # fmt: skip
    """x: [..., width], bias: [width]."""
    held = held_dtype(x.dtype)
    made = torch.nn.functional.gelu(x.to(held) + bias.to(held), approximate=kind(tanh))
    kept = masks(x, p, seeds, dim, outer, per_sample)
    return (made * kept / (1 - p)).to(x.dtype)


@jit
def _kept(
    seeds, row, at, p, width, pieces, outer, count, per_sample, inner, WIDE: tl.constexpr,
):  # fmt: skip
    """What the elements of a row are multiplied by. A row is the place `inner` of a piece of a
    section of a sample: its sample's seed, and its place there, say which are kept."""
    place, m = row // inner, row % inner
    before, piece = place // pieces, place % pieces
    section, within = piece // (count * per_sample), piece % per_sample
    sample = (piece // per_sample) % count
    at_sample = ((before * outer + section) * per_sample + within) * inner + m
    drawn = tl.rand(tl.load(seeds + sample), (at_sample * width + at).to(tl.int32))
    return tl.where(drawn >= p, 1.0 / (1.0 - p), 0.0).to(WIDE)


@jit
def forward_kernel(
    x, bias, out, seeds, p, width, pieces, outer, count, per_sample, inner, BLOCK: tl.constexpr,
    WIDE: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    here = row * width + at
    v = tl.load(x + here, inside, 0.0).to(WIDE) + tl.load(bias + at, inside, 0.0).to(WIDE)
    share, _ = share_of(v, TANH)
    kept = _kept(seeds, row, at, p, width, pieces, outer, count, per_sample, inner, WIDE)
    tl.store(out + here, (v * share * kept).to(out.dtype.element_ty), inside)


@jit
def backward_kernel(
    grad, x, bias, to_x, to_bias, seeds, p, rows, width, pieces, outer, count, per_sample, inner,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """Each program sums the bias's gradient over its rows; the caller sums over programs."""
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    added = tl.load(bias + at, inside, 0.0).to(WIDE)
    summed = tl.zeros([BLOCK], dtype=WIDE)
    for number in range(first, rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        here = row * width + at
        v = tl.load(x + here, inside, 0.0).to(WIDE) + added
        share, slope = share_of(v, TANH)
        kept = _kept(seeds, row, at, p, width, pieces, outer, count, per_sample, inner, WIDE)
        back = tl.load(grad + here, inside, 0.0).to(WIDE) * (share + v * slope) * kept
        summed += tl.where(inside, back, 0.0)
        tl.store(to_x + here, back.to(to_x.dtype.element_ty), inside)
    tl.store(to_bias + tl.cast(first, tl.int64) * width + at, summed, inside)


def _counts(x: Tensor, seeds: Sequence[int], dim: int, outer: int, per_sample: int) -> list[int]:
    """Pieces of the dim of samples, its sections, samples, pieces of each, and rows of a piece."""
    if dim < 0:
        return [1, 1, 1, 1, x.numel() // x.shape[-1]]
    return [x.shape[dim], outer, len(seeds), per_sample, torch.Size(x.shape[dim + 1 : -1]).numel()]


def _way(x: Tensor, dim: int) -> str:
    """By torch too where samples lie along rows."""
    if dim == x.ndim - 1:
        TAKEN["bias_gelu", "samples lie along rows"] += 1
        return "torch"
    return way("bias_gelu", x, x.shape[-1])


@custom_op("meshwright::bias_gelu_dropout", mutates_args=())
def gelu_dropout(
    x: Tensor, bias: Tensor, tanh: bool, p: float, seeds: Sequence[int], dim: int, outer: int,
    per_sample: int,
) -> Tensor:  # fmt: skip
    """As `reference`, for 0 < p < 1."""
    x, width = x.contiguous(), x.shape[-1]
    if _way(x, dim) == "torch":
        return reference(x, bias, tanh, p, seeds, dim, outer, per_sample)
    out = torch.empty_like(x)
    forward_kernel[(x.numel() // width,)](
        x, bias, out, torch.tensor(seeds, device=x.device), p, width,
        *_counts(x, seeds, dim, outer, per_sample), BLOCK=block(width), WIDE=wide(x.dtype),
        TANH=tanh, num_warps=warps(width),
    )  # fmt: skip
    return out


@gelu_dropout.register_fake
def _shapes(x, bias, tanh, p, seeds, dim, outer, per_sample):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("meshwright::bias_gelu_dropout_backward", mutates_args=())
def gelu_dropout_backward(
    grad: Tensor, x: Tensor, bias: Tensor, tanh: bool, p: float, seeds: Sequence[int], dim: int,
    outer: int, per_sample: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the bias, with the masks drawn again."""
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    if _way(x, dim) == "torch":
        held = held_dtype(x.dtype)
        passed = grad.to(held) * masks(x, p, seeds, dim, outer, per_sample) / (1 - p)
        total = x.to(held) + bias.to(held)
        back = torch.ops.aten.gelu_backward(passed, total, approximate=kind(tanh))
        return back.to(x.dtype), back.reshape(rows, width).sum(0).to(bias.dtype)
    to_x, count = torch.empty_like(x), programs(x, rows)
    partial = x.new_empty(count, width, dtype=held_dtype(x.dtype))
    backward_kernel[(count,)](
        grad, x, bias, to_x, partial, torch.tensor(seeds, device=x.device), p, rows, width,
        *_counts(x, seeds, dim, outer, per_sample), BLOCK=block(width), WIDE=wide(x.dtype),
        TANH=tanh, num_warps=warps(width),
    )  # fmt: skip
    return to_x, partial.sum(0).to(bias.dtype)


@gelu_dropout_backward.register_fake
def _backward_shapes(grad, x, bias, tanh, p, seeds, dim, outer, per_sample):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(bias)


def _save(ctx, inputs, output) -> None:
    x, bias, *ctx.others = inputs
    ctx.save_for_backward(x, bias)


def _differentiate(ctx, grad):
    return *gelu_dropout_backward(grad, *ctx.saved_tensors, *ctx.others), *[None] * 6


gelu_dropout.register_autograd(_differentiate, setup_context=_save)


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16."""
    pointer = f"*{element}"
    constants = {"BLOCK": block(width), "WIDE": tl.float32, "TANH": True}
    numbers = ("width", "pieces", "outer", "count", "per_sample", "inner")
    last = {"seeds": "*i64", "p": "fp32", **dict.fromkeys(numbers, "i32")}
    tensors = dict.fromkeys(("x", "bias", "out"), pointer)
    yield Build(forward_kernel, {**tensors, **last}, constants)
    tensors = dict.fromkeys(("grad", "x", "bias", "to_x"), pointer)
    yield Build(backward_kernel, {**tensors, "to_bias": "*fp32", "rows": "i32", **last}, constants)
