"""What blocks cost that make again what is cheap: between two numbers of samples, on the line.

Bytes are on that line exactly, seconds about; plans are judged by the cost of each block itself.
"""

from dataclasses import replace
from math import prod

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.graph.graph import Block
from meshwright.ir.plan.plan import BlockLayout
from meshwright.ir.plan.sampled import sampled_axes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.saved_modes import policy_of

_MANY = 8
"""Times as many samples at the other end of the line as at this, where each rank has one."""
_More = tuple[float, ...]
"""What a mode changes: seconds, seconds of communication, bytes made again, bytes saved inside, of
inputs, of outputs."""
_Ends = tuple[tuple[int, _More], tuple[int, _More]]


class ModeCosts:
    """Of one problem; keeps what it has computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._ends: dict[object, _Ends] = {}

    def exact(self, block: Block, layout: BlockLayout, spot: BlockSpot, mode: str) -> BlockCost:
        """As plans are judged."""
        policy = policy_of(self.problem, block.pattern, mode)
        return self.problem.tables.block(block, layout, spot, policy or False)

    def about(
        self, block: Block, layout: BlockLayout, spot: BlockSpot, mode: str, kept: BlockCost
    ) -> BlockCost:
        """The cost of a block that costs `kept` when it keeps all."""
        if not policy_of(self.problem, block.pattern, mode):
            return kept
        (least, one), (most, many) = self._line(block, layout, spot, mode)
        far = (spot.samples - least) / max(1, most - least)
        more = [near + (end - near) * far for near, end in zip(one, many, strict=True)]
        again_s, talking_s = max(0.0, more[0]), max(0.0, more[1])
        sizes = [round(x) for x in more[2:]]
        inputs = sizes[2 : 2 + len(kept.saved_inputs)]
        outputs = sizes[2 + len(inputs) :]
        return replace(
            kept,
            backward_input_s=kept.backward_input_s + again_s,
            comm_backward_s=kept.comm_backward_s + talking_s,
            saved_bytes=max(0, kept.saved_bytes + sizes[1]),
            saved_inputs=tuple(map(sum, zip(kept.saved_inputs, inputs, strict=True))),
            saved_outputs=tuple(map(sum, zip(kept.saved_outputs, outputs, strict=True))),
            workspace_bytes=kept.workspace_bytes + max(0, sizes[0]),
        )

    def _line(self, block: Block, layout: BlockLayout, spot: BlockSpot, mode: str) -> _Ends:
        """At the fewest samples, and at many."""
        key = (
            block.pattern,
            mode,
            self.problem.tables.facts.fed(block),
            self.problem.tables.blocks.layout_key(layout),
            spot.device,
        )
        if key not in self._ends:
            unit = prod([dict(spot.model).get(axis, 1) for axis in sampled_axes(layout)])
            most = max(unit, min(_MANY * unit, self.problem.batch))
            one, many = (
                (n, self._more(block, layout, replace(spot, samples=n, dp=1, dp_levels=()), mode))
                for n in (unit, most - most % unit)
            )
            self._ends[key] = one, many
        return self._ends[key]

    def _more(self, block: Block, layout: BlockLayout, spot: BlockSpot, mode: str) -> _More:
        kept = self.problem.tables.block(block, layout, spot)
        cost = self.exact(block, layout, spot, mode)
        borders = [
            now - before
            for own, others in (
                (kept.saved_inputs, cost.saved_inputs), (kept.saved_outputs, cost.saved_outputs)
            )
            for before, now in zip(own, others, strict=True)
        ]  # fmt: skip
        return (
            cost.backward_s - kept.backward_s + (cost.forward_s - kept.forward_s),
            cost.comm_backward_s - kept.comm_backward_s,
            float(cost.remade_bytes),
            float(cost.saved_bytes - kept.saved_bytes),
            *map(float, borders),
        )
