"""Parameters that some rank of a plan does not hold whole, and where they are cut."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.codegen.lower.stored import stored_splits
from meshwright.forms.folding import stage_of
from meshwright.forms.stepping import row_borders
from meshwright.forms.sync import exchange_of
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.summed import summed_axes


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """How a parameter is split among ranks that step it."""

    how: str
    """In words."""
    borders: tuple[int, ...] = ()
    """Of runs of rows: the first element of each, row-major, and the end. Empty: other parts."""
    by_owner: bool = False
    """One rank steps all of it, and the others none."""


def cuts_of(plan: Plan, graph: Graph, names: frozenset[str] | None) -> Iterator[ParameterCut]:
    """Yields the cuts of trained parameters; `names`: of these paths only."""
    for index, stage in enumerate(plan.stages):
        blocks, sums = plan.stage_blocks(graph, index), summed_axes(plan, graph, index)
        for name in dict.fromkeys(name for block in blocks for name in block.params):
            tensor = graph.tensors[name]
            if not tensor.requires_grad or (names is not None and tensor.fqn not in names):
                continue
            own = stage_of(stage, tensor.fqn, sums)
            exchange, ranks = exchange_of(own), own.mesh.get("dp_shard", 1)
            if exchange.is_split("optimizer") and exchange.owns_whole:
                how = f"under {own.sync_form} {tensor.fqn} has one owner, who alone steps it"
                yield ParameterCut(how, by_owner=True)
            elif exchange.is_split("optimizer"):
                how = f"zero={own.zero} splits the rows of {tensor.fqn} over dp_shard={ranks}"
                # Other forms may give ranks other parts than these.
                borders = row_borders(tensor.shape, ranks) if own.sync is None else ()
                yield ParameterCut(how, borders)
            for axis, placed in stored_splits(graph, plan, index, name).items():
                if dict(stage.model).get(axis, 1) > 1:
                    yield ParameterCut(f"{tensor.fqn} is split over {axis} as {placed}")
