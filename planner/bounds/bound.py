"""A step time that no plan of the searched space can beat, by the same cost model."""

from meshwright.planner.across.places import Places, orders
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.bounds.beside import LeastCosts
from meshwright.planner.bounds.relaxation import Relaxation, frames
from meshwright.planner.problem.problem import Problem


def lower_bound(problem: Problem, *, waits: bool = True) -> float:
    """Seconds per step: the least of all numbers of pipeline ranks and micro-batches.

    With `waits`, of plans whose blocks wait for their collectives and run as they are; else of
    all: whatever overlap hides, torch.compile and kernels save.
    """
    runs = RunCosts(problem) if waits else LeastCosts(problem)
    relaxation = Relaxation(runs, [Places(problem, order) for order in orders(problem)])
    bounds = [relaxation.bound(frame).seconds for frame in frames(problem)]
    found = min(bounds, default=0.0)
    return found if found < float("inf") else 0.0
