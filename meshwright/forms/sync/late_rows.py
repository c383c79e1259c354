"""EmbRace with its second schedule: rows that no rank's next batch reads go under the next step (Li
et al. 2022).

As `owned_rows`, and besides: owners know which of their rows any rank asks for next. Gradients of
those rows go at the end of the step, and they are stepped and sent as ever. Gradients of all other
rows are on their way while the next step computes, and their owners step those rows at its end, by
the settings of their own step; before that, if anybody reads them. Each element is stepped once a
step with the sum of all its gradients, so that it is exact for optimizers that step each alone.
Copies of owners (dp_replicate) agree on the rows that go first, and sum the gradients of those at
once, of all others when these have come.

Nothing is held back in the first step, where the next batch is not known, where the norm of all
gradients is limited, and where stages share parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

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
TABLES = ("rows", "rows_each", "row_bytes", "busiest", "prior", "ids")
TABLE_ZERO = ZERO
UNDONE_BY_NORM = "sync owned_rows, or no max_grad_norm"
_SETTINGS: Known = {
    "rows": Number(1.0, 1e-9, 1.0), "rows_each": Number(1.0, 1e-9, 1.0),
    "row_bytes": Number(256, 1, 2**40), "busiest": Number(1.0, 1.0, 2**20),
    "prior": Number(0.5, 1e-9, 1 - 1e-9), "ids": Text(),
}  # fmt: skip
"""As of `owned_rows`; `prior`: share of a batch's rows that any rank's next one reads."""


def describe(
    replicas: int, zero: int = 1, settings: Mapping[str, Setting] = MappingProxyType({}), *,
    shards: int = 0,
) -> Exchange:  # fmt: skip
    """Returns what is held and sent: rows that are read next at once, the others a step later.

    `shards`: ranks that own something, all replicas if 0.
    """
    told = FormSettings(_SETTINGS, settings)
    return exchange_of_late_owners(
        shards or replicas, told.number("rows_each"), told.whole("row_bytes"), to_all=False,
        stepped=told.number("rows"), prior=told.number("prior"), busiest=told.number("busiest"),
    )  # fmt: skip


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the form in a stage, and what would be right."""
    yield from wrong_owners("late_rows", _SETTINGS, stage)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage, store: ParameterStore) -> SyncRun:
    """Returns what runs the form in a stage. PlanError for a table of which model axes split rows,
    or that has none."""
    return build_together([(slots, stage, store)], lines)


def build_together(groups: Sequence[Together], lines: Lines) -> SyncRun:
    """Returns what runs the form for groups of which the stage says different settings: rows of all
    tables go in one message. Errors are those of `build`."""
    return LateRows(*owned_tables("late_rows", groups, lines), lines)
