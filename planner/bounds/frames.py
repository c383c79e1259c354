"""Frames: what a bound, and a search inside it, takes as given."""

from dataclasses import dataclass

from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import microbatch_counts, pipeline_sizes, schedules

UNITS = 16
"""At most so many units of devices are shared out unevenly."""


@dataclass(frozen=True, slots=True, order=True)
class Frame:
    """What is fixed first."""

    num_ranks: int
    num_microbatches: int


def frames(problem: Problem) -> tuple[Frame, ...]:
    """All frames that may have a plan, small micro-batches first."""
    return tuple(
        Frame(ranks, count)
        for count in reversed(microbatch_counts(problem))
        for ranks in pipeline_sizes(problem)
        if group_sizes(problem, ranks) and any(True for _ in schedules(problem, ranks))
    )


def unit(problem: Problem) -> int:
    """Devices that are shared out together where groups may differ; 0 if they may not."""
    cluster = problem.cluster
    if cluster.num_devices <= UNITS:
        return 1
    if cluster.num_nodes > UNITS:
        return 0
    sizes = {len(node.devices) for node in cluster.nodes}
    mixed = len(set(problem.tables.device_names)) > 1
    if len(sizes) == 1 and mixed:
        return sizes.pop()
    return 0


def group_sizes(problem: Problem, ranks: int) -> tuple[int, ...]:
    """Numbers of devices that a pipeline rank may have; none if they cannot be shared out."""
    devices, step = problem.cluster.num_devices, unit(problem)
    if ranks == 1:
        return (devices,)
    if step and ranks * step <= devices:
        return tuple(range(step, devices - step * (ranks - 1) + 1, step))
    return (devices // ranks,) if devices % ranks == 0 else ()
