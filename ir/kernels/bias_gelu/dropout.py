"""GELU of a sum with a bias, and dropout of it, in one pass; nothing is kept but what came in.

Both directions draw the numbers that dropout alone draws (`ir.random.dropout`), on every device.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.kernels.bias_gelu.share import kind, share_of
from meshwright.ir.launch import (
    TAKEN,
    Build,
    held_dtype,
    jit,
    programs,
    tl,
    triton,
    way,
    wide,
)
from meshwright.ir.placed.peers import MOST_WIDTH
from meshwright.ir.random.dropout import FACTORS, kept_factors
from meshwright.ir.random.philox import PER_BLOCK, least_kept, told
from meshwright.ir.random.strided import NUMBERS, RowPlaces, filled, row_places

COLUMNS = (2048, 1024, 512)
"""Of a row, that a program may hold at once."""
PER_WARP = 512
"""Elements; a thread makes whole blocks of numbers."""
PER_PROCESSOR = 32
"""Warps of the backward."""
ROWS = 4
"""That a program goes over forward, with one read of the bias."""


def reference(
    x: Tensor, bias: Tensor, tanh: bool, p: float, key: int, first: int, sizes: Sequence[int],
    strides: Sequence[int], held: Tensor | None = None, per_sample: int = 0,
) -> Tensor:  # fmt: skip
    """x: [..., width], bias: [width]."""
    wider = held_dtype(x.dtype)
    made = torch.nn.functional.gelu(x.to(wider) + bias.to(wider), approximate=kind(tanh))
    kept: Tensor = FACTORS(made, p, key, first, sizes, strides, held, per_sample)
    return (made * kept).to(x.dtype)


@partial(jit, varying=("key", "first"))
def forward_kernel(
    x, bias, out, rows, key, first, least, columns, width, middle, inner, outer_step, middle_step,
    inner_step, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, TANH: tl.constexpr,
    WHOLE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Each program has BLOCK of the `columns` of ROWS rows of x; a row of numbers has `width`."""
    key, first = told(key, first)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    added = tl.load(bias + at, at < columns, 0.0).to(WIDE)
    for each in tl.static_range(ROWS):
        row = tl.program_id(0) * ROWS + each
        inside = at < tl.where(row < rows, columns, 0)
        start = row.to(tl.int64) * columns
        v = tl.load(x + start + at, inside, 0.0).to(WIDE) + added
        share, _ = share_of(v, TANH)
        kept = kept_factors(
            key, first, least, start + tl.program_id(1) * BLOCK, width, middle, inner, outer_step,
            middle_step, inner_step, BLOCK, WIDE, WHOLE, FLAT,
        )  # fmt: skip
        tl.store(out + start + at, (v * share * kept).to(out.dtype.element_ty), inside)


@partial(jit, varying=("key", "first"))
def backward_kernel(
    grad, x, bias, to_x, to_bias, rows, key, first, least, columns, width, middle, inner,
    outer_step, middle_step, inner_step, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    TANH: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Each program sums the bias's gradient of its columns over its rows; the caller sums over
    programs."""
    key, first = told(key, first)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    added = tl.load(bias + at, inside, 0.0).to(WIDE)
    summed = tl.zeros([BLOCK], dtype=WIDE)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * columns
        v = tl.load(x + start + at, inside, 0.0).to(WIDE) + added
        share, slope = share_of(v, TANH)
        kept = kept_factors(
            key, first, least, start + tl.program_id(1) * BLOCK, width, middle, inner, outer_step,
            middle_step, inner_step, BLOCK, WIDE, WHOLE, FLAT,
        )  # fmt: skip
        back = tl.load(grad + start + at, inside, 0.0).to(WIDE) * (share + v * slope) * kept
        summed += tl.where(inside, back, 0.0)
        tl.store(to_x + start + at, back.to(to_x.dtype.element_ty), inside)
    to = tl.cast(tl.program_id(0), tl.int64) * columns
    tl.store(to_bias + to + at, summed, inside)


def _places(
    x: Tensor, first: int, sizes: Sequence[int], strides: Sequence[int], per_sample: int
) -> RowPlaces | None:
    """Where a kernel finds the numbers of x; None if torch's operators do it."""
    count = x.numel()
    found = row_places(first, filled(sizes, count), tuple(strides), per_sample) if count else None
    if count and found is None:
        TAKEN["bias_gelu", "its part of the batch has too many dims"] += 1
        return None
    return found if way("bias_gelu", x, x.shape[-1]) == "triton" else None


def _tiles(width: int) -> tuple[int, int]:
    """Columns that a program holds, and into how many such parts a row falls: the widest of those
    that leave the fewest lanes idle."""
    columns = min(COLUMNS, key=lambda each: (triton.cdiv(width, each) * each, -each))
    return columns, int(triton.cdiv(width, columns))


def _constants(x: Tensor, tanh: bool, where: RowPlaces) -> dict[str, object]:
    columns, _ = _tiles(x.shape[-1])
    whole = where.whole and x.shape[-1] % PER_BLOCK == 0
    return {
        "BLOCK": columns, "WIDE": wide(x.dtype), "TANH": tanh, "WHOLE": whole,
        "FLAT": where.flat, "num_warps": columns // PER_WARP,
    }  # fmt: skip


@custom_op("meshwright::bias_gelu_dropout", mutates_args=())
def gelu_dropout(
    x: Tensor, bias: Tensor, tanh: bool, p: float, key: int, first: int, sizes: Sequence[int],
    strides: Sequence[int], held: Tensor | None = None, per_sample: int = 0,
) -> Tensor:  # fmt: skip
    """As `reference`, for 0 < p < 1; where numbers lie as `ir.random.dropout.dropout` says."""
    x, width = x.contiguous(), x.shape[-1]
    where = _places(x, first, sizes, strides, per_sample)
    if where is None:
        return reference(x, bias, tanh, p, key, first, sizes, strides, held, per_sample)
    out = torch.empty_like(x)
    rows = x.numel() // width
    forward_kernel[(triton.cdiv(rows, ROWS), _tiles(width)[1])](
        x, bias, out, rows, key if held is None else held, first, least_kept(p), width,
        *where.numbers, ROWS=ROWS, **_constants(x, tanh, where),
    )  # fmt: skip
    return out


@gelu_dropout.register_fake
def _shapes(x, bias, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("meshwright::bias_gelu_dropout_backward", mutates_args=())
def gelu_dropout_backward(
    grad: Tensor, x: Tensor, bias: Tensor, tanh: bool, p: float, key: int, first: int,
    sizes: Sequence[int], strides: Sequence[int], held: Tensor | None = None, per_sample: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and of the bias, with the numbers drawn again."""
    grad, x, width = grad.contiguous(), x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    where = _places(x, first, sizes, strides, per_sample)
    if where is None:
        wider = held_dtype(x.dtype)
        total = x.to(wider) + bias.to(wider)
        kept = FACTORS(total, p, key, first, sizes, strides, held, per_sample)
        passed = grad.to(wider) * kept
        back = torch.ops.aten.gelu_backward(passed, total, approximate=kind(tanh))
        return back.to(x.dtype), back.reshape(rows, width).sum(0).to(bias.dtype)
    to_x, (columns, parts) = torch.empty_like(x), _tiles(width)
    most = PER_PROCESSOR // (columns // PER_WARP) * programs(x, rows, MOST_WIDTH)
    count = min(rows, triton.cdiv(most, parts))
    partial_sums = x.new_empty(count, width, dtype=held_dtype(x.dtype))
    backward_kernel[(count, parts)](
        grad, x, bias, to_x, partial_sums, rows, key if held is None else held, first,
        least_kept(p), width, *where.numbers, **_constants(x, tanh, where),
    )  # fmt: skip
    return to_x, partial_sums.sum(0).to(bias.dtype)


@gelu_dropout_backward.register_fake
def _backward_shapes(grad, x, bias, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(bias)


def _save(ctx, inputs, output) -> None:
    x, bias, *ctx.others = inputs
    ctx.save_for_backward(x, bias)


def _differentiate(ctx, grad):
    return *gelu_dropout_backward(grad, *ctx.saved_tensors, *ctx.others), *[None] * len(ctx.others)


gelu_dropout.register_autograd(_differentiate, setup_context=_save)


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16."""
    pointer, (columns, parts) = f"*{element}", _tiles(width)
    part = width / (columns * parts)
    once = columns * part * (4 if element == "fp32" else 2)
    drawn = {
        **dict.fromkeys(("key", "first"), "i64"),
        **dict.fromkeys(("least", "columns", *NUMBERS), "i32"),
    }  # fmt: skip
    values = {
        "columns": width,
        **dict(zip(NUMBERS, (4096 * width, 1, 1, 0, 0, 0), strict=True)),
    }
    warps = columns // PER_WARP
    for tanh in (False, True):
        constants = {
            "BLOCK": columns, "WIDE": tl.float32, "TANH": tanh, "WHOLE": True, "FLAT": True,
        }  # fmt: skip
        tensors = dict.fromkeys(("x", "bias", "out"), pointer)
        yield Build(
            forward_kernel, {**tensors, "rows": "i32", **drawn}, {"ROWS": ROWS, **constants},
            values, warps=warps, moves=2 * ROWS * once, cached=once, filled=part,
        )  # fmt: skip
        tensors = {**dict.fromkeys(("grad", "x", "bias", "to_x"), pointer), "to_bias": "*fp32"}
        yield Build(
            backward_kernel, {**tensors, "rows": "i32", **drawn}, constants, values, warps=warps,
            moves=3 * once, filled=part, looped=True, most=PER_PROCESSOR // warps,
        )  # fmt: skip
