"""Whether blocks keep only their inputs, and run again within their backward."""

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import EVERYWHERE, STAGE_AWARE, Pin
from meshwright.planner.problem.stage_aware import is_stage_aware


def _check(text: str, pin: Pin) -> None:
    values = pin.value if isinstance(pin.value, tuple) else (pin.value,)
    if STAGE_AWARE in values and (isinstance(pin.value, tuple) or pin.scope != EVERYWHERE):
        raise PlanError(
            f"constraint {text}: {STAGE_AWARE} says how much each of all stages recomputes; write "
            f"recompute={STAGE_AWARE}"
        )


def _keeps(pin: Pin, plan: Plan, graph: Graph) -> bool | None:
    return is_stage_aware(plan, graph) if pin.value == STAGE_AWARE else None


def _show(stage: Stage) -> str:
    return ", ".join(sorted(key for key, how in stage.recompute.items() if how != "none")) or "-"


DECISION = Decision(
    words=("none", "full", STAGE_AWARE),
    read=lambda plan, stage: "full" if "full" in stage.recompute.values() else "none",
    read_block=lambda stage, block: "full" if stage.recomputes(block) else "none",
    check=_check,
    keeps=_keeps,
    show=_show,
)
