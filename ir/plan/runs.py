"""Names of equal layers in a row as one, as plan files and tables have them: `model.layers.0..69`.

Plans themselves have each name; no module has a name with two dots in a row.
"""

import re
from collections.abc import Mapping
from typing import TypeVar

from meshwright.ir.errors import PlanError
from meshwright.ir.text.plain_text import shown

T = TypeVar("T")
LEAST = 3
"""Names that are worth a run."""
MOST = 10**6
"""Names that all runs of a file may stand for."""
_RUN = re.compile(r"((?:.+\.)?)(0|[1-9]\d{0,8})\.\.(0|[1-9]\d{0,8})((?:\..+)?)")


def in_runs(items: Mapping[str, T]) -> dict[str, T]:
    """Returns the same with names that follow each other, and have the same value, as one."""
    found: dict[str, T] = {}
    names = list(items)
    at = 0
    while at < len(names):
        first, item = names[at], items[names[at]]
        length, place = 1, None
        while at + length < len(names) and items[names[at + length]] == item:
            place = _next(names[at + length - 1], names[at + length], place)
            if place is None:
                break
            length += 1
        if length < LEAST:
            found[first] = item
            at += 1
            continue
        found[_run(first, names[at + length - 1])] = item
        at += length
    return found


def _next(name: str, follower: str, place: int | None) -> int | None:
    """The part of a name that is a number, and one more in the next; None if it is not the next, or
    another part is than before (`place`)."""
    ours, theirs = name.split("."), follower.split(".")
    if len(ours) != len(theirs):
        return None
    apart = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    if len(apart) != 1 or place not in (None, apart[0]):
        return None
    a, b = ours[apart[0]], theirs[apart[0]]
    plain = a.isdecimal() and b.isdecimal() and a == str(int(a)) and b == str(int(b))
    return apart[0] if plain and int(b) == int(a) + 1 else None


def _run(first: str, last: str) -> str:
    ours, theirs = first.split("."), last.split(".")
    return ".".join(a if a == b else f"{a}..{b}" for a, b in zip(ours, theirs, strict=True))


def has_runs(items: Mapping[str, object]) -> bool:
    """Tells whether some name is a run."""
    return any(".." in name for name in items)


def from_runs(items: Mapping[str, T], where: str, most: int = MOST) -> dict[str, T]:
    """Returns each name of `in_runs`; PlanError, which begins with `where`, for what is no run, for
    more than `most` names, and for a name that is there twice."""
    found: dict[str, T] = {}
    for key, item in items.items():
        head, numbers, tail = _parts(key, where) if ".." in key else (key, range(0), "")
        if len(found) + len(numbers) > most:
            raise PlanError(
                f"{where}: {shown(key)} has {len(numbers)} names; of a plan's runs together there "
                f"may be {MOST}"
            )
        for name in [f"{head}{number}{tail}" for number in numbers] or [key]:
            if name in found:
                raise PlanError(f"{where}: {shown(name)} is there twice; say it once")
            found[name] = item
    return found


def _parts(key: str, where: str) -> tuple[str, range, str]:
    """What comes before the numbers, these, and what comes behind."""
    match = _RUN.fullmatch(key)
    first, last = (int(match[2]), int(match[3])) if match else (0, 0)
    if match is None or first > last or ".." in match[1] or ".." in match[4]:
        raise PlanError(
            f"{where}: {shown(key)} is no run of names; one is like 'model.layers.0..69', the "
            "lower number first"
        )
    return match[1], range(first, last + 1), match[4]
