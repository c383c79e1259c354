"""Layouts in which all is split that can be, however small."""

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import BlockLayout, model_mesh
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.inside.prices import AlphaBeta

SPLIT_ALL = AlphaBeta(latency_s=0.0, state_per_parameter_byte=1e6)
"""Prices at which every parameter that can be split is."""


def split_all(graph: Graph, tp: int) -> tuple[BlockLayout, ...]:
    """The layouts of all blocks over `tp` ranks."""
    mesh = model_mesh({"tp": tp})
    return solve_layouts(graph, mesh, usual(mesh, SPLIT_ALL))
