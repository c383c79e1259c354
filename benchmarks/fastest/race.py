"""The plans that search cannot tell apart are raced, as `meshwright race` does; one is kept.

No run of the race counts in the contest.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.accuracy.models import Subject
from benchmarks.fastest.plans import Entrant
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.world.world import rank
from meshwright.testing.spawn import run_ranks
from meshwright.tools.race.racing import Race, race
from meshwright.tools.race.standing import Heat

RACED = ("search", "finalist")
TIMEOUT_S = 900.0


def after_race(subject: Subject, entrants: Sequence[Entrant], folder: Path) -> list[Entrant]:
    """All, the one that won the race of the finalists first."""
    raced = [entrant for entrant in entrants if entrant.origin in RACED]
    if len(raced) > 1:
        plans = [entrant.plan for entrant in raced]
        over: Race = run_ranks(
            plans[0].world_size, _race, subject, plans, folder / "race.json", timeout_s=TIMEOUT_S
        )[0]
        kept = raced[over.standing.order[0]]
    else:
        kept = raced[0]
    return [kept, *(entrant for entrant in entrants if entrant is not kept)]


def _race(subject: Subject, plans: Sequence[Plan], journal: Path) -> Race:
    return race(
        plans, subject.model(), batches=[subject.batch()], loss_fn=subject.loss_fn,
        example_inputs=subject.batch(), journal=journal, told=_tell if rank() == 0 else None,
    )  # fmt: skip


def _tell(plan: Plan, heat: Heat) -> None:
    steps = " ".join(f"{seconds:.3f}" for seconds in heat.steps_s)
    print(f"  race {heat.turn}: plan {heat.number} {steps} s", flush=True)
