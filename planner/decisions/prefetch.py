"""Blocks whose parameters are gathered ahead; 1 or more asks for zero 3 everywhere, as elsewhere
there is nothing to fetch."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from meshwright.forms.exchange import Exchange
from meshwright.forms.folding import folded_views
from meshwright.forms.sync import exchange_of
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.pins.constraints import allowed, pinned
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Constraint, Pin, Value


def _admits(pin: Pin, stage: Stage) -> bool:
    asked = pin.value not in (0, (0,)) and pin.relation in ("=", ">=", "in")
    return pin.admits(stage.prefetch) and (_fetches(stage) or not asked)


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    if stage.prefetch or not _fetches(stage):
        return stage
    return replace(stage, prefetch=int(value))


def depths(constraints: Iterable[Constraint], exchange: Exchange) -> tuple[int, ...]:
    """Return how many blocks ahead pins leave to try for replicas that agree so."""
    if not exchange.fetches_ahead:
        return (0,)
    pin = pinned(constraints, "prefetch")
    return (int(pin),) if pin is not None else allowed(constraints, "prefetch", (0, 1))


def _fetches(stage: Stage) -> bool:
    """Whether parameters of a stage, some or all, are gathered ahead."""
    return any(exchange_of(view).fetches_ahead for view in folded_views(stage))


def _findings(plan: Plan) -> Iterator[Finding]:
    for i, stage in enumerate(plan.stages):
        if stage.prefetch > 0 and not _fetches(stage):
            message = f"stage {i}: prefetch {stage.prefetch} has no effect with {stage.sync_form}"
            yield Finding("prefetch", message, "prefetch 0, or zero 3", "warning")


DECISION = Decision(
    least=0,
    read=lambda plan, stage: stage.prefetch,
    admits=_admits,
    apply=_apply,
    findings=_findings,
)
