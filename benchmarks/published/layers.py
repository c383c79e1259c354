"""The pieces of one layer, as one rank runs them."""

from dataclasses import replace

from benchmarks.published.float8 import scaled
from benchmarks.published.moe import experts as expert_block
from benchmarks.published.ops import Message, Piece, batched, flash, linear, pointwise
from benchmarks.published.site import Site, add, announced, entering, input_kept_once, leaving, norm
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.layout.conversions import Primitive


def layer(site: Site, experts: bool = False) -> tuple[Piece, ...]:
    """One transformer layer, before recomputation."""
    attend = _gated_attention(site) if site.shape.gated else _gpt_attention(site)
    if experts:
        block = expert_block(site)
    else:
        block = _gated_mlp(site) if site.shape.gated else _gpt_mlp(site)
    return announced(site, scaled(site, (*attend, *block)))


def _gpt_attention(site: Site) -> tuple[Piece, ...]:
    h, d, t = site.shape.hidden, site.shape.head_dim, site.tp
    heads, width = site.shape.heads // t, site.shape.hidden // t
    tokens = site.tokens
    qkv = linear("qkv", tokens, h, 3 * width, site.dtype)
    return (
        norm(site, "norm 1"),
        entering(site, input_kept_once(site, qkv)),
        *_core(site, heads, d, width),
        leaving(site, linear("out", tokens, width, h, site.dtype)),
        add(site, "add 1"),
    )


def _core(site: Site, heads: int, d: int, width: int) -> tuple[Piece, ...]:
    """Attention between the projections."""
    seq, tokens = site.seq // site.cp, site.tokens
    if site.system.attention == "flash":
        saved = 2 * tokens * 3 * width + 4 * heads * tokens
        attend = flash("attention", site.mbs, heads, heads, seq, site.seq, d, site.half, saved)
        return (replace(attend, slowdown=site.system.attention_slowdown),)
    batch, scores = site.mbs * heads, site.mbs * heads * seq * site.seq
    mask = scores if site.system.dropout else 0
    pieces = [
        batched("scores", batch, seq, d, site.seq, site.half, 2 * 2 * tokens * width),
        pointwise("softmax", scores, 4, 6, saved_bytes=2 * scores, core=True,
                  op_class=OpClass.NORMALIZATION),
    ]  # fmt: skip
    if mask:
        pieces.append(pointwise("attention dropout", scores, 5, 5, saved_bytes=mask, core=True))
    # The product keeps the (dropped) probabilities and the values.
    kept = (2 * scores if mask else 0) + 2 * tokens * width
    again = 2 * scores if mask else 0
    pieces.append(batched("values", batch, seq, site.seq, d, site.half, kept, again))
    pieces.append(pointwise("merge heads", tokens * width, 4, 4, op_class=OpClass.COPY))
    return tuple(pieces)


def _gpt_mlp(site: Site) -> tuple[Piece, ...]:
    h, width, tokens = site.shape.hidden, site.shape.ffn // site.tp, site.tokens
    up = linear("up", tokens, h, width, site.dtype)
    return (
        norm(site, "norm 2"),
        entering(site, input_kept_once(site, up)),
        pointwise("gelu", tokens * width, 4, 6, saved_bytes=2 * tokens * width,
                  op_class=OpClass.TRANSCENDENTAL),
        leaving(site, linear("down", tokens, width, h, site.dtype)),
        add(site, "add 2"),
    )  # fmt: skip


def _gated_attention(site: Site) -> tuple[Piece, ...]:
    shape, tokens, t = site.shape, site.tokens, site.tp
    h, q, kv = shape.hidden, shape.hidden // t, max(shape.kv_width // t, shape.head_dim)
    seq = site.seq // site.cp
    heads, kv_heads = max(shape.heads // t, 1), max(shape.kv_heads // t, 1)
    saved = 2 * tokens * (2 * q + 2 * kv + _beside_queries(site, kv)) + 4 * heads * tokens
    attend = flash("attention", site.mbs, heads, kv_heads, seq, site.seq, shape.head_dim,
                   site.half, saved)  # fmt: skip
    attend = replace(attend, slowdown=site.system.attention_slowdown)
    attend = _around_ring(site, attend, q if site.system.separate_qkv else kv)
    out = linear("out", tokens, q, h, site.dtype, saved=False)
    return (
        norm(site, "norm 1"),
        *_projections(site, tokens, h, q, kv),
        *_rotary(site, tokens * q, tokens * kv),
        attend,
        *_merges(site, tokens * q),
        *_unlay(site, tokens * q),
        leaving(site, out),
        add(site, "add 1"),
    )


def _beside_queries(site: Site, kv: int) -> int:
    """Values per token that stay because the queries are a part of their tensor: where queries are
    rotated in place, those of the packed projections that keys and values were copied out of."""
    packed = site.shape.kv_heads == site.shape.heads
    return 2 * kv if site.system.rotates_in_place and packed else 0


def _around_ring(site: Site, attend: Piece, width: int) -> Piece:
    """Keys and values of all context ranks pass once each way, their gradients back in fp32.

    torchtitan repeats keys and values for all heads before it.
    """
    if site.cp == 1:
        return attend
    nbytes = 2 * 2 * site.tokens * width * site.cp
    return attend.sending(
        Message(Primitive.ALL_GATHER, nbytes, "cp", "forward", "forward share"),
        Message(Primitive.ALL_GATHER, nbytes, "cp", "backward", "input share"),
        Message(Primitive.REDUCE_SCATTER, 2 * nbytes, "cp", "backward"),
    )


def _merges(site: Site, elements: int) -> tuple[Piece, ...]:
    """Outputs of each step of the ring are merged in fp32 by torch operators.

    torch.distributed.tensor.experimental: cast (6 bytes), difference (12), scaling (8), sum (12);
    backward adds to the gradients of queries, keys and values (3 x 10).
    """
    if site.cp == 1:
        return ()
    return (pointwise("merge", elements * site.cp, 38, 30),)


def _projections(site: Site, tokens: int, h: int, q: int, kv: int) -> tuple[Piece, ...]:
    if not site.system.separate_qkv:
        qkv = linear("qkv", tokens, h, q + 2 * kv, site.dtype)
        return (entering(site, input_kept_once(site, qkv)),)
    first = entering(site, input_kept_once(site, linear("q", tokens, h, q, site.dtype)))
    rest = (linear(name, tokens, h, kv, site.dtype, saved=False) for name in ("k", "v"))
    return (first, *rest)


def _rotary(site: Site, q: int, kv: int) -> tuple[Piece, ...]:
    """Rotary positions on queries and keys, `q` and `kv` values, and what lays them out."""
    if site.system.pointwise != "eager":
        return (pointwise("rotate", q + kv, 4, 4),)
    if site.system.separate_qkv:
        # torchtitan: to fp32, a complex product, back to half: (2+4) + (4+4) + (4+2) bytes.
        return (pointwise("rotate", q + kv, 20, 20),)
    # nanotron: the packed projections are permuted (back by a stack and a copy), keys and values
    # stacked and permuted, queries rotated into a new tensor and keys in place.
    return (
        pointwise("permute", q + 2 * kv, 4, 8, op_class=OpClass.COPY),
        pointwise("stack", 2 * kv, 8, 8, op_class=OpClass.COPY),
        pointwise("rotate", q + kv, 4, 4),
    )


def _gated_mlp(site: Site) -> tuple[Piece, ...]:
    h, width, tokens = site.shape.hidden, site.shape.ffn // site.tp, site.tokens
    up = linear("gate and up", tokens, h, 2 * width, site.dtype)
    gate = input_kept_once(site, up)
    projections: tuple[Piece, ...] = (entering(site, gate),)
    if site.system.separate_qkv:
        gate = input_kept_once(site, linear("gate", tokens, h, width, site.dtype))
        plain = linear("up", tokens, h, width, site.dtype, saved=False)
        projections = (entering(site, gate), plain)
    return (
        norm(site, "norm 2"),
        *projections,
        *_gate(site, tokens * width),
        leaving(site, linear("down", tokens, width, h, site.dtype)),
        add(site, "add 2"),
    )


def _unlay(site: Site, elements: int) -> tuple[Piece, ...]:
    """nanotron's projections take sequence first, its attention batch first.

    A plain linear keeps the copy it makes of its input, the asynchronous one what it was given.
    """
    if site.system.pointwise != "eager" or site.system.separate_qkv or site.mbs == 1:
        return ()
    kept = 2 * elements if site.tp == 1 or site.system.plain_linears else 0
    return (pointwise("transpose", elements, 4, 4, saved_bytes=kept, op_class=OpClass.COPY),)


def _gate(site: Site, elements: int) -> tuple[Piece, ...]:
    """silu(gate) * up: two kernels and one more kept tensor unless fused."""
    if site.system.pointwise == "eager":
        # Halves of one tensor, whose gradients are put together again by a copy.
        halves = 0 if site.system.separate_qkv else 8
        return (
            pointwise("silu", elements, 4, 6, saved_bytes=2 * elements,
                      op_class=OpClass.TRANSCENDENTAL),
            pointwise("times", elements, 6, 10 + halves, saved_bytes=4 * elements),
        )  # fmt: skip
    return (pointwise("swiglu", elements, 6, 10, saved_bytes=4 * elements,
                      op_class=OpClass.TRANSCENDENTAL),)  # fmt: skip
