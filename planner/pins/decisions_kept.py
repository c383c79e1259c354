"""Which constraints a plan does not keep."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.layout.layout import R, parse_placement
from meshwright.ir.plan.plan import MODEL_AXES, Plan, Stage, param_key
from meshwright.planner.pins.decisions import (
    Constraint,
    MemoryCap,
    OnStage,
    OnType,
    Pin,
    Placed,
    Scope,
    StageDevices,
    StageMesh,
    StageShares,
    StepCap,
)
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.pins.parameter_pins import ParametersAs
from meshwright.planner.pins.placement_rules import lies, parameter_names


def broken(constraints: Iterable[Constraint], plan: Plan, graph: Graph) -> tuple[Constraint, ...]:
    """The constraints that a plan does not keep; memory is judged apart, device by device."""
    return tuple(item for item in constraints if not _holds(item, plan, graph))


def _holds(item: Constraint, plan: Plan, graph: Graph) -> bool:
    match item:
        case MemoryCap():
            return True
        case StepCap():
            return plan.predicted is None or plan.predicted.step_s <= item.seconds
        case OnStage():
            return _on_stage(item, plan, graph)
        case StageDevices():
            return _stage(plan, item.stage).devices == item.devices
        case StageShares():
            return _stage(plan, item.stage).batch_shares == item.shares
        case StageMesh():
            return all(_pin_holds(pin, plan, graph) for pin in item.pins())
        case OnType():
            found = _covered(item.pin.scope, plan, graph)
            return bool(found) and all(set(s.devices) <= set(item.ranks) for s, _ in found)
        case Placed():
            return _placed(item, plan, graph)
        case ParametersAs():
            return item.holds(plan, graph)
        case Pin():
            return _pin_holds(item, plan, graph)


_NO_STAGE = Stage(first="", last="", mesh={}, devices=(), batch_shares=())


def _stage(plan: Plan, index: int) -> Stage:
    return plan.stages[index] if index < len(plan.stages) else _NO_STAGE


def _covered(scope: Scope, plan: Plan, graph: Graph) -> list[tuple[Stage, tuple[Block, ...]]]:
    """The stages that a scope means, with their blocks."""
    found = []
    for index, stage in enumerate(plan.stages):
        blocks = plan.stage_blocks(graph, index)
        if scope.covers(index, tuple(block.name for block in blocks)):
            found.append((stage, blocks))
    return found


def _on_stage(item: OnStage, plan: Plan, graph: Graph) -> bool:
    if item.stage >= len(plan.stages):
        return False
    inside = [block.name for block in plan.stage_blocks(graph, item.stage)]
    wanted = [b.name for b in graph.blocks if fnmatchcase(b.name, item.block)]
    return inside[0] == wanted[0] if item.starts else set(wanted) <= set(inside)


def _pin_holds(pin: Pin, plan: Plan, graph: Graph) -> bool:
    decision = DECISIONS[pin.name]
    kept = decision.keeps(pin, plan, graph) if decision.keeps else None
    if kept is not None:
        return kept
    found = _covered(pin.scope, plan, graph)
    return bool(found) and all(_admits(pin, plan, stage, blocks) for stage, blocks in found)


def _admits(pin: Pin, plan: Plan, stage: Stage, blocks: tuple[Block, ...]) -> bool:
    """Whether a stage keeps a pin of it, or of some of its blocks."""
    decision = DECISIONS[pin.name]
    if decision.read_block is not None and pin.scope.block:
        named = (block for block in blocks if fnmatchcase(block.name, pin.scope.block))
        return all(pin.admits(decision.read_block(stage, block)) for block in named)
    if decision.admits is not None:
        return decision.admits(pin, stage)
    assert decision.read is not None
    return pin.admits(decision.read(plan, stage))


def _placed(item: Placed, plan: Plan, graph: Graph) -> bool:
    names = {tensor for path, tensor in parameter_names(graph).items() if item.names(path)}
    layouts = {layout.name: layout for layout in plan.layouts}
    for index, stage in enumerate(plan.stages):
        for block in plan.stage_blocks(graph, index):
            stored = layouts[stage.layouts[block.pattern]].parameters
            for name in names.intersection(block.params):
                key = param_key(block, graph.tensors[name].fqn)
                if not _lies_as_asked(item, stage, stored.get(key, {})):
                    return False
    return True


def _lies_as_asked(item: Placed, stage: Stage, stored: dict[str, str]) -> bool:
    def on(axis: str) -> bool:
        placement = parse_placement(stored[axis]) if axis in stored else R
        return lies(placement, item.placement)

    if item.axis != "model":
        return on(item.axis) and (item.placement == "R" or dict(stage.model).get(item.axis, 1) > 1)
    axes = [axis for axis in MODEL_AXES if dict(stage.model).get(axis, 1) > 1]
    return all(map(on, axes)) if item.placement == "R" else any(map(on, axes))
