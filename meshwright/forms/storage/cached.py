"""A table lies on the host of its owner, with what the optimizer keeps of its rows; the rows that
occur most are in slots on the device (Fang et al. 2022, arXiv 2208.05321).

Rows that a batch reads come before it, and with `prefetch` under the steps before; who leaves for
them is a policy's to say. Blocks have the rows of their batch alone, which are stepped in the slots
where a gradient of zero changes nothing; by an optimizer that changes all rows in each step, all
are stepped on the host. A form whose tables have owners brings the rows to who reads them;
without replicas a rank asks itself. Copies of owners (dp_replicate) have a cache each, with the
rows that the batch of any copy reads, as all step these.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from meshwright.forms.cache.policies import POLICIES, USUAL
from meshwright.forms.cache.table import CachedTable, CacheSettings
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Hold, HostCopy, Hosted, Row, Send
from meshwright.forms.flat import held_whole
from meshwright.forms.owned import OwnedRows
from meshwright.forms.owned_table import owned_tables
from meshwright.forms.owner_exchange import exchange_of_owners
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, Text, Word, wrong_settings
from meshwright.ir.plan.plan import Setting, Stage

ROWS = True
TABLES = ("ratio", "rows", "missing", "row_bytes", "ids")
DEEPEST = 3
_SETTINGS: Known = {
    "ratio": Number(0.05, 1e-9, 1.0),
    "policy": Word((USUAL, *[name for name in POLICIES if name != USUAL])),
    "prefetch": Number(1, 0, DEEPEST),
    "rows": Number(1.0, 1e-9, 1.0), "missing": Number(1.0, 1e-9, 1.0),
    "row_bytes": Number(256, 1, 2**40), "ids": Text(),
}  # fmt: skip
"""Slots per row of a rank; who leaves; batches whose rows come ahead; share of rows that a step's
batch reads, and of a rank's rows those that are in no slot then; bytes of a row; the input that
names them."""


def describe(replicas: int, settings: Mapping[str, Setting] | None = None) -> tuple[Row, ...]:
    """Returns what is held and copied; what is sent is the form's. An optimizer that changes all
    rows in each step has all that it needs on the host, and all rows of a batch come anew."""
    ahead = FormSettings(_SETTINGS, settings or {}).whole("prefetch")
    when = {"at": Event.BEGIN, "until": Event.NEXT_BEGIN if ahead else Event.BEGIN}
    rows = {"what": "parameters", "share": "missing", "state": True, "steps": "some"}
    return (
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        # What comes lies beside its slots until it is needed.
        Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1, share="missing",
             times=max(1, ahead)),
        Hosted(kind="parameters", share="cached"),
        Hosted(kind="optimizer", share="cached", steps="some"),
        Hosted(kind="optimizer", steps="all"),
        HostCopy(to="device", **rows, **when),  # type: ignore[arg-type]
        HostCopy(to="host", **rows, **when),  # type: ignore[arg-type]
        HostCopy(what="parameters", to="device", at=Event.BEGIN, until=Event.BEGIN, share="read",
                 state=True, steps="all"),
        HostCopy(what="gradients", to="host", at=Event.BEGIN, until=Event.BEGIN, share="read",
                 steps="all"),
    )  # fmt: skip


def stated(settings: Mapping[str, Setting]) -> Mapping[str, float]:
    """Returns the shares of a rank's rows that have slots, are missing, and are read."""
    told = FormSettings(_SETTINGS, settings)
    return {
        "cached": told.number("ratio"), "missing": told.number("missing"),
        "read": told.number("rows"),
    }  # fmt: skip


def alone(settings: Mapping[str, Setting]) -> Exchange:
    """Returns what owners do, where a rank asks nobody but itself."""
    told = FormSettings(_SETTINGS, settings)
    share = told.number("rows")
    made = exchange_of_owners(1, share, told.whole("row_bytes"), to_all=False, stepped=share)
    rows = tuple([row for row in made.rows if not isinstance(row, Send)])
    return replace(made, rows=rows)


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with its settings and what goes beside it."""
    assert stage.store is not None
    yield from wrong_settings("cached", _SETTINGS, stage.store.settings)
    if not stage.store.settings.get("ids"):
        yield "cached has the rows that an input names, and ids names none", "ids of an input"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns what makes tables; a rank without replicas has the rows that it reads by itself."""
    return _Cached(slots, lines, stage)


class _Cached(ParameterStore):
    def __init__(self, slots: Sequence[Slot], lines: Lines, stage: Stage) -> None:
        super().__init__(held_whole((), lines))
        assert stage.store is not None
        self._slots, self._lines, self._stage = slots, lines, stage
        told = FormSettings(_SETTINGS, stage.store.settings)
        settings = CacheSettings(told.number("ratio"), told.word("policy"), told.whole("prefetch"))
        self.table = partial(CachedTable, settings=settings)
        self._ids = told.word("ids")

    def around(self, run: SyncRun, copies: Mapping[int, Slot]) -> SyncRun:
        if self._lines.replicas.size > 1:
            return run
        return OwnedRows(*owned_tables("cached", [(self._slots, self._stage, self)], self._lines),
                         self._lines)  # fmt: skip
