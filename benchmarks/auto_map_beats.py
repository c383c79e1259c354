"""Where layouts that an agent has found with the simulator beat those that a linear price ranks."""

from typing import Any

from benchmarks.auto_map_exact import Instance, brute_force, learned, operators
from benchmarks.auto_map_models import searched
from meshwright.planner.across.ways import ways
from meshwright.planner.dqn.decisions import Pruning
from meshwright.planner.dqn.flips import best_of, flipped
from meshwright.planner.dqn.operators import Operators

FLIPS = 200


def _by_single_dims(agent: Operators) -> float:
    learned(agent, 0)
    single = agent.unlinked()
    list(flipped(single, FLIPS))
    return best_of(single).verdict.value


def beaten(asked: Instance) -> dict[str, Any]:
    """Simulated steps on the instance's mesh: with the layouts that the ILP has priced, the best of
    all and the agent's; and of the plans of both searchers where that mesh is asked for."""
    agent = operators(asked, Pruning())
    best_s, _ = brute_force(agent)
    pins = (*asked.pins, f"tp={asked.tp}", f"dp={asked.dp}", "num_microbatches=1")
    ilp, dqn = (
        searched(lambda: asked.graph, asked.cluster, one, precision="fp32", constraints=pins)
        for one in ("ilp", "dqn")
    )
    return {
        "priced_s": agent.known(ways(asked.problem)).value, "best_s": best_s,
        "agent_s": _by_single_dims(agent.afresh()),
        "ilp_s": ilp["step_s"], "dqn_s": dqn["step_s"],
    }  # fmt: skip
