"""Problems as on clusters of GPUs."""

from dataclasses import replace

from meshwright.planner.problem.problem import Problem
from tests.planner.problems import TINY, problem


def on_gpus(name: str) -> Problem:
    """A tiny problem on devices that do not share cores: there collectives do hide."""
    asked = TINY[name]()
    device = replace(asked.cluster.device_types[0], kind="cuda")
    machine = replace(asked.cluster, device_types=(device,))
    pins = asked.constraints
    return problem(asked.graph, machine, constraints=pins, objective=asked.objective)
