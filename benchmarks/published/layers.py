"""The pieces of one layer, of the embedding and of the head, as one rank runs them."""

from dataclasses import dataclass, replace

from benchmarks.published.ops import (
    Message,
    Piece,
    Under,
    batched,
    flash,
    linear,
    lookup,
    pointwise,
)
from benchmarks.published.shapes import Shape
from benchmarks.published.systems import System
from meshwright.ir.conversions import Primitive
from meshwright.ir.device import OpClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a rank sees of a micro-batch."""

    shape: Shape
    system: System
    mbs: int
    seq: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    async_tp: bool = False
    dtype: str = "bfloat16"
    """Of the matmuls with parameters."""
    half: str = "bfloat16"
    rowwise: bool = False
    """Float8 scales per row instead of per tensor."""

    @property
    def tokens(self) -> int:
        return self.mbs * self.seq // self.cp

    @property
    def shared(self) -> int:
        """Tokens outside the regions that tp splits."""
        return self.tokens // self.tp if self.sp else self.tokens


def layer(site: Site, experts: bool = False) -> tuple[Piece, ...]:
    """One transformer layer, before recomputation."""
    attend = _gated_attention(site) if site.shape.gated else _gpt_attention(site)
    if experts:
        block = _experts(site)
    else:
        block = _gated_mlp(site) if site.shape.gated else _gpt_mlp(site)
    return _scaled(site, (*attend, *block))


def entering(site: Site, piece: Piece) -> Piece:
    """A linear that tp splits by its outputs, with the collectives of its input."""
    if site.tp == 1:
        return piece
    nbytes = 2 * site.tokens * site.shape.hidden
    overlap: Under = "nothing" if site.system.tp_overlap == "none" else "weight"
    if not site.sp:
        return piece.sending(Message(Primitive.ALL_REDUCE, nbytes, "tp", "backward", overlap))
    early = site.system.tp_overlap == "nanotron" or site.async_tp
    under: Under = "forward share" if early and not site.async_tp else "nothing"
    again: Under = "input" if overlap == "weight" else "nothing"
    if site.async_tp:
        # Symmetric memory cuts gather and product into tp pieces: all but one is hidden.
        return piece.sending(
            Message(Primitive.ALL_GATHER, nbytes / site.tp, "tp", "forward"),
            Message(Primitive.ALL_GATHER, nbytes / site.tp, "tp", "backward"),
            Message(Primitive.REDUCE_SCATTER, nbytes / site.tp, "tp", "backward"),
        )
    # torchtitan's float8 linears cast before they gather (docs/float8.md), unless row by row.
    gathered = nbytes // 2 if site.dtype == "float8" and not site.rowwise else nbytes
    repeated = Message(Primitive.ALL_GATHER, gathered, "tp", "backward", again)
    return piece.sending(
        Message(Primitive.ALL_GATHER, gathered, "tp", "forward", under),
        None if site.system.keeps_gathered else repeated,
        Message(Primitive.REDUCE_SCATTER, nbytes, "tp", "backward", overlap),
    )


def leaving(site: Site, piece: Piece) -> Piece:
    """A linear that tp splits by its inputs, with the collectives of its output."""
    if site.tp == 1:
        return piece
    nbytes = 2 * site.tokens * site.shape.hidden
    if not site.sp:
        return piece.sending(Message(Primitive.ALL_REDUCE, nbytes, "tp", "forward"))
    if site.async_tp:
        nbytes //= site.tp
    under: Under = "input share" if site.system.tp_overlap == "nanotron" else "nothing"
    return piece.sending(
        Message(Primitive.REDUCE_SCATTER, nbytes, "tp", "forward"),
        Message(Primitive.ALL_GATHER, nbytes, "tp", "backward", under),
    )


def _scaled(site: Site, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Float8 products with dynamic scales: largest value (2 bytes) and cast (3) of each operand."""
    if site.dtype != "float8":
        return pieces
    made: list[Piece] = []
    for piece in pieces:
        if piece.op.dtype == "float8":
            values = sum(i.nbytes for i in piece.op.inputs) // 2
            scale = pointwise("scale", values, 5, 5 * piece.op.output_bytes / 2 / values)
            made.append(replace(scale, name=f"scale {piece.name}"))
        made.append(piece)
    return tuple(made)


def _norm(site: Site, name: str) -> Piece:
    """Keeps its input. Fused kernels read and write once (nanotron's is a Triton kernel)."""
    elements = site.shared * site.shape.hidden
    if site.system.composite_norm and site.system.pointwise == "eager":
        # torch composes rms_norm in fp32: cast (6 bytes), square (8), mean (4), scale (8), cast
        # (6), weight (4); about as many passes twice over in backward. Two fp32 values are kept.
        return pointwise(name, elements, 36, 60, saved_bytes=8 * elements,
                         op_class=OpClass.NORMALIZATION)  # fmt: skip
    return pointwise(name, elements, 4, 6, saved_bytes=2 * elements,
                     op_class=OpClass.NORMALIZATION)  # fmt: skip


def _gpt_attention(site: Site) -> tuple[Piece, ...]:
    h, d, t = site.shape.hidden, site.shape.head_dim, site.tp
    heads, width = site.shape.heads // t, site.shape.hidden // t
    tokens = site.tokens
    qkv = linear("qkv", tokens, h, 3 * width, site.dtype)
    return (
        _norm(site, "norm 1"),
        entering(site, _input_kept_once(site, qkv)),
        *_core(site, heads, d, width),
        leaving(site, linear("out", tokens, width, h, site.dtype)),
        _add(site, "add 1"),
    )


def _input_kept_once(site: Site, piece: Piece) -> Piece:
    """Sequence parallelism keeps only the rank's own part of a gathered input, or all of it."""
    if site.system.keeps_gathered:
        return piece
    return replace(piece, saved_bytes=2 * site.shared * site.shape.hidden)


def _add(site: Site, name: str) -> Piece:
    """Onto the residual stream, whose gradient sums two; with bias and dropout in one kernel."""
    elements = site.shared * site.shape.hidden
    if site.system.dropout:
        return pointwise(name, elements, 7, 11, saved_bytes=elements)
    return pointwise(name, elements, 6, 6)


def _core(site: Site, heads: int, d: int, width: int) -> tuple[Piece, ...]:
    """Attention between the projections."""
    seq, tokens = site.seq // site.cp, site.tokens
    if site.system.attention == "flash":
        saved = 2 * tokens * 3 * width + 4 * heads * tokens
        return (flash("attention", site.mbs, heads, heads, seq, site.seq, d, site.half, saved),)
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
        _norm(site, "norm 2"),
        entering(site, _input_kept_once(site, up)),
        pointwise("gelu", tokens * width, 4, 6, saved_bytes=2 * tokens * width,
                  op_class=OpClass.TRANSCENDENTAL),
        leaving(site, linear("down", tokens, width, h, site.dtype)),
        _add(site, "add 2"),
    )  # fmt: skip


def _gated_attention(site: Site) -> tuple[Piece, ...]:
    shape, tokens, t = site.shape, site.tokens, site.tp
    h, q, kv = shape.hidden, shape.hidden // t, max(shape.kv_width // t, shape.head_dim)
    seq = site.seq // site.cp
    heads, kv_heads = max(shape.heads // t, 1), max(shape.kv_heads // t, 1)
    saved = 2 * tokens * (2 * q + 2 * kv) + 4 * heads * tokens
    attend = flash("attention", site.mbs, heads, kv_heads, seq, site.seq, shape.head_dim,
                   site.half, saved)  # fmt: skip
    attend = replace(attend, slowdown=site.system.attention_slowdown)
    if site.cp > 1:
        # Ring or gathered: keys and values of all context ranks pass once each way.
        nbytes = 2 * 2 * tokens * kv * site.cp
        attend = attend.sending(
            Message(Primitive.ALL_GATHER, nbytes, "cp", "forward", "forward share"),
            Message(Primitive.ALL_GATHER, nbytes, "cp", "backward", "input share"),
            Message(Primitive.REDUCE_SCATTER, nbytes, "cp", "backward"),
        )
    out = linear("out", tokens, q, h, site.dtype, saved=False)
    return (
        _norm(site, "norm 1"),
        *_projections(site, tokens, h, q, kv),
        *_rotary(site, tokens * q, tokens * kv),
        attend,
        *_unlay(site, tokens * q),
        leaving(site, out),
        _add(site, "add 1"),
    )


def _projections(site: Site, tokens: int, h: int, q: int, kv: int) -> tuple[Piece, ...]:
    if not site.system.separate_qkv:
        qkv = linear("qkv", tokens, h, q + 2 * kv, site.dtype)
        return (entering(site, _input_kept_once(site, qkv)),)
    first = entering(site, _input_kept_once(site, linear("q", tokens, h, q, site.dtype)))
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
    gate = _input_kept_once(site, up)
    projections: tuple[Piece, ...] = (entering(site, gate),)
    if site.system.separate_qkv:
        gate = _input_kept_once(site, linear("gate", tokens, h, width, site.dtype))
        plain = linear("up", tokens, h, width, site.dtype, saved=False)
        projections = (entering(site, gate), plain)
    return (
        _norm(site, "norm 2"),
        *projections,
        *_gate(site, tokens * width),
        leaving(site, linear("down", tokens, width, h, site.dtype)),
        _add(site, "add 2"),
    )


def _unlay(site: Site, elements: int) -> tuple[Piece, ...]:
    """nanotron's projections take sequence first, its attention batch first."""
    if site.system.pointwise != "eager" or site.system.separate_qkv or site.mbs == 1:
        return ()
    return (pointwise("transpose", elements, 4, 4, op_class=OpClass.COPY),)


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


def _experts(site: Site) -> tuple[Piece, ...]:
    """Top-k experts with capacity factor 1 per choice; dispatch and return by all-to-all."""
    shape, h = site.shape, site.shape.hidden
    routed = site.tokens * shape.top_k
    width = shape.expert_ffn // site.tp
    moved = Message(Primitive.ALL_TO_ALL, 2 * routed * h * site.ep, "ep", "forward")
    back = Message(Primitive.ALL_TO_ALL, 2 * routed * h * site.ep, "ep", "backward")
    into = 2 * width if shape.gated else width
    up = linear("experts up", routed, h, into, site.dtype)
    down = linear("experts down", routed, width, h, site.dtype)
    router = linear("router", site.tokens, h, shape.experts, site.dtype, saved=False)
    spread = pointwise("dispatch", routed * h, 4, 4, op_class=OpClass.GATHER)
    merge = pointwise("combine", routed * h, 3, 4, saved_bytes=2 * routed * h)
    act = pointwise("activation", routed * width, 4, 6, saved_bytes=2 * routed * width,
                    op_class=OpClass.TRANSCENDENTAL)  # fmt: skip
    if site.ep > 1:
        up, down = up.sending(moved, back), down.sending(moved, back)
    return (_norm(site, "norm 2"), router, spread, up, act, down, merge,
            _add(site, "add 2"))  # fmt: skip


def embedding(site: Site) -> tuple[Piece, ...]:
    """Token (and position) embedding."""
    h = site.shape.hidden
    found = lookup("embedding", site.tokens, h, site.shape.vocab // site.tp)
    if site.tp > 1:
        kind = Primitive.REDUCE_SCATTER if site.sp else Primitive.ALL_REDUCE
        found = found.sending(Message(kind, 2 * site.tokens * h, "tp", "forward"))
    if not site.shape.positions:
        return (found,)
    return (found, _add(site, "positions"))


def head(site: Site, vocab: int) -> tuple[Piece, ...]:
    """Last norm, logits and loss: cast, subtract, exponential, normalise, and their gradient."""
    h, width = site.shape.hidden, vocab // site.tp
    project = linear("head", site.tokens, h, width, site.half)
    entries = site.tokens * width
    saved = site.system.saved_logits_bytes * entries
    # Eager: cast (2+4 bytes), maximum (4), subtract (8), exponential (8), sum (4), divide (8);
    # backward in place (8) and cast (6). Compilers and fused losses pass twice each way.
    fused = site.system.pointwise == "compiled"
    loss = pointwise("loss", entries, *((12, 8) if fused else (38, 14)), saved_bytes=saved)
    return (_norm(site, "last norm"), entering(site, _input_kept_once(site, project)), loss)
