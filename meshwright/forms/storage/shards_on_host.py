"""Each rank of dp_shard has its rows of each parameter, as ZeRO 3 has them; what it steps lies on
the host with the optimizer's state, and is stepped there (Rajbhandari et al. 2021, ZeRO-Infinity;
FSDP's offload to CPUs). Where blocks read copies, the device has its part of these alone.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from meshwright.forms.exchange_rows import Event, HostCopy, Hosted, Row
from meshwright.forms.flat import ShardedBucket
from meshwright.forms.host_link import HostLink
from meshwright.forms.host_update import SteppedOnHost
from meshwright.forms.running import Lines, ParameterStore, Slot, SyncRun
from meshwright.forms.storage import shards
from meshwright.forms.storage.shards import Shards, ShardUnit, units
from meshwright.forms.storage.update_on_host import link_of, wrong_beside
from meshwright.ir.plan.plan import Setting, Stage

SPLIT = True
RELIEVES = True


def describe(replicas: int, settings: Mapping[str, Setting] | None = None) -> tuple[Row, ...]:
    """Returns what is held, gathered and copied."""
    return (
        *shards.describe(replicas),
        Hosted(kind="parameters", too=True, as_read=True),
        Hosted(kind="gradients"),
        Hosted(kind="optimizer"),
        HostCopy(what="gradients", to="host", at=Event.AFTER_LAST, until=Event.END),
        HostCopy(what="parameters", to="device", at=Event.UPDATED, until=Event.UPDATED),
    )


def check(stage: Stage) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with its settings and what goes beside it."""
    yield from wrong_beside("shards_on_host", stage)


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns this rank's rows; `whole` of the slots is empty while no block runs."""
    return _ShardsOnHost(slots, lines, link_of(slots))


class _Unit(ShardUnit):
    """The parameters that one call owns. What is gathered is what the host has made of them."""

    def __init__(self, bucket: ShardedBucket) -> None:
        super().__init__(bucket)
        self.copies: list[Slot] = []
        """Of its rows of each slot, which the device has in their place."""
        self._read = self.flat
        if bucket.slots[0].is_copy:
            self._read = self.flat.to(bucket.slots[0].whole.dtype, copy=True)
            self.copies = [
                Slot(slot.param, nn.Parameter(view, requires_grad=False), slot.calls)
                for slot, view in zip(bucket.slots, bucket.views(self._read), strict=True)
            ]

    def as_read(self) -> Tensor:
        return self._read


class _ShardsOnHost(Shards):
    def __init__(self, slots: Sequence[Slot], lines: Lines, link: HostLink) -> None:
        super().__init__(units(slots, lines, _Unit), lines)
        self._slots, self._link = slots, link

    def around(self, run: SyncRun, copies: Mapping[int, Slot]) -> SyncRun:
        own = {
            id(shard): copy
            for unit in self.units if isinstance(unit, _Unit)
            for shard, copy in zip(unit.shards, unit.copies, strict=False)
        }  # fmt: skip
        return SteppedOnHost(run, self._slots, self._link, own)
