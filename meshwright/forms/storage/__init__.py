"""Where a rank has parameters, one file a store; the file name is its key. MESHWRIGHT_STORAGE names
folders with more.

A file has `describe(replicas)`, the rows of an `Exchange` for what is held of parameters and sent
to make them whole, and `build(slots, lines, stage)`, which makes what does it on a rank
(`running.ParameterStore`). `SPLIT` says whether a rank has only its part of each parameter: then it
goes with forms of synchronisation that say the same, else with those that do not. If plans may
choose it by name, it has `check(stage)` too: what is wrong with its settings, and what would be
right; its `describe` is also told the settings, and `stated(settings)` is what these say of the
data. With `RELIEVES` it takes less of the device's memory than the usual ones, and a search tries
it where that is short.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import cast

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Hosted, Row
from meshwright.forms.running import RunningStore
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders, nearest
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import Setting, Stage
from meshwright.ir.text.plain_text import SHOWN

add_folders("MESHWRIGHT_STORAGE", __path__)
_FILES = Files(sys.modules[__name__], "store of parameters")
USUAL = "whole"
"""The store of forms of synchronisation that name none."""


@cache
def stored_rows(
    name: str, replicas: int, settings: tuple[tuple[str, Setting], ...] | None = None
) -> tuple[Row, ...]:
    """Returns what a store holds and sends among so many replicas; `settings`: if a plan chose it
    by name. PlanError names the nearest known store."""
    told: tuple[Mapping[str, Setting], ...] = () if settings is None else (dict(settings),)
    made: tuple[Row, ...] = _half(name, "describe").describe(replicas, *told)
    return made


def running_store(name: str) -> RunningStore:
    """Returns the half of a store that runs. PlanError names the nearest known store."""
    return cast(RunningStore, _half(name, "build"))


def is_split(name: str) -> bool:
    """Tells whether a rank has only its part of each parameter of a store."""
    return bool(getattr(_FILES.load(name), "SPLIT", False))


def stated_by(name: str, settings: tuple[tuple[str, Setting], ...]) -> Mapping[str, float]:
    """Returns what a store's settings state of the data, by the names that its rows have for it
    (`stated`)."""
    found = _FILES.load(name)
    made: Mapping[str, float] = found.stated(dict(settings)) if hasattr(found, "stated") else {}
    return made


def alone(name: str, settings: tuple[tuple[str, Setting], ...]) -> Exchange | None:
    """Returns what is done with parameters in a store on a rank without replicas (`alone`), the
    store's own rows left out; None: the same as in any store."""
    found = _FILES.load(name)
    return cast(Exchange, found.alone(dict(settings))) if hasattr(found, "alone") else None


@cache
def keeps_rows(name: str) -> bool:
    """Tells whether a store keeps rows of tables, of which blocks have those that an input names
    (`ROWS`): then it goes with forms that take such, or without replicas."""
    return bool(getattr(_FILES.load(name), "ROWS", False))


@cache
def of_tables() -> tuple[str, ...]:
    """Lists the stores that a search tries on embedding tables where memory is short: those that
    keep rows, and whose files say which facts of a table they are told (`TABLES`)."""
    return tuple(key for key in choosable() if keeps_rows(key) and facts_of_store(key))


@cache
def facts_of_store(name: str) -> tuple[str, ...]:
    """Lists the settings of a store that are facts of a table (`planner.finishing`)."""
    return tuple(getattr(_FILES.load(name), "TABLES", ()))


@cache
def choosable() -> tuple[str, ...]:
    """Returns the stores that plans may name: those whose files say what is legal."""
    return tuple(sorted(key for key in _FILES.names if hasattr(_FILES.load(key), "check")))


@cache
def for_stages() -> tuple[str, ...]:
    """Lists the stores that plans may name for all parameters of a stage: all but those that keep
    rows of tables."""
    return tuple(key for key in choosable() if not keeps_rows(key))


@cache
def relieving() -> tuple[str, ...]:
    """Lists the stores that a search tries where a device's memory is short, in the order of their
    names."""
    return tuple(key for key in choosable() if getattr(_FILES.load(key), "RELIEVES", False))


@cache
def without_parameters() -> tuple[str, ...]:
    """Lists those of them under which a device has a parameter, trained or not, only while a block
    reads it."""
    return tuple(
        key for key in relieving()
        if any(isinstance(row, Hosted) and row.kind == "parameters"
               for row in stored_rows(key, 1, ()))
    )  # fmt: skip


def of_stage(stage: Stage) -> Iterator[Finding]:
    """Yields what is wrong with the store that a stage names."""
    if stage.store is None:
        return
    key = stage.store.form[:SHOWN]
    if key not in choosable():
        near = nearest(key, choosable())
        message = f"{key!r} is no store of parameters to choose"
        yield Finding("store", message, f"{near}, or no store" if near else "no store")
        return
    for message, near in _FILES.load(key).check(stage):
        yield Finding("store", message, near)


def _half(name: str, has: str) -> ModuleType:
    found: ModuleType = _FILES.load(name)
    if not hasattr(found, has):
        raise PlanError(f"{name!r} is no store of parameters: its file has no {has}()")
    return found
