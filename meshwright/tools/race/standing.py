"""What a race of plans has seen so far, who runs next, and its journal.

Plans whose predictions differ by less than their error can only be told apart by running them. Each
runs once; those in front run again, in turns, so that a machine that slows down slows them all.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from meshwright.ir.errors import PlanError

IN_FRONT = (1.3, 1.1)
"""After one turn and after more of them plans within this factor of the shortest step run on."""


_strict = ConfigDict(extra="forbid", allow_inf_nan=False)
_Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, config=_strict)
class Heat:
    """One run of the plan with this number."""

    number: int
    turn: int
    steps_s: Annotated[tuple[_Seconds, ...], Field(min_length=1)]
    """Of the slowest rank in each step."""


@dataclass(frozen=True, config=_strict, kw_only=True)
class RaceStanding:
    """A race as far as it has come."""

    plans: tuple[str, ...]
    """Their hashes."""
    heats: tuple[Heat, ...] = ()
    running: int | None = None
    """The plan that was being run when this was written."""
    ended: tuple[int, ...] = ()
    """Plans that ran when a job ended before its time, once for each time."""

    @model_validator(mode="after")
    def _of_these_plans(self) -> Self:
        numbers = {*self.ended, *(heat.number for heat in self.heats), self.running or 0}
        if not numbers <= set(range(len(self.plans))):
            raise ValueError(f"plan numbers {sorted(numbers)} of {len(self.plans)} plans")
        return self

    @property
    def failed(self) -> tuple[int, ...]:
        """Plans under which two jobs have ended: one may have been stopped from outside."""
        return tuple(n for n in range(len(self.plans)) if self.ended.count(n) > 1)

    def step_s(self, number: int) -> float | None:
        """A plan's step: a quarter of all that it took were shorter. None before its first run.

        What disturbs a machine makes steps longer, never shorter, often for a whole run.
        """
        steps = sorted(s for heat in self.heats if heat.number == number for s in heat.steps_s)
        return steps[(len(steps) - 1) // 4] if steps else None

    def field(self, turn: int) -> tuple[int, ...]:
        """Who runs in a turn: in the first all, then those in front by the turns before."""
        alive = [number for number in range(len(self.plans)) if number not in self.failed]
        if turn == 0:
            return tuple(alive)
        before = replace(self, heats=tuple(heat for heat in self.heats if heat.turn < turn))
        known = {number: step for number in alive if (step := before.step_s(number)) is not None}
        factor = IN_FRONT[min(turn, len(IN_FRONT)) - 1]
        limit_s = factor * min(known.values(), default=0.0)
        return tuple(number for number in known if known[number] <= limit_s)

    def next_up(self, turns: int) -> tuple[int, int] | None:
        """(turn, plan) of the next heat; None when the race is over."""
        done = {(heat.turn, heat.number) for heat in self.heats}
        for turn in range(turns):
            field = self.field(turn)
            if turn and len(field) == 1:
                return None
            # To and fro: who runs late in one turn runs early in the next.
            for number in field if turn % 2 == 0 else reversed(field):
                if (turn, number) not in done:
                    return turn, number
        return None

    @property
    def order(self) -> tuple[int, ...]:
        """Plans that ran, the winner first: who stayed longer, then who is faster."""
        last = {heat.number: heat.turn for heat in sorted(self.heats, key=lambda h: h.turn)}
        alive = [number for number in last if number not in self.failed]
        return tuple(sorted(alive, key=lambda n: (-last[n], self.step_s(n) or 0.0, n)))

    def starts(self, number: int) -> "RaceStanding":
        """Said before a plan runs: if the job ends under it, this is what is left."""
        return replace(self, running=number)

    def ends(self, heat: Heat | None = None) -> "RaceStanding":
        """The plan that was running is done, with a heat unless it was called off."""
        return replace(self, running=None, heats=(*self.heats, heat) if heat else self.heats)

    def gone_on(self) -> "RaceStanding":
        """Where a job that goes on begins."""
        if self.running is None:
            return self
        return replace(self, running=None, ended=(*self.ended, self.running))


_JOURNAL = TypeAdapter(RaceStanding)


def save(standing: RaceStanding, path: Path) -> None:
    """At once, so that a job that ends meanwhile leaves one or the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(path.name + ".part")
    written.write_bytes(_JOURNAL.dump_json(standing, indent=1) + b"\n")
    written.replace(path)


def load(path: Path, plans: Sequence[str]) -> RaceStanding:
    """The journal, or a race that has not begun; PlanError if it is of other plans."""
    fresh = RaceStanding(plans=tuple(plans))
    if not path.exists():
        return fresh
    try:
        found = _JOURNAL.validate_json(path.read_bytes(), strict=True)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise PlanError(f"{path} is no journal of a race ({reasons}); remove it") from error
    if found.plans != fresh.plans:
        raise PlanError(
            f"{path} is of a race of {_short(found.plans)}, these plans are {_short(fresh.plans)}; "
            "choose another file for the fastest plan, or remove that journal"
        )
    return found


def _short(hashes: Sequence[str]) -> str:
    return ", ".join(each[:12] for each in hashes)
