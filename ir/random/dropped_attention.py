"""Attention whose chances are dropped by counted numbers, in one kernel that keeps no scores.

The number of a chance is that of its place in the whole batch (`ir.layout.numbering`), as CPUs draw
it, so that masks do not depend on who has which heads or samples. The softmax is made as its scores
come (Dao et al., "FlashAttention", 2022); the backward makes chances again from the logarithms of
their sums, and draws again. Sums of gradients are in one order: every run has the same bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.ir.graph.own_operators import LIBRARY
from meshwright.ir.launch import INTERPRETED, Build, block, jit, tl, triton, way, why_torch, wide
from meshwright.ir.random.philox import block_numbers, factors_of, least_kept, numbers_at
from meshwright.ir.random.strided import NUMBERS, RowPlaces, filled, place_of, row_places

WIDTHS = (64, 80, 96, 128)
"""Of heads, whose machine code is read."""
LEAST, MOST = 16, 128
"""Widths of heads that there is a kernel for."""
QUERIES, KEYS = 64, 64
"""That a program has at once."""
BACKWARD_QUERIES = 32
"""The same of the backward, which has twice as many tiles in registers."""
WARPS, STAGES = 8, 2
"""Of a program: as many as have room for its sums in registers; tiles that are read ahead."""
_NO_MASK, _LOOKS, _ADDED = 0, 1, 2
"""Kinds of masks: none, where queries look, numbers that are added to scores."""
_NUMBERED = "float p, int key, int first, int[] sizes, int[] strides"
LIBRARY.define(
    "dropped_attention(Tensor query, Tensor key_, Tensor value, Tensor? mask, bool causal, "
    f"float scale, {_NUMBERED}) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "dropped_attention_backward(Tensor grad, Tensor query, Tensor key_, Tensor value, Tensor? mask,"
    f" Tensor out, Tensor total, bool causal, float scale, {_NUMBERED}) -> (Tensor, Tensor, Tensor)"
)


@jit
def chances_of(
    query, keys, mask, mask_query, mask_key, row, column, num_queries, num_keys, scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores [queries, keys] of a tile; -inf where queries do not look. `mask` points to what this
    head's begins with."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee", out_dtype=WIDE) * scale
    seen = (row < num_queries)[:, None] & (column < num_keys)[None, :]
    if MASK != 0:
        at = row.to(tl.int64)[:, None] * mask_query + column[None, :] * mask_key
        said = tl.load(mask + at, seen, 0)
        if MASK == 1:
            seen = seen & (said != 0)
        else:
            scores += said.to(WIDE)
    if CAUSAL:
        seen = seen & (column[None, :] <= row[:, None])
    return tl.where(seen, scores, -float("inf"))


@jit
def kept_chances(
    key, first, least, place, start, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What chances [QUERIES, KEYS] are multiplied by. `place` [QUERIES]: numbers of the first
    chances of queries; `start`: the first key. With WHOLE every 16 have a block of numbers."""
    if WHOLE:
        groups: tl.constexpr = KEYS // 16
        number = (place // 16)[:, None] + (start // 16 + tl.arange(0, groups))[None, :]
        drawn = block_numbers(key, tl.reshape(number, [QUERIES * groups]), QUERIES * groups)
    else:
        number = place[:, None] + (start + tl.arange(0, KEYS))[None, :]
        drawn = numbers_at(key, tl.reshape(number, [QUERIES * KEYS]), QUERIES * KEYS)
    return tl.reshape(factors_of(drawn, least, WIDE), [QUERIES, KEYS])


@jit
def first_places(
    row, head_row, num_queries, num_keys, first, width, middle, inner, outer_step, middle_step,
    inner_step, FLAT: tl.constexpr,
):  # fmt: skip
    """Numbers of the first chances of these queries of a head; those beyond the last get the
    last's. `head_row`: queries of all heads and samples before."""
    whole = head_row + tl.minimum(row, num_queries - 1)
    return place_of(
        whole * num_keys, first, width, middle, inner, outer_step, middle_step, inner_step, FLAT
    )


@partial(jit, varying=("key", "first"))
def forward_kernel(
    query, keys, values, mask, out, total,
    heads, shared, num_queries, num_keys, head_width,
    query_sample, query_head, query_row, key_sample, key_head, key_row,
    value_sample, value_head, value_row, mask_sample, mask_head, mask_query, mask_key,
    scale, key, first, least, width, middle, inner, outer_step, middle_step, inner_step,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """A program has QUERIES queries of one head of one sample. `out` is [samples, queries, heads,
    head_width]. `shared`: query heads that have a key head together."""
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    at = tl.arange(0, BLOCK)
    inside = (row < num_queries)[:, None] & (at < head_width)[None, :]
    query += sample * query_sample + head * query_head
    keys += sample * key_sample + head // shared * key_head
    values += sample * value_sample + head // shared * value_head
    mask += sample * mask_sample + head * mask_head
    q = tl.load(query + row.to(tl.int64)[:, None] * query_row + at[None, :], inside, 0.0)
    head_row = tl.program_id(1).to(tl.int64) * num_queries
    place = first_places(
        row, head_row, num_queries, num_keys, first, width, middle, inner, outer_step, middle_step,
        inner_step, FLAT,
    )  # fmt: skip
    largest = tl.full([QUERIES], -float("inf"), WIDE)
    sums = tl.zeros([QUERIES], WIDE)
    made = tl.zeros([QUERIES, BLOCK], WIDE)
    stop = tl.minimum(num_keys, (tl.program_id(0) + 1) * QUERIES) if CAUSAL else num_keys
    for start in range(0, stop, KEYS):
        column = start + tl.arange(0, KEYS)
        there = (column < num_keys)[:, None] & (at < head_width)[None, :]
        where = column.to(tl.int64)[:, None]
        k = tl.load(keys + where * key_row + at[None, :], there, 0.0)
        v = tl.load(values + where * value_row + at[None, :], there, 0.0)
        scores = chances_of(
            q, k, mask, mask_query, mask_key, row, column, num_queries, num_keys, scale, CAUSAL,
            MASK, WIDE,
        )  # fmt: skip
        now = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(now == -float("inf"), 0.0, now)
        grown = tl.exp(scores - base[:, None])
        less = tl.exp(largest - base)
        sums = sums * less + tl.sum(grown, 1)
        kept = kept_chances(key, first, least, place, start, QUERIES, KEYS, WIDE, WHOLE)
        made = made * less[:, None]
        made += tl.dot((grown * kept).to(v.dtype), v, input_precision="ieee", out_dtype=WIDE)
        largest = now
    # A query that sees nothing finds zeros.
    made = made / tl.where(sums == 0.0, 1.0, sums)[:, None]
    logarithm = tl.where(sums == 0.0, -float("inf"), largest + tl.log(sums))
    tl.store(total + head_row + row, logarithm, row < num_queries)
    to = ((sample * num_queries + row) * heads + head)[:, None] * head_width + at[None, :]
    tl.store(out + to, made.to(out.dtype.element_ty), inside)


@jit
def again(
    q, k, v, grad, mask, mask_query, mask_key, row, column, num_queries, num_keys, scale,
    logarithm, along, key, first, least, place, start,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Chances of a tile as they were used, and the gradients of its scores."""
    scores = chances_of(
        q, k, mask, mask_query, mask_key, row, column, num_queries, num_keys, scale, CAUSAL, MASK,
        WIDE,
    )  # fmt: skip
    base = tl.where(logarithm == -float("inf"), 0.0, logarithm)
    chances = tl.exp(scores - base[:, None])
    kept = kept_chances(key, first, least, place, start, QUERIES, KEYS, WIDE, WHOLE)
    back = tl.dot(grad, tl.trans(v), input_precision="ieee", out_dtype=WIDE)
    return chances * kept, chances * (back * kept - along[:, None]) * scale


@partial(jit, varying=("key", "first"))
def query_kernel(
    query, keys, values, mask, grad, total, along, to_query,
    heads, shared, num_queries, num_keys, head_width,
    query_sample, query_head, query_row, key_sample, key_head, key_row,
    value_sample, value_head, value_row, mask_sample, mask_head, mask_query, mask_key,
    grad_sample, grad_head, grad_row,
    scale, key, first, least, width, middle, inner, outer_step, middle_step, inner_step,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Gradients of QUERIES queries of one head; `to_query` lies as `out` of the forward."""
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    at = tl.arange(0, BLOCK)
    inside = (row < num_queries)[:, None] & (at < head_width)[None, :]
    far = row.to(tl.int64)[:, None]
    query += sample * query_sample + head * query_head
    keys += sample * key_sample + head // shared * key_head
    values += sample * value_sample + head // shared * value_head
    mask += sample * mask_sample + head * mask_head
    grad += sample * grad_sample + head * grad_head
    q = tl.load(query + far * query_row + at[None, :], inside, 0.0)
    g = tl.load(grad + far * grad_row + at[None, :], inside, 0.0)
    head_row = tl.program_id(1).to(tl.int64) * num_queries
    logarithm = tl.load(total + head_row + row, row < num_queries, -float("inf"))
    mean = tl.load(along + head_row + row, row < num_queries, 0.0)
    place = first_places(
        row, head_row, num_queries, num_keys, first, width, middle, inner, outer_step, middle_step,
        inner_step, FLAT,
    )  # fmt: skip
    made = tl.zeros([QUERIES, BLOCK], WIDE)
    stop = tl.minimum(num_keys, (tl.program_id(0) + 1) * QUERIES) if CAUSAL else num_keys
    for start in range(0, stop, KEYS):
        column = start + tl.arange(0, KEYS)
        there = (column < num_keys)[:, None] & (at < head_width)[None, :]
        where = column.to(tl.int64)[:, None]
        k = tl.load(keys + where * key_row + at[None, :], there, 0.0)
        v = tl.load(values + where * value_row + at[None, :], there, 0.0)
        _, back = again(
            q, k, v, g, mask, mask_query, mask_key, row, column, num_queries, num_keys, scale,
            logarithm, mean, key, first, least, place, start, QUERIES, KEYS, WIDE, CAUSAL, MASK,
            WHOLE,
        )  # fmt: skip
        made += tl.dot(back.to(k.dtype), k, input_precision="ieee", out_dtype=WIDE)
    to = ((sample * num_queries + row) * heads + head)[:, None] * head_width + at[None, :]
    tl.store(to_query + to, made.to(to_query.dtype.element_ty), inside)


@partial(jit, varying=("key", "first"))
def key_kernel(
    query, keys, values, mask, grad, total, along, to_keys, to_values,
    heads, shared, num_queries, num_keys, head_width,
    query_sample, query_head, query_row, key_sample, key_head, key_row,
    value_sample, value_head, value_row, mask_sample, mask_head, mask_query, mask_key,
    grad_sample, grad_head, grad_row,
    scale, key, first, least, width, middle, inner, outer_step, middle_step, inner_step,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Gradients of KEYS keys and values of one key head, of all query heads that share it."""
    key_heads = heads // shared
    sample = (tl.program_id(1) // key_heads).to(tl.int64)
    group = (tl.program_id(1) % key_heads).to(tl.int64)
    start = tl.program_id(0) * KEYS
    column = start + tl.arange(0, KEYS)
    at = tl.arange(0, BLOCK)
    there = (column < num_keys)[:, None] & (at < head_width)[None, :]
    where = column.to(tl.int64)[:, None]
    keys += sample * key_sample + group * key_head
    values += sample * value_sample + group * value_head
    k = tl.load(keys + where * key_row + at[None, :], there, 0.0)
    v = tl.load(values + where * value_row + at[None, :], there, 0.0)
    made_key = tl.zeros([KEYS, BLOCK], WIDE)
    made_value = tl.zeros([KEYS, BLOCK], WIDE)
    begin = start // QUERIES * QUERIES if CAUSAL else 0
    for each in range(0, shared):
        head = group * shared + each
        q_head = query + sample * query_sample + head * query_head
        g_head = grad + sample * grad_sample + head * grad_head
        m_head = mask + sample * mask_sample + head * mask_head
        head_row = (sample * heads + head) * num_queries
        for top in range(begin, num_queries, QUERIES):
            row = top + tl.arange(0, QUERIES)
            inside = (row < num_queries)[:, None] & (at < head_width)[None, :]
            far = row.to(tl.int64)[:, None]
            q = tl.load(q_head + far * query_row + at[None, :], inside, 0.0)
            g = tl.load(g_head + far * grad_row + at[None, :], inside, 0.0)
            logarithm = tl.load(total + head_row + row, row < num_queries, -float("inf"))
            mean = tl.load(along + head_row + row, row < num_queries, 0.0)
            place = first_places(
                row, head_row, num_queries, num_keys, first, width, middle, inner, outer_step,
                middle_step, inner_step, FLAT,
            )  # fmt: skip
            used, back = again(
                q, k, v, g, m_head, mask_query, mask_key, row, column, num_queries, num_keys,
                scale, logarithm, mean, key, first, least, place, start, QUERIES, KEYS, WIDE,
                CAUSAL, MASK, WHOLE,
            )  # fmt: skip
            made_value += tl.dot(
                tl.trans(used.to(g.dtype)), g, input_precision="ieee", out_dtype=WIDE
            )
            made_key += tl.dot(
                tl.trans(back.to(q.dtype)), q, input_precision="ieee", out_dtype=WIDE
            )
    to = ((sample * num_keys + column) * key_heads + group)[:, None] * head_width + at[None, :]
    tl.store(to_keys + to, made_key.to(to_keys.dtype.element_ty), there)
    tl.store(to_values + to, made_value.to(to_values.dtype.element_ty), there)


class _Setting(NamedTuple):
    """What the three launches have in common: numbers and constants."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    drawn: tuple[Any, ...]
    constants: dict[str, Any]


def why_not(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first: int,
    sizes: Sequence[int], strides: Sequence[int],
) -> str:  # fmt: skip
    """Why there is no kernel for such operands [b, h, l, e], [b, g, s, e] and such numbers; "" if
    there is one."""
    width = query.shape[-1]
    if query.ndim != 4 or key.ndim != 4 or value.shape != key.shape:
        return "operands are not [samples, heads, length, width], or values are wider than keys"
    if not LEAST <= width <= MOST:
        return f"heads are {width} wide, kernels are for {LEAST} to {MOST}"
    if query.element_size() > 2 and not INTERPRETED:
        return "kernels are for float16 and bfloat16"  # tiles of wider values spill
    if mask is not None and (mask.requires_grad or mask.ndim > 4):
        return "the mask wants a gradient, or has more dims than queries"
    if _places(query, key, first, sizes, strides) is None:
        return "its part of the batch has too many dims"
    return why_torch(query)


def _places(
    query: Tensor, key: Tensor, first: int, sizes: Sequence[int], strides: Sequence[int]
) -> RowPlaces | None:
    """Where numbers of chances are, if those of a query follow each other."""
    keys = key.shape[-2]
    count = query.numel() // query.shape[-1] * keys
    found = row_places(first, filled(sizes, count), tuple(strides))
    return found if found is not None and (found.flat or found.numbers[0] % keys == 0) else None


def _shaped(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as [b, h, l, s], without copies of what it has once."""
    return None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])


def _setting(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
    numbered: tuple[Any, ...], at_once: int,
) -> _Setting:  # fmt: skip
    p, seed, first, sizes, strides = numbered
    where = _places(query, key, first, sizes, strides)
    assert where is not None
    _, heads, queries, width = query.shape
    keys = key.shape[-2]
    of_mask = (0, 0, 0, 0) if mask is None else mask.stride()
    kind = _NO_MASK if mask is None else _LOOKS if mask.dtype == torch.bool else _ADDED
    return _Setting(
        (heads, heads // key.shape[1], queries, keys, width),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *of_mask),
        (scale, seed, first, least_kept(p), *where.numbers),
        {
            "QUERIES": at_once, "KEYS": KEYS, "BLOCK": max(block(width), LEAST),
            "WIDE": wide(query.dtype), "CAUSAL": causal, "MASK": kind,
            "WHOLE": where.whole and keys % 16 == 0, "FLAT": where.flat,
            "num_warps": WARPS, "num_stages": STAGES,
        },
    )  # fmt: skip


def _rows_of(x: Tensor) -> Tensor:
    """With the elements of a head beside each other, as kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_place(like: Tensor) -> Tensor:
    """[b, h, l, e] that lies as [b, l, h, e], as what is read next wants it."""
    samples, heads, length, width = like.shape
    return like.new_empty(samples, length, heads, width).transpose(1, 2)


def forward(
    query: Tensor, key_: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
    p: float, key: int, first: int, sizes: Sequence[int], strides: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result [b, h, l, e] and the logarithms of sums [b, h, l], in float32."""
    query, key_, value = (_rows_of(x) for x in (query, key_, value))
    mask = _shaped(mask, query, key_)
    way("dropped_attention", query)
    out = _by_place(query)
    total = query.new_empty(query.shape[:-1], dtype=_sums(query))
    numbered = p, key, first, sizes, strides
    given = _setting(query, key_, value, mask, causal, scale, numbered, QUERIES)
    count = query.shape[0] * query.shape[1]
    forward_kernel[(triton.cdiv(query.shape[2], QUERIES), count)](
        query, key_, value, query if mask is None else mask, out, total, *given.sizes,
        *given.strides, *given.drawn, **given.constants,
    )  # fmt: skip
    return out, total


def _sums(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def backward(
    grad: Tensor, query: Tensor, key_: Tensor, value: Tensor, mask: Tensor | None, out: Tensor,
    total: Tensor, causal: bool, scale: float, p: float, key: int, first: int,
    sizes: Sequence[int], strides: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values."""
    query, key_, value, grad = (_rows_of(x) for x in (query, key_, value, grad))
    mask = _shaped(mask, query, key_)
    along = (grad.to(_sums(query)) * out).sum(-1).contiguous()
    numbered = p, key, first, sizes, strides
    given = _setting(query, key_, value, mask, causal, scale, numbered, BACKWARD_QUERIES)
    to_query, to_key, to_value = (_by_place(x) for x in (query, key_, value))
    read = (query, key_, value, query if mask is None else mask, grad, total, along)
    numbers = (*given.sizes, *given.strides, *grad.stride()[:3], *given.drawn)
    samples, heads, queries, _ = query.shape
    query_kernel[(triton.cdiv(queries, BACKWARD_QUERIES), samples * heads)](
        *read, to_query, *numbers, **given.constants
    )
    key_kernel[(triton.cdiv(key_.shape[2], KEYS), samples * key_.shape[1])](
        *read, to_key, to_value, *numbers, **given.constants
    )
    return to_query, to_key, to_value


def _forward_shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _by_place(query), query.new_empty(query.shape[:-1], dtype=_sums(query))


def _backward_shapes(
    grad: Tensor, query: Tensor, key_: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _by_place(query), _by_place(key_), _by_place(value)


for _name, _run, _shapes in (
    ("dropped_attention", forward, _forward_shapes),
    ("dropped_attention_backward", backward, _backward_shapes),
):
    LIBRARY.impl(_name, _run, "CUDA")
    if INTERPRETED:
        LIBRARY.impl(_name, _run, "CPU")
    LIBRARY.impl(_name, _shapes, "Meta")
_FORWARD = torch.ops.meshwright.dropped_attention.default
_BACKWARD = torch.ops.meshwright.dropped_attention_backward.default


class DroppedByKernel(torch.autograd.Function):
    """Attention of queries [b, h, l, e] to keys and values [b, g, s, e], g of which divides h; mask
    broadcasts to [b, h, l, s]: bool says where queries look, numbers are added to scores. `why_not`
    must have been asked."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
    ) -> Tensor:
        made: Tensor
        made, total = _FORWARD(query, key, value, mask, *rest)
        ctx.rest = rest
        ctx.save_for_backward(query, key, value, mask, made, total)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = _BACKWARD(grads[0], *ctx.saved_tensors, *ctx.rest)
        return (*found, None, *[None] * len(ctx.rest))


def builds(element: str, width: int) -> Iterator[Build]:
    """For heads of `width` in `element`, such as bf16: causal, and with a mask of where to look."""
    if element not in ("bf16", "fp16"):
        return
    pointers = ("query", "keys", "values")
    ints = (
        "heads", "shared", "num_queries", "num_keys", "head_width", "query_sample", "query_head",
        "query_row", "key_sample", "key_head", "key_row", "value_sample", "value_head", "value_row",
        "mask_sample", "mask_head", "mask_query", "mask_key",
    )  # fmt: skip
    of_grad = ("grad_sample", "grad_head", "grad_row")
    drawn = {
        "scale": "fp32",
        "key": "i64",
        "first": "i64",
        "least": "i32",
        **dict.fromkeys(NUMBERS, "i32"),
    }
    length, heads = 1024, 12
    step = {"sample": length * heads * width, "head": width, "row": heads * width}
    values = {
        "heads": heads, "shared": 1, "num_queries": length, "num_keys": length, "head_width": width,
        **{f"{of}_{by}": n for of in ("query", "key", "value", "grad") for by, n in step.items()},
        "mask_sample": length * length, "mask_head": 0, "mask_query": length, "mask_key": 1,
        "width": heads * length * length, "middle": 1, "inner": 1, "outer_step": 0,
        "middle_step": 0, "inner_step": 0,
    }  # fmt: skip
    for causal, mask in ((True, _NO_MASK), (False, _LOOKS)):
        constants = {
            "KEYS": KEYS, "BLOCK": max(block(width), LEAST), "WIDE": tl.float32, "CAUSAL": causal,
            "MASK": mask, "WHOLE": True, "FLAT": True,
        }  # fmt: skip
        read = {**dict.fromkeys(pointers, f"*{element}"), "mask": "*i1" if mask else f"*{element}"}
        grads = {"grad": f"*{element}", "total": "*fp32", "along": "*fp32"}
        sizes, more = dict.fromkeys(ints, "i32"), dict.fromkeys(of_grad, "i32")
        made = {"out": f"*{element}", "total": "*fp32"}
        of_keys = {"to_keys": f"*{element}", "to_values": f"*{element}"}
        for kernel, signature, given in (
            (forward_kernel, {**read, **made, **sizes, **drawn}, {}),
            (query_kernel, {**read, **grads, "to_query": f"*{element}", **sizes, **more, **drawn},
             of_grad),
            (key_kernel, {**read, **grads, **of_keys, **sizes, **more, **drawn}, of_grad),
        ):  # fmt: skip
            own = {name: n for name, n in values.items() if name in signature or name in given}
            at_once = QUERIES if kernel is forward_kernel else BACKWARD_QUERIES
            yield Build(
                kernel, signature, {"QUERIES": at_once, **constants}, own, WARPS, STAGES,
                looped=True, computes=True,
            )  # fmt: skip
