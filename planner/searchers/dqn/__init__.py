"""Reinforcement learning over the plan space of the ILP searcher, in the manner of Auto-MAP.

A masked DQN agent decides micro-batches, cuts, meshes, recompute and schedule of a pipeline, and is
paid by the simulator (`planner.searchers.dqn.pipelines`). It begins with what the agent that ships
with the package has learnt on small models (`planner/searchers/dqn/agents`). What it finds is
improved by small steps. Another agent decides which dims of parameters the model axes of the best
plans split, and adds layouts that the simulator likes better than those the ILP has priced
(`planner.searchers.dqn.operators`). Small spaces are gone through to the end, so that nothing is
left open.
"""

from collections.abc import Iterator

from meshwright.ir.errors import PlanError
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.offers import Offer

LOGS = "how the agents learn, where `Problem.log_dir` says so"


def search(problem: Problem) -> Iterator[Offer]:
    """Offers every plan that is simulated."""
    try:
        from meshwright.planner.searchers.dqn.explore import Explorer
    except ModuleNotFoundError as error:
        if error.name not in ("gymnasium", "stable_baselines3"):
            raise
        raise PlanError(
            f"searcher 'dqn' needs the package {error.name}: pip install 'meshwright[rl]'; "
            "nearest without it is 'ilp'"
        ) from error
    yield from Explorer(problem).run()
