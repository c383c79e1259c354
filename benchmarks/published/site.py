"""What a rank sees of a micro-batch, and what tensor parallelism adds to its linears."""

from dataclasses import dataclass, replace

from benchmarks.published.ops import Message, Piece, Under, pointwise
from benchmarks.published.shapes import Shape
from benchmarks.published.systems import System
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.layout.conversions import Primitive


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
    current_scaling: bool = False
    """Scales of the values at hand, not of those before."""
    exact_weight_gradients: bool = False
    """The products that make them run in half precision."""

    @property
    def float8(self) -> bool:
        return self.dtype.startswith("float8")

    @property
    def tokens(self) -> int:
        return self.mbs * self.seq // self.cp

    @property
    def shared(self) -> int:
        """Tokens outside the regions that tp splits."""
        return self.tokens // self.tp if self.sp else self.tokens


def announced(site: Site, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """With what the stack adds: its libraries, checks before collectives, how well these hide."""
    sizes, hidden = {"tp": site.tp, "cp": site.cp, "ep": site.ep}, site.system.hidden

    def told(message: Message) -> Message:
        check_s = site.system.check_s * (sizes[message.axis] - 1)
        return replace(message, check_s=check_s, hidden=hidden)

    current = site.system.current_libraries
    return tuple(
        replace(piece, messages=tuple(map(told, piece.messages)), current=current)
        for piece in pieces
    )


def entering(site: Site, piece: Piece) -> Piece:
    """A linear that tp splits by its outputs, with the collectives of its input."""
    if site.tp == 1:
        return piece
    nbytes = 2 * site.tokens * site.shape.hidden
    overlap: Under = "nothing" if site.system.tp_overlap == "none" else "weight"
    if not site.sp:
        return piece.sending(Message(Primitive.ALL_REDUCE, nbytes, "tp", "backward", overlap))
    under: Under = "forward share" if site.system.tp_overlap == "nanotron" else "nothing"
    again: Under = "input" if overlap == "weight" else "nothing"
    if site.async_tp and site.system.tp_overlap == "userbuffers":
        return piece.sending(
            Message(Primitive.ALL_GATHER, nbytes, "tp", "forward", "tuned"),
            Message(Primitive.ALL_GATHER, nbytes, "tp", "backward", "input"),
            Message(Primitive.REDUCE_SCATTER, nbytes, "tp", "backward", "weight"),
        )
    if site.async_tp:
        # Symmetric memory cuts gather and product into tp pieces: all but one is hidden. The fused
        # gather hands out the gathered input, which the weight's gradient reads.
        return piece.sending(
            Message(Primitive.ALL_GATHER, nbytes, "tp", "forward", "chunks"),
            Message(Primitive.REDUCE_SCATTER, nbytes, "tp", "backward", "chunks"),
        )
    # torchtitan's float8 linears cast before they gather (docs/float8.md), unless row by row.
    gathered = nbytes // 2 if site.float8 and not site.rowwise else nbytes
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
    under: Under = "input share" if site.system.tp_overlap == "nanotron" else "nothing"
    if site.async_tp:
        under = "tuned" if site.system.tp_overlap == "userbuffers" else "chunks"
    return piece.sending(
        Message(
            Primitive.REDUCE_SCATTER, nbytes, "tp", "forward", under if site.async_tp else "nothing"
        ),
        Message(Primitive.ALL_GATHER, nbytes, "tp", "backward", under),
    )


def input_kept_once(site: Site, piece: Piece) -> Piece:
    """Sequence parallelism keeps only the rank's own part of a gathered input, or all of it."""
    if site.system.keeps_gathered:
        return piece
    return replace(piece, saved_bytes=2 * site.shared * site.shape.hidden)


def norm(site: Site, name: str) -> Piece:
    """Keeps its input. Fused kernels read and write once (nanotron's is a Triton kernel)."""
    elements = site.shared * site.shape.hidden
    if site.system.composite_norm and site.system.pointwise == "eager":
        # torch composes rms_norm in fp32: cast (6 bytes), square (8), mean (4), scale (8), cast
        # (6), weight (4); about as many passes twice over in backward. Two fp32 values are kept.
        return pointwise(name, elements, 36, 60, saved_bytes=8 * elements,
                         op_class=OpClass.NORMALIZATION)  # fmt: skip
    return pointwise(name, elements, 4, 6, saved_bytes=2 * elements,
                     op_class=OpClass.NORMALIZATION)  # fmt: skip


def add(site: Site, name: str) -> Piece:
    """Onto the residual stream, whose gradient sums two; with bias and dropout in one kernel."""
    elements = site.shared * site.shape.hidden
    if site.system.dropout:
        return pointwise(name, elements, 7, 11, saved_bytes=elements)
    return pointwise(name, elements, 6, 6)
