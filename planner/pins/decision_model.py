"""Constraints checked against the model and the cluster that they are for."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from meshwright.ir.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph import Graph
from meshwright.planner.pins.decision_text import near, parse_constraint
from meshwright.planner.pins.decisions import (
    Constraint,
    OnStage,
    OnType,
    Pin,
    Placed,
    StageDevices,
)
from meshwright.planner.pins.placement_rules import check_placed, parameter_names, placement_rules


def parse_constraints(
    given: Sequence[str | Constraint], graph: Graph, cluster: Cluster | None = None
) -> tuple[Constraint, ...]:
    """All constraints in a canonical order, checked against block and parameter names."""
    found = {_checked(parse_constraint(item), graph, cluster): None for item in given}
    if Pin("compile", "true") in found:
        found |= _of_compiled(found)
    placement_rules(found, graph)  # refuses what cannot hold together
    return tuple(sorted(found, key=lambda item: (type(item).__name__, str(item))))


def _of_compiled(found: Iterable[Constraint]) -> dict[Constraint, None]:
    """What follows for compiled blocks: what their ops keep is torch.compile's to say."""
    kept = Pin("saved", "none")
    for item in found:
        if isinstance(item, Pin) and item.name == "saved" and item != kept:
            raise PlanError(
                f"constraints compile=true and {item}: what single ops of compiled blocks keep is "
                "torch.compile's to say; nearest is recompute=full"
            )
    return {kept: None}


def _checked(item: Constraint, graph: Graph, cluster: Cluster | None) -> Constraint:
    match item:
        case OnStage():
            _blocks(item, item.block, graph)
        case Pin():
            if item.scope.block:
                _blocks(item, item.scope.block, graph)
            if item.name == "device_type":
                return _on_type(item, cluster)
        case StageDevices() if cluster and max(item.devices) >= cluster.num_devices:
            raise PlanError(
                f"constraint '{item}': the devices of {cluster.name} are 0 to "
                f"{cluster.num_devices - 1}"
            )
        case Placed():
            return _placed(item, graph)
    return item


def _blocks(item: Constraint, pattern: str, graph: Graph) -> None:
    names = [block.name for block in graph.blocks]
    if not any(fnmatchcase(name, pattern) for name in names):
        nearest = near(pattern, names)
        raise PlanError(f"constraint '{item}': no such block; nearest is {nearest!r}")


def _placed(item: Placed, graph: Graph) -> Placed:
    check_placed(item, graph)
    paths = parameter_names(graph)
    named = {tensor for path, tensor in paths.items() if item.names(path)}
    if not named:
        nearest = near(item.pattern, list(paths))
        raise PlanError(f"constraint '{item}': no such parameter; nearest is {nearest!r}")
    readers = (block.name for block in graph.blocks if not named.isdisjoint(block.params))
    return replace(item, blocks=tuple(readers))


def _on_type(item: Pin, cluster: Cluster | None) -> OnType:
    if cluster is None:
        raise PlanError(f"constraint '{item}' needs a cluster to be checked against")
    known = sorted(device.name for device in cluster.device_types)
    wanted = item.value if isinstance(item.value, tuple) else (item.value,)
    for name in wanted:
        if name not in known:
            raise PlanError(
                f"constraint '{item}': {cluster.name} has no {name!r}; nearest is "
                f"{near(str(name), known)!r}"
            )
    names = [name for node in cluster.nodes for name in node.devices]
    return OnType(item, tuple(rank for rank, name in enumerate(names) if name in wanted))
