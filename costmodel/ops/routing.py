"""Seconds of putting experts' tokens into the order of the ranks that they go to, and of summing
what comes home of each. It follows `codegen.sharded.routing`; what links take is not here.

The kernel `route` does either in one pass; torch's operators cast, clear and add to what is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from meshwright.costmodel.ops.compute import OpTime, dispatched
from meshwright.costmodel.ops.formulas import KernelWork, curve_of, kernel_s
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.routing import Routing
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.placed.route import travels

FINDING = 18
"""Small operators of a forward that find out which token goes where, counted in
`codegen.sharded.routing.routed_experts`."""


def is_routed(op: Op, strategy: Strategy, ranks: int) -> bool:
    """Whether an op's tokens travel on an axis of `ranks` on which it has this strategy."""
    return ranks > 1 and op.target == EXPERTS_TARGET and travels(strategy)


def parts_outside(strategy: Strategy) -> int:
    """In how many parts other axes have cut the experts that this one splits."""
    placed = strategy.inputs[3]
    return placed.outer if isinstance(placed, Shard) else 1


def axes_outside(strategies: Mapping[str, Strategy], axis: str) -> tuple[str, ...]:
    """The axes on which tokens travel that have cut the experts before `axis` does."""
    own = parts_outside(strategies[axis])
    return tuple(
        name for name, each in strategies.items() if travels(each) and parts_outside(each) < own
    )


def on_busiest(time: OpTime, load: float, routing: Routing) -> OpTime:
    """Returns the time of experts on the rank that has `load` times the mean: what was measured at
    these shapes had as many tokens as the mean; a formula has been given the work."""
    band = time.band + routing.band
    if time.source != "measured":
        return replace(time, band=band)
    return replace(
        time, band=band, forward_s=time.forward_s * load,
        backward_input_s=time.backward_input_s * load,
        backward_weight_s=time.backward_weight_s * load,
    )  # fmt: skip


class RoutedTokens(NamedTuple):
    """Tokens that a rank sends to experts on one axis of a mesh."""

    key: str
    """Of the experts' op in its block."""
    op: LocalOp
    routing: Routing
    ranks: int
    """Of the axis."""
    outer: int = 1
    """In how many parts other axes have cut the experts: tokens that came there are sent on."""

    @property
    def come(self) -> float:
        """Rows that are there to be sent, for each token of the rank's own."""
        return self.routing.copies(self.outer) * self.routing.crowd(self.outer)

    @property
    def sent(self) -> float:
        """Rows that go on, for each token of the rank's own."""
        return self.come * self.routing.onward(self.outer, self.ranks)


def routed(tokens_of: RoutedTokens, device: DeviceType, by_kernel: bool) -> OpTime:
    """What routing an experts op's tokens takes, for one micro-batch on one rank: its own, or those
    that have come there as to one of the outer parts of the experts.

    The tokens, the experts that they picked and the weights of these go out, and tokens come home;
    in backward the gradient of what came home goes out, those of tokens and weights come home.
    """
    _, op, routing, ranks, outer = tokens_of
    come = tokens_of.come
    tokens, picked, weights = (come * operand.nbytes for operand in op.inputs[:3])
    copies = routing.onward(outer, ranks)
    width = op.inputs[0].nbytes / max(1, prod(op.inputs[0].shape))  # not as they are multiplied
    wide = 1.0 if by_kernel else max(width, 4) / width
    trained = [come * x.nbytes for x in op.inputs[::2][:2] if op.differentiable and x.requires_grad]
    forward = [(1 + copies) * nbytes for nbytes in (tokens, picked, weights)]
    forward += [*_sum(tokens, copies, wide, by_kernel), *_casts(tokens, copies, wide)]
    backward = [(1 + copies) * tokens] if trained else []
    backward += [nbytes for n in trained for nbytes in _sum(n, copies, 1.0, by_kernel)]
    curve = curve_of(OpClass.COPY, device)  # rows are as wide as tokens

    def seconds(kernels: Sequence[float]) -> float:
        works = (KernelWork(OpClass.COPY, op.dtype, 0.0, nbytes) for nbytes in kernels)
        return sum(kernel_s(work, device) for work in works)

    time = OpTime(seconds(forward), seconds(backward), 0.0, curve.source, curve.band)
    return dispatched(time, device, FINDING + len(forward), len(backward), 0)


def _sum(nbytes: float, copies: float, wide: float, by_kernel: bool) -> tuple[float, ...]:
    """Bytes that each kernel moves which sums rows: in one pass, or on top of zeros, `wide` times
    as wide."""
    if by_kernel:
        return ((1 + copies) * nbytes,)
    return wide * nbytes, 3 * copies * wide * nbytes


def _casts(nbytes: float, copies: float, wide: float) -> tuple[float, ...]:
    """Of rows to what they are summed in, and of tokens back."""
    return ((1 + wide) * nbytes, (1 + wide) * copies * nbytes) if wide > 1.0 else ()
