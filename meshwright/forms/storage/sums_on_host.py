"""As update_on_host, and gradients go to the host in every micro-batch and are added up there: the
device has those of a block or two (Ren et al. 2021, ZeRO-Offload, with accumulation)."""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.forms.exchange_rows import Event, Hold, HostCopy, Hosted, Row
from meshwright.forms.host_update import SteppedOnHost
from meshwright.forms.running import Lines, ParameterStore, Slot
from meshwright.forms.storage.update_on_host import OnHost, wrong_beside
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Setting, Stage

RELIEVES = True
_ALONE = "replicas would sum each micro-batch's gradients before they go"


def describe(replicas: int, settings: Mapping[str, Setting] | None = None) -> tuple[Row, ...]:
    """Returns what is held and copied. PlanError where there are replicas."""
    if replicas > 1:
        raise PlanError(f"{_ALONE}; nearest is update_on_host")
    return (
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),
        Hosted(kind="parameters", too=True),
        Hosted(kind="gradients"),
        Hosted(kind="optimizer"),
        HostCopy(what="gradients", to="host", at=Event.AFTER_BACKWARD, until=Event.END, every=True),
        HostCopy(what="parameters", to="device", at=Event.UPDATED, until=Event.NEXT_FORWARD),
    )


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with its settings and what goes beside it."""
    yield from wrong_beside("sums_on_host", stage)
    if stage.dp > 1:
        yield _ALONE, "store update_on_host, or dp 1"


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns the parameters as they are; the form's run is put on the host."""
    return OnHost(slots, SteppedOnHost, each=True)
