"""What the docs claim of GPUs, and whether a run confirms it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["confirmed", "refuted", "not measured"]
Number = Callable[[Mapping[str, object]], float | None]
"""Reads a number from a step's facts; None where it is not there."""
DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence, the numbers between which it holds, and the number that was measured."""

    text: str
    page: str
    """Where it is said, below `docs`."""
    low: Number
    """The product's own number, or read from the page: never typed here."""
    high: Number
    measured: Number
    unit: str = ""
    """Of the three: s, bytes, share; empty: a count or a ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A claim beside what was measured."""

    claim: Claim
    verdict: Verdict
    low: float | None
    high: float | None
    measured: float | None


def judge(claim: Claim, facts: Mapping[str, object]) -> Judged:
    """Compare. What has no number on either side was not measured."""
    low, high, measured = (read(facts) for read in (claim.low, claim.high, claim.measured))
    verdict: Verdict = "not measured"
    if measured is not None and low is not None and high is not None:
        verdict = "confirmed" if low <= measured <= high else "refuted"
    return Judged(claim=claim, verdict=verdict, low=low, high=high, measured=measured)


def fact(key: str, times: float = 1.0) -> Number:
    """The number that a fact is."""

    def read(facts: Mapping[str, object]) -> float | None:
        value = facts.get(key)
        return times * float(value) if isinstance(value, bool | int | float) else None

    return read


def ratio(above: str, below: str) -> Number:
    """One fact over another."""

    def read(facts: Mapping[str, object]) -> float | None:
        first, second = fact(above)(facts), fact(below)(facts)
        return first / second if first is not None and second else None

    return read


def fixed(value: float) -> Number:
    """An end of a range that no page says: nothing, or anything at all."""
    return lambda facts: value


def on_page(page: str, pattern: str, times: float = 1.0, group: int = 1) -> Number:
    """The number that a group of `pattern` finds on a page; None if the page lost it."""

    def read(facts: Mapping[str, object]) -> float | None:
        found = re.search(pattern, (DOCS / page).read_text(encoding="utf-8"))
        return times * float(found[group].replace(",", "")) if found else None

    return read


def banded(value: Number, band: str, sign: int) -> Number:
    """An end of the range that a prediction states: below it, or above, by its relative band."""

    def read(facts: Mapping[str, object]) -> float | None:
        number, share = value(facts), fact(band)(facts)
        return None if number is None or share is None else number * (1 + sign * share)

    return read
