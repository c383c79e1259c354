"""Constraints checked against the model and the cluster that they are for."""

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import nearest
from meshwright.ir.graph.graph import Graph
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.pins.decisions import (
    Constraint,
    OnStage,
    Pin,
    Placed,
    StageDevices,
)
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.pins.parameter_pins import ParametersAs
from meshwright.planner.pins.placement_rules import check_placed, parameter_names, placement_rules


def parse_constraints(
    given: Sequence[str | Constraint], graph: Graph, cluster: Cluster | None = None
) -> tuple[Constraint, ...]:
    """All constraints in a canonical order, checked against block and parameter names."""
    found = {_checked(parse_constraint(item), graph, cluster): None for item in given}
    pins = tuple(item for item in found if isinstance(item, Pin))
    for pin in pins:
        if (together := DECISIONS[pin.name].together) is not None:
            found |= dict.fromkeys(together(pin, pins))
    placement_rules(found, graph)  # refuses what cannot hold together
    return tuple(sorted(found, key=lambda item: (type(item).__name__, str(item))))


def _checked(item: Constraint, graph: Graph, cluster: Cluster | None) -> Constraint:
    match item:
        case OnStage():
            _blocks(item, item.block, graph)
        case Pin():
            if item.scope.block:
                _blocks(item, item.scope.block, graph)
            return _pin(item, cluster)
        case StageDevices() if cluster and max(item.devices) >= cluster.num_devices:
            raise PlanError(
                f"constraint '{item}': the devices of {cluster.name} are 0 to "
                f"{cluster.num_devices - 1}"
            )
        case Placed():
            return _placed(item, graph)
        case ParametersAs():
            item.check(graph)
    return item


def _pin(item: Pin, cluster: Cluster | None) -> Constraint:
    decision = DECISIONS[item.name]
    if decision.resolve is not None:
        return decision.resolve(item, cluster)
    if not isinstance(item.value, tuple) and item.value in decision.means:
        return replace(item, chosen=decision.means[item.value])
    return item


def _blocks(item: Constraint, pattern: str, graph: Graph) -> None:
    names = [block.name for block in graph.blocks]
    if not any(fnmatchcase(name, pattern) for name in names):
        near = nearest(pattern, names)
        raise PlanError(f"constraint '{item}': no such block; nearest is {near!r}")


def _placed(item: Placed, graph: Graph) -> Placed:
    check_placed(item, graph)
    paths = parameter_names(graph)
    named = {tensor for path, tensor in paths.items() if item.names(path)}
    if not named:
        near = nearest(item.pattern, list(paths))
        raise PlanError(f"constraint '{item}': no such parameter; nearest is {near!r}")
    readers = (block.name for block in graph.blocks if not named.isdisjoint(block.params))
    return replace(item, blocks=tuple(readers))
