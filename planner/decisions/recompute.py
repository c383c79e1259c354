"""Whether blocks keep only their inputs, and run again within their backward."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from meshwright.forms.retention import fate_of, retention, shared_out
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.planner.pins.constraints import allowed, is_scoped, pinned
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import EVERYWHERE, Constraint, Pin, Value
from meshwright.planner.problem import by_stage
from meshwright.planner.problem.candidates import StageChoice, recomputable
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.saved_modes import asked as asked_saved
from meshwright.planner.search.finish import changed

_NONE, _FULL = "none", "full"


def modes(constraints: Iterable[Constraint]) -> tuple[bool, ...]:
    """Return whether pins leave a stage that keeps, and one that recomputes its layers."""
    return tuple(name == _FULL for name in allowed(constraints, "recompute", (_NONE, _FULL)))


def _check(text: str, pin: Pin) -> None:
    values = pin.value if isinstance(pin.value, tuple) else (pin.value,)
    for name in shared_out():
        if name in values and (isinstance(pin.value, tuple) or pin.scope != EVERYWHERE):
            raise PlanError(
                f"constraint {text}: {name} says how much each of all stages recomputes; write "
                f"recompute={name}"
            )


def _keeps(pin: Pin, plan: Plan, graph: Graph) -> bool | None:
    if pin.value not in shared_out():
        return None
    return by_stage.is_shared_out(plan, graph, str(pin.value))


def _apply(plan: Plan, graph: Graph, value: Value) -> Plan:
    """Where stages share it out, as much as there can be; `_variants` finds how little will do."""
    if value not in shared_out():
        return plan
    return replace(plan, stages=by_stage.shared_out(plan, graph, str(value), 1.0))


def _variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Where all layers are recomputed: with as little as fits, as forms share it out over stages.
    The last of each form is the best of it."""
    if len(plan.schedule.rows) < 2 or len(plan.schedule.rows) < len(plan.stages):
        return
    if not any(stage.recompute for stage in plan.stages) or asked_saved(problem.constraints):
        return
    if is_scoped(problem.constraints):
        return
    pin = pinned(problem.constraints, "recompute")
    for name in shared_out():
        # One that is not exact, and others than the one that is asked for, are for the user to say.
        free = len(modes(problem.constraints)) == 2 and retention(name).exact
        if pin == name or free:
            yield from _shared_out(problem, plan, name)


def _shared_out(problem: Problem, plan: Plan, name: str) -> Iterator[Plan]:
    count = len(by_stage.layers(plan, problem.graph, 0))
    least, most = 0, count  # recomputed in stage 0: too few, or just enough
    while most - least > 1:
        middle = (least + most) // 2
        stages = by_stage.shared_out(plan, problem.graph, name, middle / count)
        made = changed(problem, plan, stages=stages)
        if excess_bytes(problem, made):
            least = middle
        else:
            most = middle
            yield made


def _obey(problem: Problem, stage: StageChoice, pins: Sequence[Pin]) -> StageChoice:
    return _without(problem, replace(stage, recompute=_asked(problem, stage, pins)))


def _asked(problem: Problem, stage: StageChoice, pins: Sequence[Pin]) -> tuple[str, ...]:
    """Patterns or names of the blocks that are recomputed, as pins of stages and blocks want it."""
    blocks = problem.graph.blocks[stage.start : stage.stop]
    chosen = stage.recompute
    for pin in pins:
        if not pin.scope.block and not pin.admits(_FULL if chosen else _NONE):
            chosen = () if chosen else recomputable(problem.graph, blocks)
    single = [pin for pin in pins if pin.scope.block]
    if not any(fnmatchcase(b.name, pin.scope.block) for pin in single for b in blocks):
        return chosen
    names = dict.fromkeys(b.name for b in blocks if not {b.name, b.pattern}.isdisjoint(chosen))
    for pin in single:
        for block in blocks:
            if fnmatchcase(block.name, pin.scope.block):
                names.pop(block.name, None)
                if pin.admits(_FULL):
                    names[block.name] = None
    return tuple(b.name for b in blocks if b.name in names)


def _without(problem: Problem, stage: StageChoice) -> StageChoice:
    """The stage whose recomputed blocks are treated in no other way."""
    blocks = problem.graph.blocks[stage.start : stage.stop]
    again = [b for b in blocks if not {b.name, b.pattern}.isdisjoint(stage.recompute)]
    if not stage.saved or not again:
        return stage
    taken = {b.name for b in again} | {b.pattern for b in again}
    saved = [item for item in stage.saved if item[0] not in taken]
    for pattern, mode in stage.saved:
        left = [b for b in blocks if b.pattern == pattern and b not in again]
        saved += [(b.name, mode) for b in left] if pattern in taken else []
    return replace(stage, saved=tuple(saved))


def _said(stage: Stage) -> list[str]:
    return sorted(key for key, how in stage.recompute.items() if how != _NONE)


DECISION = Decision(
    words=(_NONE, _FULL, *shared_out()),
    means={name: fate_of(name) for name in shared_out()},
    read=lambda plan, stage: _FULL if _said(stage) else _NONE,
    read_block=lambda stage, block: _FULL if stage.recomputes(block) else _NONE,
    check=_check,
    keeps=_keeps,
    apply_plan=_apply,
    obey=_obey,
    variants=_variants,
    place=4,
    words_of=lambda plan: ["recompute"] * any(map(_said, plan.stages)),
    show=lambda stage: ", ".join(_said(stage)) or "-",
)
