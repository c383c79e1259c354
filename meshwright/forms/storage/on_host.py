"""Parameters lie on the host with the optimizer's state, are stepped there, and come to the device
before a block's forward and before its backward, some blocks ahead (Rajbhandari et al. 2021,
ZeRO-Infinity; Colossal-AI's Gemini). `Stage.prefetch` says how many."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.forms.exchange_rows import Event, Hold, HostCopy, Hosted, Row
from meshwright.forms.host_update import FromHost, NothingAhead
from meshwright.forms.running import Lines, ParameterStore, Slot
from meshwright.forms.storage.update_on_host import OnHost, wrong_beside
from meshwright.ir.plan.plan import Setting, Stage

RELIEVES = True


def describe(replicas: int, settings: Mapping[str, Setting] | None = None) -> tuple[Row, ...]:
    """Returns what is held and copied; what is sent is the form's. Without replicas gradients go in
    every micro-batch and are added up on the host."""
    gradients = HostCopy(what="gradients", to="host", at=Event.AFTER_LAST, until=Event.END)
    if replicas == 1:
        gradients = replace(gradients, at=Event.AFTER_BACKWARD, every=True)
    fetches = [
        HostCopy(what="parameters", to="device", at=event, until=event, every=True)
        for event in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)
    ]
    return (
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
        Hosted(kind="parameters"),
        Hosted(kind="gradients"),
        Hosted(kind="optimizer"),
        gradients,
        *fetches,
    )


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with its settings and what goes beside it."""
    yield from wrong_beside("on_host", stage)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns what puts the form's run, and the parameters, on the host."""
    kind = FromHost if stage.prefetch or stage.dp > 1 else NothingAhead
    return OnHost(slots, kind, each=stage.dp == 1)
