"""Forms of retention that say of how many layers of each stage another form is said."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.forms.retention import retention
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


def shared_out(plan: Plan, graph: Graph, name: str, first: float) -> tuple[Stage, ...]:
    """The stages with what a form says, the first of which says it of the share `first` of its
    layers. Nothing else is said of any."""
    form = retention(name)
    assert form.share is not None  # of `forms.retention.shared_out`
    shares = form.share(len(plan.stages), first)
    return tuple(
        replace(stage, saved={}, recompute=_said(layers(plan, graph, i), shares[i], form.fate))
        for i, stage in enumerate(plan.stages)
    )


def _said(names: Sequence[str], share: float, fate: str) -> dict[str, Any]:
    kept = int((1 - share) * len(names) + 1e-9)
    return dict.fromkeys(names[kept:], fate)


def is_shared_out(plan: Plan, graph: Graph, name: str) -> bool:
    """Whether the stages are as a form says, whatever the share of the first."""
    several = len(plan.schedule.rows) < len(plan.stages)
    if several or any(any(stage.saved.values()) for stage in plan.stages):
        return False
    now = [
        [block.name for block in plan.stage_blocks(graph, i) if stage.recomputes(block)]
        for i, stage in enumerate(plan.stages)
    ]
    count = len(layers(plan, graph, 0))
    first = len(now[0]) / count if count else 0.0
    asked = shared_out(plan, graph, name, first)
    return now == [list(stage.recompute) for stage in asked]
