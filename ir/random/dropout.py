"""Dropout by counted numbers: in one pass, of which nothing is kept, on a GPU.

The number of an element is that of its place in the whole batch (`ir.layout.numbering`), so that
its fate does not depend on who has it. CPUs and GPUs draw the same numbers.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor
from torch.compiler import is_compiling

from meshwright.ir.graph.own_operators import LIBRARY
from meshwright.ir.launch import (
    INTERPRETED,
    TAKEN,
    Build,
    held_dtype,
    jit,
    tl,
    triton,
    way,
    wide,
)
from meshwright.ir.random.philox import (
    block_numbers,
    factors_of,
    kept_scale,
    least_kept,
    numbers_at,
    numbers_of_host,
    said,
    told,
)
from meshwright.ir.random.strided import NUMBERS, filled, place_of, row_places, span
from meshwright.ir.torch_modes import is_watched

ELEMENTS = 2048
"""That one program takes."""
NUMBERED = (
    "float p, int key, int first, int[] sizes, int[] strides, Tensor? held=None, int per_sample=0"
)
"""What operators that drop are told of their numbers."""
LIBRARY.define(f"dropout(Tensor x, {NUMBERED}) -> Tensor")
LIBRARY.define(f"dropout_factors(Tensor x, {NUMBERED}) -> Tensor")
LIBRARY.define(f"dropout_mask(Tensor x, {NUMBERED}) -> Tensor")


class _Numbered(NamedTuple):
    """As `NUMBERED`."""

    p: float
    key: int
    first: int
    sizes: Sequence[int]
    strides: Sequence[int]
    held: Tensor | None = None
    per_sample: int = 0


def stays(
    p: float, key: int, first: int, sizes: Sequence[int], strides: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return which elements stay, in dims of `sizes`; their numbers begin at `first` and are
    `strides` apart."""
    if len(sizes) == 1 and strides[0] == 1:
        return numbers_of_host(key, first, sizes[0]) >= least_kept(p)
    drawn = numbers_of_host(key, first, span(sizes, strides)) >= least_kept(p)
    return as_strided(drawn, tuple(sizes), tuple(strides))


def factors(x: Tensor, p: float, *numbered: Any) -> Tensor:
    """In the shape, dtype and memory layout of x, on its device, what `dropout` multiplies by, for
    0 < p < 1; drawn on the CPU. `numbered`: as `dropout` is told."""
    return _drawn(x, kept_scale(p), p, *numbered)


def kept_mask(x: Tensor, *numbered: Any) -> Tensor:
    """The same without the scale: ones and zeros, which every dtype can say."""
    return _drawn(x, None, *numbered)


_ONES = {torch.bfloat16: np.int16(0x3F80), torch.float16: np.int16(0x3C00)}
"""Bits of a one in dtypes of 16: of zero there are none."""


def _drawn(
    x: Tensor, scale: float | None, p: float, key: int, first: int, sizes: Sequence[int],
    strides: Sequence[int], held: Tensor | None = None, per_sample: int = 0,
) -> Tensor:  # fmt: skip
    """Zeros and `scale`, one where that is None."""
    count = x.numel()
    if not count:
        return torch.empty_like(x)
    key, first = said(key, first, held)
    kept = stays(p, key, first, filled(sizes, count), strides)
    # Numpy multiplies, as it has no copies to make for that; it knows no bfloat16.
    if scale is None and x.dtype in _ONES:
        bits = torch.from_numpy(np.multiply(kept, _ONES[x.dtype], order="C"))
        made = bits.view(x.dtype).view(x.shape)
    else:
        wide = np.float64 if x.dtype is torch.float64 else np.float32
        scaled = np.multiply(kept, wide(1.0 if scale is None else scale), order="C")
        made = torch.from_numpy(scaled).view(x.shape).to(x.dtype)
    if x.is_contiguous():
        return made if x.device.type == "cpu" else made.to(x.device)
    return torch.empty_like(x, device="cpu").copy_(made).to(x.device)


def drawn_factors(x: Tensor, *numbered: Any) -> Tensor:
    """`factors` by the operator, or at once where nobody sees operators and the host has them."""
    made: Tensor = (factors if at_once(x) else FACTORS)(x, *numbered)
    return made


def drawn_mask(x: Tensor, *numbered: Any) -> Tensor:
    """`kept_mask`, likewise."""
    made: Tensor = (kept_mask if at_once(x) else _MASK)(x, *numbered)
    return made


def at_once(x: Tensor) -> bool:
    """Whether nobody sees operators, and what x is multiplied by is made by the host."""
    return x.device.type == "cpu" and not (INTERPRETED or is_watched() or is_compiling())


def _by_torch(x: Tensor, *numbered: Any) -> Tensor:
    wider = x.to(held_dtype(x.dtype))
    return (wider * factors(wider, *numbered)).to(x.dtype)


@jit
def kept_factors(
    key, first, least, start, width, middle, inner, outer_step, middle_step, inner_step,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """What BLOCK elements from `start` on are multiplied by. With WHOLE every 16 of them in a row
    have a block of numbers."""
    if WHOLE:
        groups: tl.constexpr = BLOCK // 16
        element = start + tl.arange(0, groups) * 16
    else:
        element = start + tl.arange(0, BLOCK)
    place = place_of(
        element, first, width, middle, inner, outer_step, middle_step, inner_step, FLAT
    )
    if WHOLE:
        drawn = block_numbers(key, place // 16, groups)
    else:
        drawn = numbers_at(key, place, BLOCK)
    return factors_of(drawn, least, WIDE)


@partial(jit, varying=("key", "first"))
def dropout_kernel(
    x, out, key, first, least, count, width, middle, inner, outer_step, middle_step, inner_step,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK of `count` elements."""
    key, first = told(key, first)
    start = tl.program_id(0).to(count.dtype) * BLOCK
    at = start + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < count, 0.0).to(WIDE)
    made = value * kept_factors(
        key, first, least, start, width, middle, inner, outer_step, middle_step, inner_step,
        BLOCK, WIDE, WHOLE, FLAT,
    )  # fmt: skip
    tl.store(out + at, made.to(out.dtype.element_ty), at < count)


def _by_triton(x: Tensor, *numbered: Any) -> Tensor:
    of, count = _Numbered(*numbered), x.numel()
    dims, strides = filled(of.sizes, count) if count else (), tuple(of.strides)
    where = row_places(of.first, dims, strides, of.per_sample) if count else None
    if where is None:
        TAKEN["dropout", "its part of the batch has too many dims"] += bool(count)
        if of.held is not None and count:
            return _of_line(x, of.p, of.first, dims, strides, of.held)
        return _by_torch(x, *numbered)
    if way("dropout", x) == "torch":
        return _by_torch(x, *numbered)
    given = x.contiguous()
    out = torch.empty_like(given)
    dropout_kernel[(triton.cdiv(count, ELEMENTS),)](
        given, out, of.key if of.held is None else of.held, of.first, least_kept(of.p), count,
        *where.numbers, BLOCK=ELEMENTS, WIDE=wide(x.dtype), WHOLE=where.whole, FLAT=where.flat,
    )  # fmt: skip
    return out if given is x else torch.empty_like(x).copy_(out)


def _of_line(
    x: Tensor, p: float, first: int, dims: Sequence[int], strides: Sequence[int], held: Tensor
) -> Tensor:
    """By factors of all numbers from the first to the last, of which x has some: what a device
    holds the host does not read."""
    line = x.new_ones(span(dims, strides), dtype=held_dtype(x.dtype))
    drawn: Tensor = FACTORS(line, p, 0, first, (-1,), (1,), held, 1)
    return (x * drawn.as_strided(tuple(dims), tuple(strides)).reshape(x.shape)).to(x.dtype)


def _factors_by_triton(x: Tensor, *numbered: Any) -> Tensor:
    return _by_triton(torch.ones_like(x), *numbered)


def _shape(x: Tensor, *numbered: Any) -> Tensor:
    return torch.empty_like(x)


LIBRARY.impl("dropout_factors", factors, "CompositeExplicitAutograd")
LIBRARY.impl("dropout_factors", _factors_by_triton, "CUDA")
LIBRARY.impl("dropout_factors", _shape, "Meta")
LIBRARY.impl("dropout_factors", torch.library.fallthrough_kernel, "Autograd")
LIBRARY.impl("dropout_mask", kept_mask, "CompositeExplicitAutograd")
LIBRARY.impl("dropout_mask", _shape, "Meta")
LIBRARY.impl("dropout_mask", torch.library.fallthrough_kernel, "Autograd")
LIBRARY.impl("dropout", _by_triton if INTERPRETED else _by_torch, "CPU")
LIBRARY.impl("dropout", _by_triton, "CUDA")
LIBRARY.impl("dropout", _shape, "Meta")
FACTORS = torch.ops.meshwright.dropout_factors.default
_MASK = torch.ops.meshwright.dropout_mask.default
_OPERATOR = torch.ops.meshwright.dropout.default


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *numbered: Any) -> Tensor:
        ctx.numbered = numbered
        made: Tensor = _OPERATOR(x, *numbered)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (_OPERATOR(grads[0], *ctx.numbered), *[None] * len(ctx.numbered))


def dropout(
    x: Tensor,
    p: float,
    key: int,
    first: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    held: Tensor | None = None,
    per_sample: int = 0,
) -> Tensor:
    """x without what the numbers of `key` leave out, the rest scaled, for 0 < p < 1. Its elements,
    in dims of `sizes` (one may be -1, the rest), have numbers from `first` on, `strides` apart.

    p is taken to the nearest 2^-16, and the scale is that of what is taken. On a CPU, where drawing
    takes most of the time, the factors are kept for the backward, or a mask where x's dtype can not
    say what the scale is; otherwise nothing is.

    `held`: a key and how many places more there are before the first, a multiple of `per_sample`,
    [2] of int64 on x's device; they count where they are read, and `key` does not.
    """
    if x.device.type == "cpu" and not INTERPRETED:
        numbered = p, key, first, sizes, strides, held, per_sample
        if x.dtype is held_dtype(x.dtype):
            return x * drawn_factors(x, *numbered)
        # A number of Python is multiplied by in float32: one rounding, as in kernels.
        return x * drawn_mask(x, *numbered) * kept_scale(p)
    apply: Callable[..., Tensor] = _Dropout.apply
    return apply(x, p, key, first, sizes, strides, held, per_sample)


def builds(element: str, width: int) -> Iterator[Build]:
    """For tensors of `element`, such as bf16, as they are or as rows of `width`, of which ranks
    have parts."""
    signature = {
        **dict.fromkeys(("x", "out"), f"*{element}"), **dict.fromkeys(("key", "first"), "i64"),
        **dict.fromkeys(("least", "count", *NUMBERS), "i32"),
    }  # fmt: skip
    moves = 2 * ELEMENTS * (4 if element == "fp32" else 2)
    for flat in (True, False):
        steps = [64 * 2 * width, 2 * width, 1] if flat else [64 * 2 * width, 64, 2 * width]
        sizes = dict(zip(NUMBERS, (width, 1, 64, 0, *steps[::2]), strict=True))
        constants = {"BLOCK": ELEMENTS, "WIDE": tl.float32, "WHOLE": True, "FLAT": flat}
        yield Build(
            dropout_kernel, signature, constants, {"count": 4096 * width, **sizes}, moves=moves
        )
