"""Which plans are predicted and run: of a pool of decisions, those predicted to differ most."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem

ON_TWO, ON_FOUR = 8, 4
"""Plans of each model on 2 and on 4 processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """The decisions of a plan; what it leaves open is the same for all (even cuts, shares)."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0
    num_microbatches: int = 1
    schedule: str = "one_f_one_b"
    recompute: bool = False

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def name(self) -> str:
        """`pp2 dp2 zero1 x4`, as in the plan's alternatives."""
        axes = (("pp", self.pp), ("dp", self.dp), ("tp", self.tp))
        parts = [f"{axis}{size}" for axis, size in axes if size > 1]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [f"x{self.num_microbatches}"]
        parts += [self.schedule] if self.pp > 1 and self.schedule != "one_f_one_b" else []
        parts += ["recompute"] if self.recompute else []
        return " ".join(parts)


TWO = (
    Sketch(dp=2),
    Sketch(dp=2, num_microbatches=4),
    Sketch(dp=2, num_microbatches=2, recompute=True),
    Sketch(dp=2, zero=1, num_microbatches=2),
    Sketch(dp=2, zero=2, num_microbatches=4, recompute=True),
    Sketch(dp=2, zero=3),
    Sketch(dp=2, zero=3, num_microbatches=2, recompute=True),
    Sketch(tp=2),
    Sketch(tp=2, num_microbatches=2),
    Sketch(tp=2, num_microbatches=4, recompute=True),
    Sketch(pp=2, num_microbatches=2),
    Sketch(pp=2, num_microbatches=4),
    Sketch(pp=2, num_microbatches=8, schedule="gpipe", recompute=True),
    Sketch(pp=2, num_microbatches=4, schedule="interleaved"),
    Sketch(pp=2, num_microbatches=8, schedule="zero_bubble"),
    Sketch(pp=2, num_microbatches=4, schedule="zbv"),
)
FOUR = (
    Sketch(dp=4),
    Sketch(dp=4, zero=3, num_microbatches=2),
    Sketch(dp=4, zero=1, num_microbatches=2, recompute=True),
    Sketch(dp=2, tp=2, num_microbatches=2),
    Sketch(tp=4),
    Sketch(pp=2, dp=2, zero=1, num_microbatches=4),
    Sketch(pp=2, tp=2, num_microbatches=4, schedule="gpipe", recompute=True),
    Sketch(pp=4, num_microbatches=8),
    Sketch(pp=4, num_microbatches=4, schedule="zero_bubble"),
)
POOL = (*TWO, *FOUR)
ALWAYS = (TWO[0], FOUR[0], TWO[7], TWO[11], FOUR[7])
"""Plain data, tensor and pipeline parallelism are run of every model."""


def apart(steps_s: Mapping[Sketch, float], count: int = ON_TWO + ON_FOUR) -> tuple[Sketch, ...]:
    """`count` of the plans with these predicted steps, in their order: those of `ALWAYS`, then
    whichever lies farthest from all that are chosen, as a ratio, until 2 and 4 processes have
    their share. Plans as fast as each other have no order that a run could show."""
    room = {2: count * ON_TWO // (ON_TWO + ON_FOUR), 4: count * ON_FOUR // (ON_TWO + ON_FOUR)}
    chosen: list[Sketch] = []

    def take(sketch: Sketch) -> None:
        room[sketch.num_ranks] -= 1
        chosen.append(sketch)

    def distance(sketch: Sketch) -> float:
        here_s = steps_s[sketch]
        return min((abs(log(here_s / steps_s[other])) for other in chosen), default=0.0)

    for sketch in ALWAYS:
        if sketch in steps_s and room[sketch.num_ranks]:
            take(sketch)
    while left := [s for s in steps_s if s not in chosen and room[s.num_ranks]]:
        take(max(left, key=distance))
    return tuple(sketch for sketch in steps_s if sketch in chosen)


def plan_of(problem: Problem, sketch: Sketch) -> Plan:
    """The predicted plan; PlanError where the model cannot be split so."""
    choice = uniform_choice(
        problem,
        pp=sketch.pp,
        dp_replicate=1 if sketch.zero else sketch.dp,
        dp_shard=sketch.dp if sketch.zero else 1,
        tp=sketch.tp,
        zero=sketch.zero,
        schedule=sketch.schedule,
        num_microbatches=sketch.num_microbatches,
        recompute="full" if sketch.recompute else "none",
    )
    return rehash(build_plan(problem, choice))
