"""Each rank of dp_shard has its rows of each parameter (Rajbhandari et al. 2020, stage 3): those of
a block are gathered before it runs, and let go after it."""

from collections.abc import Sequence

from torch import Tensor, nn

from meshwright.forms.exchange_rows import Event, Hold, Row, Send
from meshwright.forms.flat import ShardedBucket, buckets, frozen, trainable
from meshwright.forms.running import Held, Lines, ParameterStore, Slot
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import Stage

SPLIT = True


def describe(replicas: int) -> tuple[Row, ...]:
    """Returns what is held, and the gathers before a block's forward and before its backward."""
    gathers = [
        Send(what="parameters", primitive=Primitive.ALL_GATHER, axis="dp_shard", unit="block",
             at=event, until=event, unpacks=True, ahead=True)
        for event in (Event.BEFORE_FORWARD, Event.BEFORE_BACKWARD)
    ]  # fmt: skip
    return (
        Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, part=1),
        *gathers,
    )


def build(slots: Sequence[Slot], lines: Lines, stage: Stage) -> ParameterStore:
    """Returns this rank's rows; `whole` of the slots is empty while no block runs."""
    return Shards(units(slots, lines), lines)


def units(
    slots: Sequence[Slot], lines: Lines, make: "type[ShardUnit] | None" = None
) -> "list[ShardUnit]":
    """Returns this rank's rows, in units that are gathered together."""
    groups = [group for part in (trainable(slots), frozen(slots)) for group in buckets(part, 0)]
    return [(make or ShardUnit)(ShardedBucket(group, lines, lines.shards)) for group in groups]


class ShardUnit:
    """The parameters that one call owns, in one dtype."""

    def __init__(self, bucket: ShardedBucket) -> None:
        self.bucket = bucket
        slots = bucket.slots
        whole = bucket.pack([slot.whole.detach() for slot in slots])
        self.flat = bucket.own(whole).to(slots[0].stepped, copy=True)
        """This rank's part of the parameters; the optimizer's tensors are views of it."""
        self.shards = [
            nn.Parameter(view, requires_grad=slot.param.requires_grad)
            for slot, view in zip(slots, bucket.views(self.flat), strict=True)
        ]
        self.users = 0
        self._arriving: tuple[Tensor, Waitable] | None = None
        self._bytes = [slot.whole.untyped_storage().nbytes() for slot in slots]
        self._free()

    @property
    def is_trained(self) -> bool:
        return self.bucket.slots[0].param.requires_grad

    def fetch(self) -> None:
        """Starts to gather, unless the parameters are there or on their way."""
        if not self.users and self._arriving is None:
            self._arriving = self.bucket.gather(self.as_read())

    def as_read(self) -> Tensor:
        """This rank's part, as blocks read it."""
        return self.bucket.as_read(self.flat)

    def open(self) -> None:
        self.fetch()
        self.users += 1
        if self._arriving is None:
            return
        flat, pending = self._arriving
        self._arriving = None
        pending.wait()
        for slot, nbytes in zip(self.bucket.slots, self._bytes, strict=True):
            slot.whole.untyped_storage().resize_(nbytes)
        # `.data` has its own version counter: refilling does not look like a change to autograd.
        self.bucket.unpack(flat, [slot.whole.data for slot in self.bucket.slots])

    def close(self) -> None:
        self.users -= 1
        if not self.users:
            self._free()

    def _free(self) -> None:
        for slot in self.bucket.slots:
            slot.whole.untyped_storage().resize_(0)


class Shards(ParameterStore):
    """Rows of each parameter, in units that are gathered together."""

    def __init__(self, units: Sequence[ShardUnit], lines: Lines) -> None:
        held = [
            Held(
                slot.param, lines.stage, shard, unit.bucket.rows(slot),
                lines.is_primary(slot.param, "dp_replicate"),
            )
            for unit in units for slot, shard in zip(unit.bucket.slots, unit.shards, strict=True)
        ]  # fmt: skip
        super().__init__(tuple(held))
        self.units = tuple(units)
        self._of_call: dict[int, list[ShardUnit]] = {}

    def before_forward(self, call: int, ahead: Sequence[int]) -> None:
        for unit in self._units_of(call):
            unit.open()
        for later in ahead:
            for unit in self._units_of(later):
                unit.fetch()

    before_backward = before_forward

    def close(self, call: int) -> None:
        for unit in self._units_of(call):
            unit.close()

    def _units_of(self, call: int) -> list[ShardUnit]:
        if call not in self._of_call:
            self._of_call[call] = [unit for unit in self.units if call in unit.bucket.calls]
        return self._of_call[call]
