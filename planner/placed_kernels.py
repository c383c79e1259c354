"""Which kernels that a plan's layout decides are worth it there, and why others are not."""

from dataclasses import dataclass
from math import prod

from meshwright.costmodel.formulas import Work, curve_of, kernel_s
from meshwright.costmodel.fused import why_no_kernel, why_no_peers
from meshwright.costmodel.placement import layouts_of, spots
from meshwright.costmodel.tables import Spot
from meshwright.costmodel.walk import Step
from meshwright.ir.device import DeviceType, OpClass
from meshwright.ir.graph import DTYPE_BYTES, Block, Fusion
from meshwright.ir.inside import copies_of
from meshwright.ir.placed import JOINT, placed
from meshwright.ir.placed.found import Found
from meshwright.ir.placed.route import travels
from meshwright.ir.plan import BlockLayout, Plan, Stage
from meshwright.planner.problem import Problem

TORCHS_STEP = "torch's fused step is one pass already, and nothing is clipped"


def put_in(problem: Problem, plan: Plan) -> tuple[Fusion, ...]:
    """The plan's kernels with their places: all, or those whose price is lower."""
    if any(fusion.priced for fusion in plan.kernels):
        return placed(plan, problem.graph, _Worth(problem, plan))
    return placed(plan, problem.graph)


@dataclass(frozen=True)
class _Worth:
    """Compares a call with the separate ones that it stands for."""

    problem: Problem
    plan: Plan

    def __call__(self, kernel: str, at: Found) -> str:
        if kernel not in JOINT and (why := self._why_no_kernel(at)):
            return why
        # A packing kernel moves two thirds of the bytes, in one launch: cheaper on any curve.
        if kernel == "bucket":
            return ""
        if kernel == "bucket_update":
            return "" if self.plan.max_grad_norm else TORCHS_STEP
        find = self._joint if kernel in JOINT else self._route
        whys = (find(kernel, at, spot) for spot in spots(self.problem.tables, self._stage(at)))
        return next(filter(None, whys), "")

    def _stage(self, at: Found) -> Stage:
        return self.plan.stages[at.stage]

    def _why_no_kernel(self, at: Found) -> str:
        return why_no_kernel(self.problem.cluster, self._stage(at))

    def _block(self, at: Found) -> tuple[Block, BlockLayout]:
        block = self.problem.graph.blocks[self.problem.tables.block_index[at.block]]
        return block, layouts_of(self.plan, self._stage(at))[block.pattern]

    def _joint(self, kernel: str, at: Found, spot: Spot) -> str:
        stage, tables = self._stage(at), self.problem.tables
        if stage.overlap != "none":
            return f"overlap '{stage.overlap}' has its collective beside other work already"
        price = tables.blocks.joint(*self._block(at), spot)[kernel, at.op]
        if why := why_no_peers(tables, stage, price.axis) or price.why:
            return why
        known = f"{price.source}, within {price.band:.0%}"
        return _slower(price.ratio, spot, known)

    def _route(self, kernel: str, at: Found, spot: Spot) -> str:
        tables = self.problem.tables
        walk = tables.blocks.walk(*self._block(at), spot)
        step = next(s for s in walk.trail if isinstance(s, Step) and s.op.key == at.op)
        ours, torchs = routed_s(step, _ranks(step, spot), tables.devices[spot.device])
        return _slower(ours / torchs, spot, tables.devices[spot.device].source)


def _ranks(step: Step, spot: Spot) -> int:
    """Of the axis that splits tokens and experts."""
    strategies = step.strategies.items()
    return prod(spot.sizes[axis] for axis, found in strategies if travels(found))


def _slower(ratio: float, spot: Spot, known: str) -> str:
    longer = f"it would take {ratio:.2f} times as long on {spot.device} ({known})"
    return "" if ratio < 1.0 else longer


def routed_s(step: Step, ranks: int, device: DeviceType) -> tuple[float, float]:
    """Seconds of bringing rows home and of the gradient of sending them, by our kernel and by
    torch's operators, which clear, cast and add to what is there. Sending is a gather both ways."""
    hidden, (_, picked) = step.local.inputs[0], step.local.inputs[1].shape
    width = DTYPE_BYTES[step.local.dtype]
    elements = hidden.nbytes / width
    rows = elements * copies_of(ranks, picked)
    casts = (rows + elements) * (width + 4) if width < 4 else 0.0
    held = max(width, 4)

    def seconds(nbytes: float, launches: int) -> float:
        work = Work(OpClass.GATHER, step.local.dtype, 0.0, nbytes)
        floor_s = curve_of(OpClass.GATHER, device).floor_s
        return kernel_s(work, device) + (launches - 1) * floor_s

    home = casts + elements * held + 3 * rows * held
    back = elements * width + 3 * rows * width
    return seconds(2 * (rows + elements) * width, 2), seconds(home + back, 6 if casts else 4)
