"""Only rows that any replica has, packed and all-reduced (the exact scheme beside S2 Reducer's).

A gradient of an embedding has rows of zeros for all that no sample looked up. Replicas first agree
on which rows have anything, a bit each, and then sum those rows. It pays for parameters of which
`rows`, the share of rows that occur on some replica, is small: name them by `by_parameter`. With
`block`, rows are blocks of so many values, such as those of a matrix whose inputs are mostly zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from meshwright.forms.exchange import Exchange
from meshwright.forms.rows import MarkedRows, exchange_of_rows
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, wrong_settings
from meshwright.ir.plan.plan import Setting, Stage

EXACT = True
SEARCHED = False
"""By searches for whole stages: it is for single parameters."""
TABLES = ("rows", "row_bytes")
"""Searches try it on embedding tables, with these facts of them as settings."""
_SETTINGS: Known = {
    "rows": Number(1.0, 1e-9, 1.0), "row_bytes": Number(256, 1, 2**40),
    "block": Number(0, 0, 2**40),
}  # fmt: skip
"""Share of rows that any replica has; bytes of a row; its values (0: those of the first dim)."""


def describe(
    replicas: int, zero: int = 0, settings: Mapping[str, Setting] = MappingProxyType({})
) -> Exchange:
    """Returns what is held and sent; a bit for each row goes with the rows."""
    told = FormSettings(_SETTINGS, settings)
    share = told.number("rows") + 1 / (8 * told.whole("row_bytes"))
    return exchange_of_rows(share)


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_settings("packed_rows", _SETTINGS, stage.sync.settings if stage.sync else {})
    if stage.zero:
        yield f"zero {stage.zero} splits rows over ranks; packed_rows has them whole", "zero 0"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage."""
    told = FormSettings(_SETTINGS, stage.sync.settings if stage.sync else {})
    return MarkedRows(slots, lines, told.whole("block"))
