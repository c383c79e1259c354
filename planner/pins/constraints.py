"""What a user pins, as searchers ask for it: `"tp=2"`, `"block h.3 on stage 1"`, `"memory<=60GB"`.

Types: `decisions`; text: `decision_text`; checks: `decision_model` and `decisions_kept`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import MODEL_AXES, ModelMesh, model_mesh
from meshwright.planner.pins.decision_model import parse_constraints as parse_constraints
from meshwright.planner.pins.decision_text import parse_constraint as parse_constraint
from meshwright.planner.pins.decisions import EVERYWHERE as EVERYWHERE
from meshwright.planner.pins.decisions import Constraint as Constraint
from meshwright.planner.pins.decisions import MemoryCap as MemoryCap
from meshwright.planner.pins.decisions import OnStage as OnStage
from meshwright.planner.pins.decisions import OnType as OnType
from meshwright.planner.pins.decisions import Pin as Pin
from meshwright.planner.pins.decisions import Placed as Placed
from meshwright.planner.pins.decisions import Scope as Scope
from meshwright.planner.pins.decisions import StageDevices as StageDevices
from meshwright.planner.pins.decisions import StageMesh as StageMesh
from meshwright.planner.pins.decisions import StageShares as StageShares
from meshwright.planner.pins.decisions import StepCap as StepCap
from meshwright.planner.pins.decisions_kept import broken as broken
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.pins.parameter_pins import ParametersAs as ParametersAs
from meshwright.planner.pins.placement_rules import NO_RULES as NO_RULES
from meshwright.planner.pins.placement_rules import PlacementRules as PlacementRules
from meshwright.planner.pins.placement_rules import placement_rules as placement_rules

T = TypeVar("T", bound=int | str)


def pinned(constraints: Iterable[Constraint], name: str) -> int | str | None:
    """The value that a decision is pinned to in every stage; None if it is free."""
    for pin in pins_of(constraints, name):
        if pin.relation == "=" and not isinstance(pin.value, tuple):
            return pin.value
        if isinstance(pin.value, tuple) and len(pin.value) == 1:
            return pin.value[0]
    return None


def allowed(constraints: Iterable[Constraint], name: str, values: Iterable[T]) -> tuple[T, ...]:
    """Those of `values` that all pins of the decision in every stage leave.

    For one stage: `allowed(of_stage(constraints, ...), name, values)`.
    """
    pins = pins_of(constraints, name)
    return tuple(value for value in values if all(pin.admits(value) for pin in pins))


def pins_of(constraints: Iterable[Constraint], name: str) -> list[Pin]:
    """The pins of a decision that hold in every stage."""
    return [
        c for c in constraints if isinstance(c, Pin) and c.name == name and c.scope == EVERYWHERE
    ]


def freed(
    constraints: Iterable[Constraint], name: str, *more: Constraint
) -> tuple[Constraint, ...]:
    """Without the pins of a decision, and with others."""
    kept = (c for c in constraints if not (isinstance(c, Pin) and c.name == name))
    return (*kept, *more)


def of_stage(
    constraints: Iterable[Constraint], stage: int, blocks: Sequence[str]
) -> tuple[Constraint, ...]:
    """The constraints as they are for one stage with these blocks: its own pins hold everywhere,
    those of other stages are gone. What is asked of single blocks stays as it is. Where a parameter
    must be split, its axis has 2 ranks at least."""
    found: list[Constraint] = []
    for item in constraints:
        if isinstance(item, Placed) and item.placement != "R":
            if not set(item.blocks).isdisjoint(blocks):
                found.append(Pin(item.axis, 2, ">="))
        pins = item.pins() if isinstance(item, StageMesh) else (item,)
        for pin in pins:
            if not isinstance(pin, Pin) or pin.scope == EVERYWHERE:
                found.append(pin)
            elif DECISIONS[pin.name].read_block is not None and pin.scope.block:
                found.append(pin)
            elif pin.scope.covers(stage, tuple(blocks)):
                found.append(replace(pin, scope=EVERYWHERE))
    return tuple(found)


def is_scoped(constraints: Iterable[Constraint]) -> bool:
    """Whether some pin is for some stages only, so that stages must be told apart."""
    return any(
        isinstance(item, StageMesh | StageDevices | StageShares | OnType)
        or (isinstance(item, Pin) and item.scope != EVERYWHERE)
        or (isinstance(item, Placed) and item.placement != "R")
        for item in constraints
    )


def mesh_allowed(
    constraints: Iterable[Constraint], dp_replicate: int, dp_shard: int, model: ModelMesh
) -> bool:
    """Whether the pins in every stage leave a mesh of these sizes."""
    return model_allowed(constraints, model) and all(
        allowed(constraints, name, (size,))
        for name, size in (
            ("dp", dp_replicate * dp_shard),
            ("dp_replicate", dp_replicate),
            ("dp_shard", dp_shard),
        )
    )


def model_allowed(constraints: Iterable[Constraint], model: ModelMesh) -> bool:
    """Whether the pins in every stage leave a model mesh."""
    sizes, total = dict(model), 1
    for size in sizes.values():
        total *= size
    given = {"model": total} | {axis: sizes.get(axis, 1) for axis in MODEL_AXES}
    constraints = tuple(constraints)
    return all(allowed(constraints, name, (size,)) for name, size in given.items())


def asked_meshes(constraints: Iterable[Constraint]) -> tuple[ModelMesh, ...]:
    """Model meshes that constraints name in full: they must be among those that are tried."""
    constraints = tuple(constraints)
    scopes = {c.scope for c in constraints if isinstance(c, Pin)}
    found = [model_mesh(dict(c.sizes)) for c in constraints if isinstance(c, StageMesh)]
    for scope in sorted(scopes, key=str):
        pins = [c for c in constraints if isinstance(c, Pin) and c.scope in (EVERYWHERE, scope)]
        sizes = {
            p.name: p.value
            for p in pins
            if p.name in MODEL_AXES and p.relation == "=" and isinstance(p.value, int)
        }
        found.append(model_mesh(sizes))
    return tuple(dict.fromkeys(mesh for mesh in found if mesh))


def stage_of_block(constraints: Iterable[Constraint], graph: Graph) -> dict[int, int]:
    """Block number -> the stage it is pinned to; of two that differ, one stays, so no plan fits."""
    found: dict[int, int] = {}
    for item in constraints:
        if not isinstance(item, OnStage):
            continue
        named = [i for i, b in enumerate(graph.blocks) if fnmatchcase(b.name, item.block)]
        if item.starts:
            found[named[0]] = item.stage
            if named[0] and item.stage:
                found[named[0] - 1] = item.stage - 1
        else:
            found |= dict.fromkeys(named, item.stage)
    return found


def memory_cap(constraints: Iterable[Constraint]) -> int | None:
    """The least cap in bytes."""
    return min((c.nbytes for c in constraints if isinstance(c, MemoryCap)), default=None)
