"""What becomes of the values of layers that the backward needs (`planner.problem.saved_modes`)."""

from collections.abc import Iterable

from meshwright.forms.retention import names_of, offered
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.planner.pins.constraints import pinned
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Constraint, Pin

_NONE = "none"


def saved_name(plan: Plan) -> str:
    """Return the form that was chosen, first of all one that moves, else `none`."""
    return next(iter(names_of(plan)), _NONE)


def asked(constraints: Iterable[Constraint]) -> str:
    """Return the form that is pinned; empty if nothing is asked of values."""
    name = pinned(constraints, "saved")
    return "" if name in (None, _NONE) else str(name)


def _check(text: str, pin: Pin) -> None:
    if isinstance(pin.value, tuple):
        first = text.rpartition(" in ")[2].split(",")[0].strip()
        raise PlanError(f"constraint {text}: saved is pinned to one word; write saved={first}")


def _keeps(pin: Pin, plan: Plan, graph: Graph) -> bool:
    """Several forms may have been chosen for the same plan."""
    return any(map(pin.admits, names_of(plan) or (_NONE,)))


def _show(stage: Stage) -> str:
    return "; ".join(
        f"{block}: " + ", ".join(f"{how} {key}" for key, how in sorted(policy.items()))
        for block, policy in sorted(stage.saved.items()) if policy
    ) or "-"  # fmt: skip


DECISION = Decision(
    words=(_NONE, *offered()),
    scope="plan",
    read=lambda plan, stage: saved_name(plan),
    check=_check,
    keeps=_keeps,
    place=5,
    words_of=lambda plan: [name for name in [saved_name(plan)] if name != _NONE],
    show=_show,
)
