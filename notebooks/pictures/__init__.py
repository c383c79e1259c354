"""The pictures of the notebooks: a plan, its pipeline, its memory and its search."""

from pictures.costs import memory, memory_over_time, side_by_side, step
from pictures.found import progress, search
from pictures.inputs import cluster, model
from pictures.pipeline import draw_rows, timeline, works_legend
from pictures.stages import placements, stages
from pictures.style import CLOCK, SOFT, STAGES, WIDTH, closed, legend

__all__ = [
    "CLOCK", "SOFT", "STAGES", "WIDTH", "closed", "cluster", "draw_rows", "legend", "memory",
    "memory_over_time", "model", "placements", "progress", "search", "side_by_side", "stages",
    "step", "timeline", "works_legend",
]  # fmt: skip
