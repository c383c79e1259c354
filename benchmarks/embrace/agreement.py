"""Whether all contenders that can compute in float64 have the same losses there."""

from collections.abc import Mapping

from benchmarks.embrace.contenders import (
    DDP,
    PLAIN,
    SPARSE,
    Contender,
    Planned,
    Replicated,
)
from benchmarks.embrace.models import Case
from meshwright.ir.plan.plan import Plan
from meshwright.testing.spawn import run_ranks

STEPS = 5


def disagreement(case: Case, plans: Mapping[str, Plan], ranks: int) -> dict[str, float]:
    """Largest relative difference of losses of some steps from those of whole tables, by name, of a
    case in float64 and plans for it. It forks."""
    losses = run_ranks(ranks, _losses, case, plans, timeout_s=600)[0]
    wanted = losses.pop(PLAIN)
    return {
        name: max(abs(a - b) / abs(b) for a, b in zip(own, wanted, strict=True))
        for name, own in losses.items()
    }


def _losses(case: Case, plans: Mapping[str, Plan]) -> dict[str, list[float]]:
    made: dict[str, Contender] = {n: Planned(case, plan) for n, plan in plans.items()}
    made |= {DDP: Replicated(case, sparse=False), SPARSE: Replicated(case, sparse=True)}
    found: dict[str, list[float]] = {}
    for name, one in made.items():
        found[name] = []
        for step in range(STEPS):
            one.step(case.batch(step), case.batch(step + 1))
            found[name].append(one.loss())
    return found
