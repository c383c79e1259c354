"""Merak's stage-aware recompute (arXiv:2206.04959): later stages hold less, so they recompute less.

If stage 0 recomputes the share r of its layers, a later stage s of S recomputes
1 - (1-r)(S-1)/(S-s) of its own, none if that is negative, and the last stage none; the first layers
of a stage keep theirs. A single stage is the last one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.trace.changing import reads_changed


def recomputable(graph: Graph, blocks: Sequence[Block]) -> tuple[str, ...]:
    """Patterns among `blocks` that full recompute is for: those that repeat in the model, or all.

    Blocks that read what forward changes cannot run again. The head and the loss are left out where
    there are layers: they are live at their backward.
    """
    count = graph.pattern_counts
    repeated = max(count.values(), default=0) > 1
    patterns = dict.fromkeys([block.pattern for block in blocks if not reads_changed(graph, block)])
    return tuple([pattern for pattern in patterns if count[pattern] > 1 or not repeated])


def layers(plan: Plan, graph: Graph, index: int) -> tuple[str, ...]:
    """Names of the blocks of a stage that recompute is for."""
    blocks = plan.stage_blocks(graph, index)
    patterns = recomputable(graph, blocks)
    return tuple(block.name for block in blocks if block.pattern in patterns)


def ratios(num_stages: int, first: float) -> tuple[float, ...]:
    """Share of the layers that each stage recomputes."""
    last = num_stages - 1
    later = (1 - (1 - first) * last / (num_stages - s) for s in range(1, last))
    return (first, *(max(0.0, share) for share in later), 0.0) if last else (0.0,)


def stage_aware(plan: Plan, graph: Graph, first: float) -> tuple[Stage, ...]:
    """The stages, the first of which recomputes the share `first` of its layers."""
    shares = ratios(len(plan.stages), first)
    return tuple(
        replace(stage, recompute=_again(layers(plan, graph, i), shares[i]), saved={})
        for i, stage in enumerate(plan.stages)
    )


def _again(names: Sequence[str], share: float) -> dict[str, Literal["none", "full"]]:
    kept = int((1 - share) * len(names) + 1e-9)
    return dict.fromkeys(names[kept:], "full")


def is_stage_aware(plan: Plan, graph: Graph) -> bool:
    """Whether the stages recompute so, whatever the share of the first."""
    several = len(plan.schedule.rows) < len(plan.stages)
    if several or any(any(stage.saved.values()) for stage in plan.stages):
        return False
    now = [
        [block.name for block in plan.stage_blocks(graph, i) if stage.recomputes(block)]
        for i, stage in enumerate(plan.stages)
    ]
    count = len(layers(plan, graph, 0))
    first = len(now[0]) / count if count else 0.0
    asked = stage_aware(plan, graph, first)
    return now == [list(stage.recompute) for stage in asked]
