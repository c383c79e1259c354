"""What blocks take at least where collectives may be hidden, blocks compiled and kernels put in.

`Stage.overlap` and the kernels of `ir.placed` have a block compute while its collectives go on: it
then takes no less than its computing. What halves of a micro-batch or a kernel save of that, too,
is taken off; of blocks as they are and as torch.compile makes them the lesser figure counts.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.block.overlap import NOTHING, Hidden
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.ops.fused import kernels_save
from meshwright.ir.graph.graph import Block
from meshwright.ir.placed import joint_kernels
from meshwright.ir.plan.plan import HALVING, BlockLayout
from meshwright.planner.across.run_costs import At, RunCosts
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.problem import Problem


class LeastCosts(RunCosts):
    """Costs that no plan goes below, whatever it has beside its collectives."""

    waits = False

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._bytes: dict[At, list[BlockCost]] = {}

    def bytes_of(self, at: At) -> list[BlockCost]:
        """Without pricing what may be hidden, which changes no bytes."""
        at = self.canonical(at)
        if at not in self._bytes:
            layouts = self.layouts(at.spot.model, at.variant)
            self._bytes[at] = self._for_all(
                [_least(self._costs_of(block, layouts[block.pattern], at.spot))
                 for block in self._first_of_kind]
            )  # fmt: skip
        return self._bytes[at]

    def _block_cost(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> BlockCost:
        saved = self._saved(block, layout, spot)
        costs = self._costs_of(block, layout, spot)
        return _least([self._without(cost, saved) for cost in costs])

    def _costs_of(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> list[BlockCost]:
        """Of the block as it is and, where that was measured, compiled."""
        costs = [super()._block_cost(block, layout, spot)]
        compiled = replace(spot, compiled=True)
        if self.problem.tables.blocks.is_measured(block, layout, compiled):
            costs.append(self.problem.tables.block(block, layout, compiled))
        return costs

    def _saved(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> Hidden:
        """Of computing, at most, as negative seconds; collectives are told apart."""
        tables = self.problem.tables
        names = frozenset(fusion.kernel for fusion in self.problem.graph.fusions)
        ways = [NOTHING, *self._in_halves(block, layout, spot)]
        if names & joint_kernels() and spot.model:
            ways.append(
                kernels_save(tables.blocks.joint(block, layout, spot), names & joint_kernels())
            )
        best = Hidden(
            more_forward_s=min(way.more_forward_s for way in ways),
            more_backward_s=min(way.more_backward_s for way in ways),
        )
        if "route" not in names:
            return best
        routed = tables.blocks.routing(block, layout, spot)
        return Hidden(
            more_forward_s=best.more_forward_s + min(0.0, routed.more_forward_s),
            more_backward_s=best.more_backward_s + min(0.0, routed.more_backward_s),
        )

    def _in_halves(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> Iterator[Hidden]:
        """The only kind of overlap under which a block may compute for a shorter time."""
        if not spot.model or not self._may_halve:
            return
        blocks = self.problem.tables.blocks
        if blocks.parts(block, layout, spot):
            forward_s, backward_s = blocks.in_halves_s(block, layout, spot)
            yield Hidden(more_forward_s=forward_s, more_backward_s=backward_s)

    @cached_property
    def _may_halve(self) -> bool:
        return bool(allowed(self.problem.constraints, "overlap", HALVING))

    def _without(self, cost: BlockCost, saved: Hidden) -> BlockCost:
        """The cost without what may be hidden; where processes share cores, nothing is."""
        hides = self.slow == 1.0
        sent_s, sent_back_s = cost.comm_forward_s * hides, cost.comm_backward_s * hides
        less_s = saved.more_forward_s - sent_s
        inputs_s = cost.backward_input_s + saved.more_backward_s - sent_back_s
        again_s = None if cost.no_grad_s is None else max(0.0, cost.no_grad_s + less_s)
        return replace(
            cost,
            forward_s=max(0.0, cost.forward_s + less_s),
            backward_input_s=max(0.0, inputs_s),
            backward_weight_s=cost.backward_weight_s - cost.accumulate_s,
            comm_forward_s=cost.comm_forward_s - sent_s,
            comm_backward_s=cost.comm_backward_s - sent_back_s,
            no_grad_s=again_s, accumulate_s=0.0,
        )  # fmt: skip


def _least(costs: list[BlockCost]) -> BlockCost:
    """The lesser of each figure."""
    if len(costs) == 1:
        return costs[0]
    again = [cost.forward_s if cost.no_grad_s is None else cost.no_grad_s for cost in costs]
    return replace(
        costs[0],
        forward_s=min(cost.forward_s for cost in costs),
        backward_input_s=min(cost.backward_input_s for cost in costs),
        backward_weight_s=min(cost.backward_weight_s for cost in costs),
        comm_forward_s=max(cost.comm_forward_s for cost in costs),
        comm_backward_s=max(cost.comm_backward_s for cost in costs),
        no_grad_s=min(again),
        tail_s=max(cost.tail_s for cost in costs),
        comm_tail_s=min(cost.comm_tail_s for cost in costs),
        saved_bytes=min(cost.saved_bytes for cost in costs),
        workspace_bytes=min(cost.workspace_bytes for cost in costs),
        eased_bytes=max(cost.eased_bytes for cost in costs),
        late_bytes=max(cost.late_bytes for cost in costs),
    )
