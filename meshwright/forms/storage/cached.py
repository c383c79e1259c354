"""A table lies on the host of its owner, with what the optimizer keeps of its rows; the rows that
occur most are in slots on the device (Fang et al. 2022, arXiv 2208.05321).

Rows that a batch reads come before it, and with `prefetch` under the steps before; who leaves for
them is a policy's to say. Blocks have the rows of their batch alone, which are stepped in the slots
where a gradient of zero changes nothing; by an optimizer that changes all rows in each step they are
stepped on the host, all of them. A form whose tables have owners brings the rows to who reads them;
without replicas a rank asks itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from meshwright.forms.cache.policies import POLICIES, USUAL
from meshwright.forms.cache.table import CachedTable, CacheSettings
from meshwright.forms.exchange import Event, Hold, Hosted, Row
from meshwright.forms.flat import held_whole
from meshwright.forms.owned import OwnedRows, owned_tables
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.settings import FormSettings, Known, Number, Text, Word, wrong_settings
from meshwright.ir.plan.plan import Setting, Stage

ROWS = True
DEEPEST = 3
_SETTINGS: Known = {
    "ratio": Number(0.05, 1e-9, 1.0),
    "policy": Word((USUAL, *[name for name in POLICIES if name != USUAL])),
    "prefetch": Number(1, 0, DEEPEST),
    "rows": Number(1.0, 1e-9, 1.0), "missing": Number(1.0, 0.0, 1.0),
    "ids": Text(),
}  # fmt: skip
"""Slots per row of a rank; who leaves; batches whose rows come ahead; share of rows that a step's
batch reads, and share of rows that are in no slot then; the input that names them."""


def describe(replicas: int, settings: Mapping[str, Setting] | None = None) -> tuple[Row, ...]:
    """Returns what is held and copied; what is sent is the form's."""
    alone = replicas == 1
    return (
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=int(alone),
             part=int(not alone)),
        Hosted(kind="parameters"),
        Hosted(kind="optimizer"),
    )  # fmt: skip


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with its settings and what goes beside it."""
    assert stage.store is not None
    yield from wrong_settings("cached", _SETTINGS, stage.store.settings)
    if not stage.store.settings.get("ids"):
        yield "cached has the rows that an input names, and ids names none", "ids of an input"
    if stage.mesh.get("dp_replicate", 1) > 1:
        yield "cached has one owner for each row, and dp_replicate makes copies", "dp_replicate 1"


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

    def around(self, run: SyncRun) -> SyncRun:
        if self._lines.replicas.size > 1:
            return run
        return OwnedRows(*owned_tables("cached", [(self._slots, self._stage, self)], self._lines),
                         self._lines)  # fmt: skip
