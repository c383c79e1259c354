"""Where layouts that an agent has found with the simulator beat those that a linear price ranks."""

from typing import Any

from benchmarks.auto_map.exact import Instance, learned, operators
from benchmarks.auto_map.models import searched
from meshwright.planner.across.mesh_variants import ways
from meshwright.planner.searchers.dqn.decisions import Pruning
from meshwright.planner.searchers.dqn.flips import best_of, flipped
from meshwright.planner.searchers.dqn.judge import Verdict

FLIPS = 200
PINS = ("zero=0", "recompute=none", "saved=none")
"""Else state is shared or activations are made again before a layout matters for memory."""


def beaten(asked: Instance) -> dict[str, Any]:
    """Simulated steps on the instance's mesh: with the layouts that the ILP has priced, and with
    the agent's; and of the plans of both searchers."""
    agent = operators(asked, Pruning())
    learned(agent, 0)
    single = agent.unlinked()
    list(flipped(single, FLIPS))
    ilp, dqn = (
        searched(
            lambda: asked.graph, asked.cluster, one, precision="fp32",
            constraints=(*asked.pins, f"tp={asked.tp}", *PINS),
        )
        for one in ("ilp", "dqn")
    )  # fmt: skip
    return {
        "priced_s": _seconds(agent.known(ways(asked.problem))),
        "agent_s": _seconds(best_of(single).verdict),
        "ilp_s": ilp["step_s"], "ilp": ilp["name"], "ilp_cpu_s": ilp["cpu_s"],
        "dqn_s": dqn["step_s"], "dqn": dqn["name"], "dqn_cpu_s": dqn["cpu_s"],
    }  # fmt: skip


def _seconds(verdict: Verdict) -> float | None:
    """None where nothing fits."""
    return verdict.value if verdict.fits else None
