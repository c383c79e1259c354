"""Which kernels that a plan's layout decides are worth it there, and why others are not."""

from dataclasses import dataclass

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.ops.fused import why_no_kernel, why_no_peers
from meshwright.costmodel.ops.routing import routed
from meshwright.costmodel.stage.placement import layouts_of, spots
from meshwright.forms.sync import exchange_of
from meshwright.forms.updates import update, with_kernel
from meshwright.ir.graph.graph import Block, Fusion
from meshwright.ir.memo import Memo
from meshwright.ir.placed import joint_kernels, placed
from meshwright.ir.placed.found import FoundSpot
from meshwright.ir.placed.spots import Known
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage
from meshwright.ir.precision import precision
from meshwright.planner.problem.problem import Problem

TORCHS_STEP = "torch's fused step is one pass already, and nothing is clipped or packed"
WAITS = (
    "losses are scaled, and the host would wait in each step to know whether they overflow; "
    "torch's fused step is told on the device"
)

_known: Memo[None, Known] = Memo()


def put_in(problem: Problem, plan: Plan) -> tuple[Fusion, ...]:
    """The plan's kernels with their places: all, or those whose price is lower."""
    priced = any(fusion.priced for fusion in plan.kernels)
    return placed(
        plan, problem.graph, _Worth(problem, plan, priced), _known.of(problem).setdefault(None, {})
    )


@dataclass(frozen=True)
class _Worth:
    """Compares a call with the separate ones that it stands for."""

    problem: Problem
    plan: Plan
    priced: bool
    """Else all that are right are worth it."""

    def __call__(self, kernel: str, at: FoundSpot) -> str:
        if kernel == "bucket_update" and not update(self.plan.optimizer).step:
            known = ", ".join(with_kernel())
            return f"no kernel steps {self.plan.optimizer}; there are {known}"
        if not self.priced:
            return ""
        if kernel not in joint_kernels() and (why := self._why_no_kernel(at)):
            return why
        # A packing kernel moves two thirds of the bytes, in one launch: cheaper on any curve.
        if kernel == "bucket":
            return ""
        if kernel == "bucket_update":
            if precision(self.plan.precision).scales_loss:
                return WAITS
            gathers = exchange_of(self._stage(at)).published
            return "" if self.plan.max_grad_norm or gathers else TORCHS_STEP
        find = self._joint if kernel in joint_kernels() else self._route
        whys = (find(kernel, at, spot) for spot in spots(self.problem.tables, self._stage(at)))
        return next(filter(None, whys), "")

    def _stage(self, at: FoundSpot) -> Stage:
        return self.plan.stages[at.stage]

    def _why_no_kernel(self, at: FoundSpot) -> str:
        return why_no_kernel(self.problem.cluster, self._stage(at))

    def _block(self, at: FoundSpot) -> tuple[Block, BlockLayout]:
        block = self.problem.graph.blocks[self.problem.tables.block_index[at.block]]
        return block, layouts_of(self.plan, self._stage(at))[block.pattern]

    def _joint(self, kernel: str, at: FoundSpot, spot: BlockSpot) -> str:
        stage, tables = self._stage(at), self.problem.tables
        if stage.overlap != "none":
            return f"overlap '{stage.overlap}' has its collective beside other work already"
        if at.stage in paired_stages(self.plan):
            return "its stage works in turns with another one beside its collectives already"
        price = tables.blocks.joint(*self._block(at), spot)[kernel, at.op]
        if why := why_no_peers(tables, stage, price.axis) or price.why:
            return why
        known = f"{price.source}, within {price.band:.0%}"
        return _slower(price.ratio, spot, known)

    def _route(self, kernel: str, at: FoundSpot, spot: BlockSpot) -> str:
        tables = self.problem.tables
        walk = tables.blocks.walk(*self._block(at), spot)
        here = [tokens for tokens in walk.routes if tokens.key == at.op]
        ours, torchs = (
            [routed(tokens, tables.devices[spot.device], by_kernel) for tokens in here]
            for by_kernel in (True, False)
        )
        known = f"{ours[0].source}, within {ours[0].band:.0%}"
        ratio = sum(one.total_s for one in ours) / sum(one.total_s for one in torchs)
        return _slower(ratio, spot, known)


def _slower(ratio: float, spot: BlockSpot, known: str) -> str:
    longer = f"it would take {ratio:.2f} times as long on {spot.device} ({known})"
    return "" if ratio < 1.0 else longer
