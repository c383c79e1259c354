"""Kernels of attention whose chances are dropped by counted numbers.

The softmax is made as its scores come (Dao et al., "FlashAttention", 2022); the backward makes
chances again from the logarithms of their sums, and draws again. Sums of gradients are in one
order: every run has the same bits.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from functools import partial

from meshwright.ir.launch import jit, tl
from meshwright.ir.random.philox import block_numbers, factors_of, numbers_at, told
from meshwright.ir.random.strided import place_of

NO_MASK, LOOKS, ADDED = 0, 1, 2
"""Kinds of masks: none, where queries look, numbers that are added to scores."""


@jit
def rows_of(x, row, at, step, count, width):
    """Values [rows, BLOCK] of a head that `x` points to; zeros beyond its rows and its width."""
    inside = (row < count)[:, None] & (at < width)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * step + at[None, :], inside, 0.0)


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
    heads, shared, num_queries, num_keys, head_width, value_width,
    query_sample, query_head, query_row, key_sample, key_head, key_row,
    value_sample, value_head, value_row, mask_sample, mask_head, mask_query, mask_key,
    scale, key, first, least, width, middle, inner, outer_step, middle_step, inner_step,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """A program has QUERIES queries of one head of one sample. `out` is [samples, queries, heads,
    value_width]. `shared`: query heads that have a key head together."""
    key, first = told(key, first)
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    at, value_at = tl.arange(0, BLOCK), tl.arange(0, VALUES)
    inside = (row < num_queries)[:, None] & (value_at < value_width)[None, :]
    query += sample * query_sample + head * query_head
    keys += sample * key_sample + head // shared * key_head
    values += sample * value_sample + head // shared * value_head
    mask += sample * mask_sample + head * mask_head
    q = rows_of(query, row, at, query_row, num_queries, head_width)
    head_row = tl.program_id(1).to(tl.int64) * num_queries
    place = first_places(
        row, head_row, num_queries, num_keys, first, width, middle, inner, outer_step, middle_step,
        inner_step, FLAT,
    )  # fmt: skip
    largest = tl.full([QUERIES], -float("inf"), WIDE)
    sums = tl.zeros([QUERIES], WIDE)
    made = tl.zeros([QUERIES, VALUES], WIDE)
    stop = tl.minimum(num_keys, (tl.program_id(0) + 1) * QUERIES) if CAUSAL else num_keys
    for start in range(0, stop, KEYS):
        column = start + tl.arange(0, KEYS)
        k = rows_of(keys, column, at, key_row, num_keys, head_width)
        v = rows_of(values, column, value_at, value_row, num_keys, value_width)
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
    to = ((sample * num_queries + row) * heads + head)[:, None] * value_width + value_at[None, :]
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
    heads, shared, num_queries, num_keys, head_width, value_width,
    query_sample, query_head, query_row, key_sample, key_head, key_row,
    value_sample, value_head, value_row, mask_sample, mask_head, mask_query, mask_key,
    grad_sample, grad_head, grad_row,
    scale, key, first, least, width, middle, inner, outer_step, middle_step, inner_step,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """Gradients of QUERIES queries of one head; `to_query` is [samples, queries, heads,
    head_width]."""
    key, first = told(key, first)
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    at, value_at = tl.arange(0, BLOCK), tl.arange(0, VALUES)
    inside = (row < num_queries)[:, None] & (at < head_width)[None, :]
    query += sample * query_sample + head * query_head
    keys += sample * key_sample + head // shared * key_head
    values += sample * value_sample + head // shared * value_head
    mask += sample * mask_sample + head * mask_head
    grad += sample * grad_sample + head * grad_head
    q = rows_of(query, row, at, query_row, num_queries, head_width)
    g = rows_of(grad, row, value_at, grad_row, num_queries, value_width)
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
        k = rows_of(keys, column, at, key_row, num_keys, head_width)
        v = rows_of(values, column, value_at, value_row, num_keys, value_width)
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
    heads, shared, num_queries, num_keys, head_width, value_width,
    query_sample, query_head, query_row, key_sample, key_head, key_row,
    value_sample, value_head, value_row, mask_sample, mask_head, mask_query, mask_key,
    grad_sample, grad_head, grad_row,
    scale, key, first, least, width, middle, inner, outer_step, middle_step, inner_step,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, VALUES: tl.constexpr,
    WIDE: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """Gradients of KEYS keys and values of one key head, of all query heads that share it."""
    key, first = told(key, first)
    key_heads = heads // shared
    sample = (tl.program_id(1) // key_heads).to(tl.int64)
    group = (tl.program_id(1) % key_heads).to(tl.int64)
    start = tl.program_id(0) * KEYS
    column = start + tl.arange(0, KEYS)
    at, value_at = tl.arange(0, BLOCK), tl.arange(0, VALUES)
    there = (column < num_keys)[:, None]
    keys += sample * key_sample + group * key_head
    values += sample * value_sample + group * value_head
    k = rows_of(keys, column, at, key_row, num_keys, head_width)
    v = rows_of(values, column, value_at, value_row, num_keys, value_width)
    made_key = tl.zeros([KEYS, BLOCK], WIDE)
    made_value = tl.zeros([KEYS, VALUES], WIDE)
    begin = start // QUERIES * QUERIES if CAUSAL else 0
    for each in range(0, shared):
        head = group * shared + each
        q_head = query + sample * query_sample + head * query_head
        g_head = grad + sample * grad_sample + head * grad_head
        m_head = mask + sample * mask_sample + head * mask_head
        head_row = (sample * heads + head) * num_queries
        for top in range(begin, num_queries, QUERIES):
            row = top + tl.arange(0, QUERIES)
            q = rows_of(q_head, row, at, query_row, num_queries, head_width)
            g = rows_of(g_head, row, value_at, grad_row, num_queries, value_width)
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
    line = ((sample * num_keys + column) * key_heads + group)[:, None]
    inside = there & (at < head_width)[None, :]
    tl.store(
        to_keys + line * head_width + at[None, :], made_key.to(to_keys.dtype.element_ty), inside
    )
    inside = there & (value_at < value_width)[None, :]
    tl.store(
        to_values + line * value_width + value_at[None, :],
        made_value.to(to_values.dtype.element_ty), inside,
    )  # fmt: skip
