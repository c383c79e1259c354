"""What becomes of the values of layers that the backward needs (`planner.problem.saved_modes`)."""

from meshwright.forms.retention import names_of, offered
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Pin
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.saved_modes import NONE, policy_of


def saved_name(plan: Plan) -> str:
    """Return the form that was chosen, first of all one that moves, else `none`."""
    return next(iter(names_of(plan)), NONE)


def _check(text: str, pin: Pin) -> None:
    if isinstance(pin.value, tuple):
        first = text.rpartition(" in ")[2].split(",")[0].strip()
        raise PlanError(f"constraint {text}: saved is pinned to one word; write saved={first}")


def _keeps(pin: Pin, plan: Plan, graph: Graph) -> bool:
    """Several forms may have been chosen for the same plan."""
    return any(map(pin.admits, names_of(plan) or (NONE,)))


def _refused(problem: Problem, pin: Pin) -> str:
    """By all blocks."""
    if pin.value == NONE:
        return ""
    patterns = {block.pattern for block in problem.graph.blocks}
    if any(policy_of(problem, pattern, str(pin.value)) for pattern in patterns):
        return ""
    return f"no block of the model has values that {pin.value} would treat in another way"


def _show(stage: Stage) -> str:
    return "; ".join(
        f"{block}: " + ", ".join(f"{how} {key}" for key, how in sorted(policy.items()))
        for block, policy in sorted(stage.saved.items()) if policy
    ) or "-"  # fmt: skip


DECISION = Decision(
    words=(NONE, *offered()),
    scope="plan",
    read=lambda plan, stage: saved_name(plan),
    check=_check,
    keeps=_keeps,
    refused=_refused,
    place=5,
    words_of=lambda plan: [name for name in [saved_name(plan)] if name != NONE],
    show=_show,
)
