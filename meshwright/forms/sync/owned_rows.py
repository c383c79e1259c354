"""EmbRace: rows that occur go to their owners, and rows that the next batch reads come back (Li et
al. 2022).

Each rank of dp_shard owns some rows of a table: it sums their gradients, holds the state of their
optimizer and steps them. A rank asks owners for the rows that its next batch reads, and then sends
them the gradients of those, as they know already which they are. It has nothing of other rows: no
rank has a table whole. As owners step all that they own, every optimizer that steps each element
alone is exact; where one changes nothing that has no gradient, they step rows with a gradient
alone, which is the same.

The rows that a batch reads are those in one of the model's inputs, `ids`. Where the next batch is
not known, they are asked for when it has come.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

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
ROW_STORES = True
TABLES = ("rows", "rows_each", "row_bytes", "busiest", "ids")
TABLE_ZERO = ZERO
_SETTINGS: Known = {
    "rows": Number(1.0, 1e-9, 1.0), "rows_each": Number(1.0, 1e-9, 1.0),
    "row_bytes": Number(256, 1, 2**40),
    "busiest": Number(1.0, 1.0, 2**20), "ids": Text(),
}  # fmt: skip
"""Share of rows that all ranks' batches read, and one's; bytes of a row; how many times the mean
the busiest owner has of those; the input that names them."""


def describe(
    replicas: int, zero: int = 1, settings: Mapping[str, Setting] = MappingProxyType({}), *,
    shards: int = 0,
) -> Exchange:  # fmt: skip
    """Returns what is held and sent: rows both ways, and their numbers when they are asked for.

    `shards`: ranks that own something, all replicas if 0.
    """
    told = FormSettings(_SETTINGS, settings)
    return exchange_of_owners(
        shards or replicas, told.number("rows_each"), told.whole("row_bytes"), to_all=False,
        stepped=told.number("rows"), busiest=told.number("busiest"),
    )  # fmt: skip


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_owners("owned_rows", _SETTINGS, stage)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage. PlanError for a table of which model axes split rows,
    or that has none."""
    return build_together([(slots, stage, store)], lines)


def build_together(groups: Sequence[Together], lines: Lines) -> SyncRun:
    """Returns what runs the form for groups of which the stage says different settings: rows of all
    tables go in one message. Errors are those of `build`."""
    return OwnedRows(*owned_tables("owned_rows", groups, lines), lines)
