"""How often a job saves: as it was told, or as often as costs it least."""

import re
from dataclasses import dataclass
from typing import Self

from meshwright.ir.errors import PlanError
from meshwright.ir.faults.mix import LLAMA_3
from meshwright.ir.faults.saving import SavingCost
from meshwright.ir.text.plain_text import shown

AUTO = "auto"
FIRST_S = 60.0
"""Until the first save of a job that is to find out what saves take."""
MOST_S = 3600.0
"""More than failures of machines end jobs, such as people and time limits."""
_INTERVAL = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(s|m|h)|([0-9]{1,12})")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """How often a job saves: each so many steps, or seconds."""

    steps: int = 0
    seconds: float = 0.0
    chosen: bool = False
    """Whether the seconds follow from what saves take (`chosen_interval_s`)."""

    @classmethod
    def parse(cls, text: str | int) -> Self:
        """`100` is steps; `90s`, `10m` and `2h` are time; `auto` is found while the job runs.
        PlanError for anything else."""
        if text == AUTO:
            return cls(seconds=FIRST_S, chosen=True)
        found = _INTERVAL.fullmatch(str(text).strip())
        made = cls()
        if found and found[3]:
            made = cls(steps=int(found[3]))
        elif found:
            made = cls(seconds=float(found[1]) * _SECONDS[found[2]])
        if made == cls():
            raise PlanError(
                f"every={shown(str(text))}: it must be a number of steps, such as 100, a time "
                f"above 0, such as 90s, 10m or 2h, or {AUTO}"
            )
        return made


def chosen_interval_s(held_s: float, write_s: float, world_size: int) -> float:
    """Seconds between saves that hold up training for `held_s` and are whole `write_s` later, by
    which a job of so many ranks loses least time, if its devices fail as often as in Llama 3's
    training; an hour at most."""
    between_s = LLAMA_3.between_s(world_size)
    cost = SavingCost(held_s=held_s, write_s=write_s, between_s=between_s)
    return min(cost.interval_s, max(MOST_S, write_s))
