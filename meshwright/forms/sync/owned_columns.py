"""EmbRace's own layout: each rank has some columns of a table, and all ranks are asked for every
row (Li et al. 2022).

As `owned_rows`, but a rank of dp_shard owns columns, as many as the others: it sums their
gradients, holds the state of their optimizer and steps them. Numbers of rows go to all ranks, and
as many bytes of rows and gradients as with owners of rows. Ids that occur often load no rank more
than others, wherever they lie in the table; `owned_rows` sends fewer numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from meshwright.forms.columns import ColumnTable
from meshwright.forms.exchange import Exchange
from meshwright.forms.owned import OwnedRows
from meshwright.forms.owned_table import Together, owned_tables
from meshwright.forms.owner_exchange import ZERO, exchange_of_owners, wrong_owners
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, Text
from meshwright.ir.plan.plan import Setting, Stage

EXACT = True
SHARDS = True
SEARCHED = False
STORE, SPLIT = "owned", True
TABLES = ("rows", "rows_each", "row_bytes", "ids")
TABLE_ZERO = ZERO
_SETTINGS: Known = {
    "rows": Number(1.0, 1e-9, 1.0), "rows_each": Number(1.0, 1e-9, 1.0),
    "row_bytes": Number(256, 1, 2**40), "ids": Text(),
}  # fmt: skip
"""As of `owned_rows`."""


def describe(
    replicas: int, zero: int = 1, settings: Mapping[str, Setting] = MappingProxyType({}), *,
    shards: int = 0,
) -> Exchange:  # fmt: skip
    """Returns what is held and sent: rows both ways, and their numbers to all when they are asked
    for.

    `shards`: ranks that own something, all replicas if 0.
    """
    told = FormSettings(_SETTINGS, settings)
    return exchange_of_owners(
        shards or replicas,
        told.number("rows_each"),
        told.whole("row_bytes"),
        to_all=True,
        stepped=told.number("rows"),
    )


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_owners("owned_columns", _SETTINGS, stage)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage. PlanError for a table of which model axes split rows,
    or that has none."""
    return build_together([(slots, stage, store)], lines)


def build_together(groups: Sequence[Together], lines: Lines) -> SyncRun:
    """Returns what runs the form for groups of which the stage says different settings: rows of all
    tables go in one message. Errors are those of `build`."""
    return OwnedRows(*owned_tables("owned_columns", groups, lines, ColumnTable), lines)
