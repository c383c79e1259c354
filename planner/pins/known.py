"""All decisions that are pinned by name: sizes of mesh axes, and files of `planner/decisions`."""

from functools import partial

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files
from meshwright.ir.plan.plan import MODEL_AXES, Plan, Stage
from meshwright.planner import decisions
from meshwright.planner.pins.decision import Decision

_AXES = ("dp_replicate", "dp_shard", *MODEL_AXES)
_FILES = Files(decisions, "pin")


def _size(axis: str, plan: Plan, stage: Stage) -> int:
    return stage.mesh.get(axis, 1)


def _decisions() -> dict[str, Decision]:
    found = {axis: Decision(read=partial(_size, axis)) for axis in _AXES}
    for name in _FILES.names:
        if name in found:
            raise PlanError(f"a pin cannot be called {name!r}: that is an axis of meshes")
        found[name] = _FILES.load(name).DECISION
    return found


DECISIONS = _decisions()
"""Name -> record."""
BY_HAND = tuple(name for name, found in DECISIONS.items() if found.scope != "blocks")
"""Those that a plan by hand may name as keys."""
