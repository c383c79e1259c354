"""What a reader of a plan should know that its numbers do not say."""

from collections.abc import Iterator

from meshwright.ir.graph import Graph
from meshwright.ir.plan import BlockLayout, Plan

BATCH_STATISTICS = ("batch_norm",)
"""Parts of op names whose result depends on the whole batch."""


def notes_of(plan: Plan, graph: Graph) -> tuple[str, ...]:
    """Short sentences, most important first."""
    return (*_batch_statistics(plan, graph), *_unsplit(plan, graph), *_idle(plan))


def _batch_statistics(plan: Plan, graph: Graph) -> Iterator[str]:
    found = [op for op in graph.ops if any(part in op.target for part in BATCH_STATISTICS)]
    if not found:
        return
    if any(stage.dp > 1 for stage in plan.stages):
        yield (
            f"{len(found)} batch norms (first: {found[0].module_path}) couple the samples of a "
            "batch: their statistics are synchronised over dp"
        )
    if plan.num_microbatches > 1:
        yield (
            f"{len(found)} batch norms take statistics per micro-batch of "
            f"{plan.samples_per_microbatch} samples, as in one process with gradient accumulation"
        )


def _unsplit(plan: Plan, graph: Graph) -> Iterator[str]:
    """Patterns that a stage with tp > 1 runs whole on every rank."""
    used = {name for stage in plan.stages if stage.tp > 1 for name in stage.layouts.values()}
    patterns = {block.pattern for block in graph.blocks}
    whole = [x for x in plan.layouts if x.name in used and x.pattern in patterns and not _splits(x)]
    if whole:
        names = ", ".join(sorted({layout.pattern for layout in whole}))
        yield f"tp splits no op of {names}: every rank of tp computes it whole"


def _splits(layout: BlockLayout) -> bool:
    return any("S(" in strategies.get("tp", "") for strategies in layout.ops.values())


def _idle(plan: Plan) -> Iterator[str]:
    idle = plan.cluster.num_devices - plan.world_size
    if idle > 0:
        yield f"{idle} of {plan.cluster.num_devices} devices are not used"
