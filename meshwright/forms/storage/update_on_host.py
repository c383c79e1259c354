"""Every replica has parameters whole, where blocks read them; a copy of what it steps lies on the
host, with the optimizer's state, and is stepped there (Ren et al. 2021, ZeRO-Offload).

Gradients go to the host as blocks finish, and values come back under the next forward.
"""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.forms.exchange_rows import Event, Hold, HostCopy, Hosted, Row
from meshwright.forms.host_link import HostLink, host_link
from meshwright.forms.host_update import SteppedOnHost
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.ir.plan.plan import Setting, Stage

RELIEVES = True


def describe(replicas: int, settings: Mapping[str, Setting] | None = None) -> tuple[Row, ...]:
    """Returns what is held and copied; what is sent is the form's."""
    return (
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
        Hosted(kind="parameters", too=True),
        Hosted(kind="gradients"),
        Hosted(kind="optimizer"),
        HostCopy(what="gradients", to="host", at=Event.AFTER_LAST, until=Event.END),
        HostCopy(what="parameters", to="device", at=Event.UPDATED, until=Event.NEXT_FORWARD),
    )


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with its settings and what goes beside it."""
    yield from wrong_beside("update_on_host", stage)


def wrong_beside(key: str, stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a store without settings whose parameters are stepped on the
    host."""
    assert stage.store is not None
    for name in stage.store.settings:
        yield f"{key} has no setting {name[:64]!r}: it has none", f"{key} alone"
    if stage.sync is not None and stage.dp > 1:
        yield (
            f"what is on the host is stepped at once, and sync {stage.sync.form} may step later",
            "no sync",
        )


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns the parameters as they are; the form's run is put on the host."""
    return OnHost(slots, SteppedOnHost)


class OnHost(ParameterStore):
    """Parameters where blocks read them; what `kind` runs around a form puts on the host."""

    brings_copies = True

    def __init__(
        self, slots: Sequence[Slot], kind: type[SteppedOnHost], *, each: bool = False
    ) -> None:
        """`each`: gradients go in every micro-batch, as there are no replicas."""
        super().__init__(())
        self._slots, self._kind, self._each = slots, kind, each

    def around(self, run: SyncRun, copies: Mapping[int, Slot]) -> SyncRun:
        link = link_of(self._slots)
        return self._kind(run, self._slots, link, copies, each=self._each)


def link_of(slots: Sequence[Slot]) -> HostLink:
    """Returns the link of the device that parameters are on."""
    return host_link(slots[0].whole.device) if slots else HostLink()
