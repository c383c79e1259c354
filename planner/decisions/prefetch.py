"""Blocks whose parameters are gathered ahead; 1 or more asks for zero 3 everywhere, as elsewhere
there is nothing to fetch."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.forms.sync import exchange_of
from meshwright.ir.plan.plan import Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Pin, Value


def _admits(pin: Pin, stage: Stage) -> bool:
    asked = pin.value not in (0, (0,)) and pin.relation in ("=", ">=", "in")
    return pin.admits(stage.prefetch) and (exchange_of(stage).fetches_ahead or not asked)


def _apply(stage: Stage, value: Value, table: Callable[[], Schedule]) -> Stage:
    if stage.prefetch or not exchange_of(stage).fetches_ahead:
        return stage
    return replace(stage, prefetch=int(value))


DECISION = Decision(
    least=0, read=lambda plan, stage: stage.prefetch, admits=_admits, apply=_apply
)  # fmt: skip
