"""Whether ranks of experts have samples of their own, or share those of their replica."""

from collections.abc import Iterable

from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.sampled import sample_ranks
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.pins.decision import Decision
from meshwright.planner.pins.decisions import Constraint

_OWN, _SHARED = "own", "shared"


def may_own_samples(constraints: Iterable[Constraint], ranks: int) -> bool:
    """Returns whether pins leave layouts that split samples among so many ranks of a replica."""
    return bool(allowed(constraints, "samples", (_word(ranks),)))


def _word(ranks: int) -> str:
    return _OWN if ranks > 1 else _SHARED


def _read(plan: Plan, stage: Stage) -> str:
    return _word(sample_ranks(plan, stage)[1])


def _mesh(plan: Plan) -> str:
    return _OWN if any(_read(plan, stage) == _OWN for stage in plan.stages) else ""


DECISION = Decision(words=(_OWN, _SHARED), read=_read, mesh=_mesh)
