"""Settings that a form can be told: their defaults, what is legal, and what is nearest to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from math import isfinite

from meshwright.ir.plan.plan import Setting

SHOWN = 64


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a range; a whole one if its default is."""

    default: int | float
    low: float
    high: float

    def wrong(self, value: Setting) -> tuple[str, Setting] | None:
        """Returns what is wrong with a value and the nearest legal one; None if it is legal."""
        whole = isinstance(self.default, int)
        kind = f"a {'whole ' * whole}number from {self.low:,} to {self.high:,}"
        if isinstance(value, str) or isinstance(value, bool) or not isfinite(value):
            return f"must be {kind}, not {str(value)[:SHOWN]!r}", self.default
        near = min(max(value, self.low), self.high)
        if near != value or (whole and value != int(value)):
            return f"must be {kind}, not {str(value)[:SHOWN]}", int(near) if whole else near
        return None


@dataclass(frozen=True, slots=True)
class Word:
    """One of some words, the first of which is the default."""

    words: tuple[str, ...]

    @property
    def default(self) -> str:
        return self.words[0]

    def wrong(self, value: Setting) -> tuple[str, Setting] | None:
        """Returns what is wrong with a value and the nearest legal one; None if it is legal."""
        if value in self.words:
            return None
        near = get_close_matches(str(value)[:SHOWN], self.words, 1, 0.0)[0]
        return f"must be one of {', '.join(self.words)}, not {str(value)[:SHOWN]!r}", near


@dataclass(frozen=True, slots=True)
class Text:
    """A name of something of the model."""

    default: str = ""

    def wrong(self, value: Setting) -> tuple[str, Setting] | None:
        """Returns what is wrong with a value and the nearest legal one; None if it is legal."""
        if isinstance(value, str):
            return None
        return f"must be a name, not {value}", self.default


@dataclass(frozen=True, slots=True)
class Course:
    """A number, or numbers from steps of training on: "0.03, 500: 0.01" is 0.03, and 0.01 from the
    step with number 500 on; the first step has number 0. Whole numbers if the default is one."""

    default: int | float
    low: float
    high: float

    def wrong(self, value: Setting) -> tuple[str, Setting] | None:
        """Returns what is wrong with a value and the nearest legal one; None if it is legal."""
        number = Number(self.default, self.low, self.high)
        if not isinstance(value, str):
            return number.wrong(value)
        try:
            parts = course(value)
        except ValueError:
            text = f"must be a number, or numbers as in '{self.default}, 500: {self.default}'"
            return f"{text}, not {value[:SHOWN]!r}", self.default
        if any(later <= before for (before, _), (later, _) in pairwise(parts)):
            return f"names steps that do not rise: {value[:SHOWN]!r}", parts[0][1]
        found = [number.wrong(one) for _, one in parts]
        return next((one for one in found if one), None)


def course(value: Setting) -> tuple[tuple[int, float], ...]:
    """Returns (first step, number) of each part of what `Course` allows. ValueError for a text that
    is none."""
    if not isinstance(value, str):
        return ((0, float(value)),)
    first, *more = value.split(",")
    parts = [(0, float(first))]
    for text in more:
        step, number = text.split(":")
        parts.append((int(step), float(number)))
    return tuple(parts)


Known = Mapping[str, Number | Course | Word | Text]


def wrong_settings(
    form: str, known: Known, said: Mapping[str, Setting]
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with each setting of a form, and what would be right."""
    for name, value in said.items():
        if name not in known:
            near = get_close_matches(name[:SHOWN], known, 1, 0.0)[0]
            yield f"{form} has no setting {name[:SHOWN]!r}", f"{near} {known[near].default}"
        elif found := known[name].wrong(value):
            yield f"{name} {found[0]}", f"{name} {found[1]}"


@dataclass(frozen=True, slots=True)
class FormSettings:
    """What a form was told; the rest is as its file says. Of values that were checked."""

    known: Known
    said: Mapping[str, Setting]

    def _value(self, name: str) -> Setting:
        return self.said.get(name, self.known[name].default)

    def whole(self, name: str) -> int:
        """Returns a whole number."""
        return int(self._value(name))

    def number(self, name: str) -> float:
        return float(self._value(name))

    def at(self, name: str, step: int) -> float:
        """Returns what a number is in a step of training."""
        return [number for first, number in course(self._value(name)) if first <= step][-1]

    def finally_(self, name: str) -> float:
        """Returns what a number stays in the end."""
        return course(self._value(name))[-1][1]

    def word(self, name: str) -> str:
        return str(self._value(name))
