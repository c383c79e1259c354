"""Seconds and kept bytes of runs of pieces: forward, backward, collectives and recomputation."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isinf, prod

from benchmarks.published.ops import Message, Phase, Piece, Under, linear
from benchmarks.published.sites import Ground, device_named
from meshwright.costmodel.comm.comm import Levels, collective_time
from meshwright.costmodel.ops.compute import OpTime, op_time
from meshwright.costmodel.ops.formulas import row_rate
from meshwright.costmodel.ops.kernel_work import forward_gemms
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.device import OpClass

_COLLECTIVE_OPS = 16
"""Dispatches that a collective takes as long as: torch.distributed's checks, streams and events,
and NCCL's launch, about 100 us in all; assumption."""


_WHEELS = 1.375
_CURRENT = 1.035
_AMPERE_MATMUL = {"a100-40": 1.08, "a100-80": 1.08}
"""The preset's products (kernel benchmarks of an inference library) reach 266 TFLOP/s at 8192; five
PyTorch tests of A100 SXM find 230, 237, 246, 265 and 271: their median."""
_VOLTA_MATMUL = {"v100-16": 1.05, "v100-32": 1.05}
"""With it a layer of BERT-Large on V100 takes what the calibration part has: 64 TFLOP/s forward and
backward at 128 sequences of 128 (mli/transformers-benchmarks, micro_bench.ipynb)."""
_HOPPER = ("h100-sxm", "h100-hbm2e", "h200", "b200", "mi300x")
SUSTAINED = {**dict.fromkeys(_HOPPER, _WHEELS), **_AMPERE_MATMUL, **_VOLTA_MATMUL}
"""What products and attention take in whole training runs over kernels timed alone, by runs that
are not reported: with the libraries of torch's wheels of 2023 and 2024, of the 8-GPU row of
dp_scaling (Ultra-Scale Playbook, 40 150 tokens/s/GPU), which has no communication to speak of; the
runs at tp 2 to 32 there are then 0 to 8 % too fast. With the libraries of NVIDIA's containers of
2025, of which the presets' kernels are, of Llama 3.1 8B in bf16 on 8 H100 (the first row of dgxc).
Other parts whose power is limited at 500 W and more are taken to be alike. Both are properties of
stacks and not of kernels, so they stay out of the presets, whose times are compared with single
kernels. Products whose rows are not aligned leave tensor cores idle and are as slow as alone."""


_LIMITED = (OpClass.MATMUL, OpClass.ATTENTION)


@dataclass(frozen=True, slots=True)
class Cost:
    """One micro-batch through some pieces on one rank; dispatch runs beside the kernels."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_dispatch_s: float = 0.0
    backward_dispatch_s: float = 0.0
    saved_bytes: int = 0
    peak_bytes: int = 0
    """Beyond what is kept while the backward of these pieces runs."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.forward_dispatch_s + other.forward_dispatch_s,
            self.backward_dispatch_s + other.backward_dispatch_s,
            self.saved_bytes + other.saved_bytes,
            max(self.peak_bytes, other.peak_bytes),
        )

    def times(self, count: int) -> "Cost":
        return Cost(
            self.forward_s * count,
            self.backward_s * count,
            self.forward_dispatch_s * count,
            self.backward_dispatch_s * count,
            self.saved_bytes * count,
            self.peak_bytes,
        )

    def one_by_one(self) -> "Cost":
        """Where each kernel is waited for before the next is dispatched."""
        return replace(
            self,
            forward_s=self.forward_s + self.forward_dispatch_s,
            backward_s=self.backward_s + self.backward_dispatch_s,
            forward_dispatch_s=0.0,
            backward_dispatch_s=0.0,
        )

    @property
    def forward(self) -> float:
        return max(self.forward_s, self.forward_dispatch_s)

    @property
    def backward(self) -> float:
        return max(self.backward_s, self.backward_dispatch_s)


def cost(pieces: Iterable[Piece], ground: Ground) -> Cost:
    """Without recomputation."""
    total = Cost()
    for piece in pieces:
        total += _piece(piece, ground)
    return total


def _piece(piece: Piece, ground: Ground) -> Cost:
    tuned = [i for i, message in enumerate(piece.messages) if message.under == "tuned"]
    if tuned:
        ways = (_with(piece, tuned[0], under) for under in ("chunks", "nothing"))
        found = (_piece(way, ground) for way in ways)
        return min(found, key=lambda c: c.forward_s + c.backward_s)
    time = _cut(piece, _alone(piece, ground.device.name), ground)
    slower = _slower(piece, ground.device.name) * piece.slowdown
    forward = time.forward_s * slower
    backward = (time.backward_input_s + time.backward_weight_s) * slower
    calls = {"forward": 0, "backward": 0}
    checks = {"forward": 0.0, "backward": 0.0}
    for message in piece.messages:
        seconds = exposed(message, time, ground)
        calls[message.phase] += _COLLECTIVE_OPS
        checks[message.phase] += message.check_s
        if message.phase == "forward":
            forward += seconds
        else:
            backward += seconds
    overhead = ground.device.overhead_s
    return Cost(
        forward,
        backward,
        time.forward_dispatch_s + overhead * calls["forward"] + checks["forward"],
        time.input_dispatch_s
        + time.weight_dispatch_s
        + overhead * calls["backward"]
        + checks["backward"],
        piece.saved_bytes,
        _transient(piece),
    )


def _with(piece: Piece, index: int, under: Under) -> Piece:
    messages = list(piece.messages)
    messages[index] = replace(messages[index], under=under)
    return replace(piece, messages=tuple(messages))


def _alone(piece: Piece, device: str) -> OpTime:
    time = timed(piece.op, device)
    if not piece.weight_dtype:
        return time
    other = timed(piece.op._replace(dtype=piece.weight_dtype), device)
    return replace(time, backward_weight_s=other.backward_weight_s)


def _cut(piece: Piece, time: OpTime, ground: Ground) -> OpTime:
    """Products that a share hides a gather behind are done in parts: own, before, after."""
    if piece.op.op_class is not OpClass.MATMUL:
        return time
    if cut := {m.phase for m in piece.messages if m.under == "chunks"}:
        return _chunked(piece, time, _size(ground.tp), ground.device.name, cut)
    phases = {m.under: _size(_levels(m, ground)) for m in piece.messages}
    if size := phases.get("forward share"):
        parts = _parts(piece, size, ground.device.name)
        time = replace(time, forward_s=sum(part.forward_s for part in parts))
    if size := phases.get("input share"):
        parts = _parts(piece, size, ground.device.name)
        time = replace(time, backward_input_s=sum(part.backward_input_s for part in parts))
    return time


def _chunked(piece: Piece, time: OpTime, size: int, device: str, cut: set[Phase]) -> OpTime:
    rows, inner = piece.op.inputs[0].shape
    outer = piece.op.inputs[1].shape[0]
    part = timed(linear("part", max(1, rows // size), inner, outer, piece.op.dtype).op, device)
    if "forward" in cut:
        time = replace(time, forward_s=size * part.forward_s)
    if "backward" in cut:
        time = replace(time, backward_input_s=size * part.backward_input_s)
    return time


def _parts(piece: Piece, size: int, device: str) -> list[OpTime]:
    """Of a rank in the middle, for which all others wait."""
    rows, inner = piece.op.inputs[0].shape
    outer = piece.op.inputs[1].shape[0]
    own = rows // size
    rest = (rows - own) // 2 if size > 2 else rows - own
    cuts = [own, rest, rest] if size > 2 else [own, rest]
    return [timed(linear("part", n, inner, outer, piece.op.dtype).op, device) for n in cuts]


def _slower(piece: Piece, device: str) -> float:
    limited = _LIMITED[:1] if device in _AMPERE_MATMUL else _LIMITED
    if piece.op.op_class not in limited or not _aligned(piece, device):
        return 1.0
    return _CURRENT if piece.current and device in _HOPPER else SUSTAINED.get(device, 1.0)


def _aligned(piece: Piece, device: str) -> bool:
    op = piece.op
    gemms = forward_gemms(op.target, [i.shape for i in op.inputs], op.flops)
    curve = device_named(device).curves[OpClass.MATMUL]
    return all(isinf(row_rate(gemm, curve)) for gemm in gemms)


def _transient(piece: Piece) -> int:
    """Gradients of its operands and result while its backward runs."""
    if not piece.op.output_bytes:
        return 2 * piece.saved_bytes
    return piece.op.output_bytes + sum(i.nbytes for i in piece.op.inputs if not i.is_param)


@lru_cache(maxsize=1 << 16)
def timed(op: LocalOp, device: str) -> OpTime:
    """Of a device preset; the same ops come again in many rows."""
    return op_time(op, device_named(device))


def exposed(message: Message, time: OpTime, ground: Ground) -> float:
    """What of a collective no work of its op hides."""
    levels = _levels(message, ground)
    seconds = collective_time(message.primitive, message.nbytes, levels)
    slower = max((level.link.overlap_compute_slowdown for level in levels), default=1.0)
    cover = message.hidden * _cover_s(message, time, _size(levels))
    if message.under == "chunks":
        cover = min(cover, seconds * (1 - 1 / _size(levels)))
    # While both run, the work gives up processors and bandwidth.
    return max(0.0, seconds - cover) + (slower - 1) * min(seconds, cover)


def _levels(message: Message, ground: Ground) -> Levels:
    levels: Levels = getattr(ground, message.axis if message.axis != "ep" else "dp")
    return levels


def _size(levels: Levels) -> int:
    return prod(level.size for level in levels)


def _cover_s(message: Message, time: OpTime, size: int) -> float:
    match message.under:
        case "nothing" | "tuned":
            return 0.0
        case "forward share":
            return time.forward_s / size
        case "chunks":
            return time.forward_s if message.phase == "forward" else time.backward_input_s
        case "input":
            return time.backward_input_s
        case "input share":
            return time.backward_input_s / size
        case "weight":
            return time.backward_weight_s


def recomputed(
    pieces: tuple[Piece, ...],
    mode: str,
    entry_bytes: int,
    ground: Ground,
    *,
    compiled: bool = False,
    stops_early: bool = False,
) -> Cost:
    """A layer under a recompute mode: none, full, core, op."""
    whole = cost(pieces, ground)
    if mode == "none":
        return whole
    if mode == "full":
        again = cost(_up_to_last(pieces), ground) if stops_early else whole
        saved = entry_bytes
        peak = whole.peak_bytes + whole.saved_bytes
    elif mode == "core":
        again = cost((p for p in pieces if p.core), ground)
        dropped = sum(p.core_bytes for p in pieces)
        saved, peak = whole.saved_bytes - dropped, whole.peak_bytes + dropped
    else:
        kept = {p.name for p in pieces if _kept_by_op_policy(p, pieces)}
        again = cost((p for p in pieces if p.name not in kept), ground)
        if compiled:
            # Nobody reads the last product again: the compiler does not keep it.
            kept.discard(_products(pieces)[-1])
        saved = entry_bytes + sum(p.op.output_bytes for p in pieces if p.name in kept)
        peak = whole.peak_bytes + max(0, whole.saved_bytes - saved)
    return Cost(
        whole.forward_s,
        whole.backward_s + again.forward_s,
        whole.forward_dispatch_s,
        whole.backward_dispatch_s + again.forward_dispatch_s,
        saved,
        peak,
    )


def _up_to_last(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Without the last product and what follows it: backward reads none of their results."""
    last = _products(pieces)[-1]
    return pieces[: [p.name for p in pieces].index(last)]


def _kept_by_op_policy(piece: Piece, pieces: tuple[Piece, ...]) -> bool:
    """torchtitan's per-op policy keeps attention and every second matrix product.

    torchtitan/models: _save_list and mm_count_key; odd products are kept.
    """
    if piece.op.target.startswith("aten.scaled_dot_product_attention"):
        return True
    return piece.name in _products(pieces)[::2]


def _products(pieces: tuple[Piece, ...]) -> list[str]:
    return [p.name for p in pieces if p.op.target == "aten.linear.default"]
