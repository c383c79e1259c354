"""EmbRace whole: tables by columns, and rows that no rank's next batch reads go under the next step
(Li et al. 2022).

As `late_rows`, but owners have columns, as with `owned_columns`: every rank is told of all rows
that others ask for, so that each knows by itself which of its own go first.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from meshwright.forms.columns import ColumnTable
from meshwright.forms.exchange import Exchange
from meshwright.forms.late import LateRows
from meshwright.forms.owned_table import Together, owned_tables
from meshwright.forms.owner_exchange import ZERO, exchange_of_late_owners, wrong_owners
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, Text
from meshwright.ir.plan.plan import Setting, Stage

EXACT = True
SHARDS = True
SEARCHED = False
STORE, SPLIT = "owned", True
TABLES = ("rows", "rows_each", "row_bytes", "prior", "ids")
TABLE_ZERO = ZERO
UNDONE_BY_NORM = "sync owned_columns, or no max_grad_norm"
_SETTINGS: Known = {
    "rows": Number(1.0, 1e-9, 1.0), "rows_each": Number(1.0, 1e-9, 1.0),
    "row_bytes": Number(256, 1, 2**40),
    "prior": Number(0.5, 1e-9, 1 - 1e-9), "ids": Text(),
}  # fmt: skip
"""As of `late_rows`."""


def describe(
    replicas: int, zero: int = 1, settings: Mapping[str, Setting] = MappingProxyType({}), *,
    shards: int = 0,
) -> Exchange:  # fmt: skip
    """Returns what is held and sent: rows that are read next at once, the others a step later.

    `shards`: ranks that own something, all replicas if 0.
    """
    told = FormSettings(_SETTINGS, settings)
    return exchange_of_late_owners(
        shards or replicas, told.number("rows_each"), told.whole("row_bytes"), to_all=True,
        stepped=told.number("rows"), prior=told.number("prior"),
    )  # fmt: skip


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_owners("late_columns", _SETTINGS, stage)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage. PlanError for a table of which model axes split rows,
    or that has none."""
    return build_together([(slots, stage, store)], lines)


def build_together(groups: Sequence[Together], lines: Lines) -> SyncRun:
    """Returns what runs the form for groups of which the stage says different settings: rows of all
    tables go in one message. Errors are those of `build`."""
    return LateRows(*owned_tables("late_columns", groups, lines, ColumnTable), lines)
