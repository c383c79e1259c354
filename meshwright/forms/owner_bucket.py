"""Parameters that move together, each of which one rank owns whole: flat, owner by owner."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.forms.flat import ShardedBucket, frozen, trainable
from meshwright.forms.placing import WEIGHTS, MatrixTask, placed, weight
from meshwright.forms.running import Lines, Peers, Slot
from meshwright.forms.settings import FormSettings, Known, Word
from meshwright.ir.comm.p2p_collectives import Waitable
from meshwright.ir.plan.plan import Stage
from meshwright.ir.profile.measured import Purpose
from meshwright.ir.torch_private import reduce_scatter_uneven, start_uneven_gather

SETTINGS: Known = {"balance": Word(tuple(WEIGHTS))}
"""What is evened out over owners: what their work on a matrix is made of."""


def owners_of_slots(slots: Sequence[Slot], lines: Lines, stage: Stage) -> Mapping[Slot, int]:
    """Returns the owner of each slot, a rank of dp_shard, as a stage of the plan says; those that
    are not trained are shared out by themselves."""
    kind = FormSettings(SETTINGS, stage.sync.settings if stage.sync else {}).word("balance")
    found: dict[Slot, int] = {}
    for own in (trainable(slots), frozen(slots)):
        shapes = [tuple(slot.whole.shape) for slot in own]
        found |= zip(own, owners_of(shapes, lines.shards.size, kind), strict=True)
    return found


def owners_of(shapes: Sequence[tuple[int, ...]], ranks: int, kind: str) -> tuple[int, ...]:
    """Returns the owner of each parameter, by its shape on a rank; equal on all ranks. `kind`: of
    the work on it (`forms.placing.WEIGHTS`)."""
    return placed([MatrixTask(weight(shape, kind)) for shape in shapes], ranks).of


class OwnerBucket(ShardedBucket):
    """Slots that have owners and move together: flat, the slots of each owner one after the other,
    without padding. A flat shard is what its owner has."""

    def __init__(
        self, slots: Sequence[Slot], lines: Lines, peers: Peers, owners: Mapping[Slot, int]
    ) -> None:
        self.slots, self._lines, self.peers = tuple(slots), lines, peers
        self.owner = min(slot.owner for slot in slots)
        self.calls = frozenset(call for slot in slots for call in slot.calls)
        self._owners = [owners[slot] for slot in slots]
        self._order = sorted(range(len(slots)), key=lambda i: self._owners[i])
        sizes = [slot.whole.numel() for slot in slots]
        self._counts = [sizes[i] for i in self._order]
        self.sizes = [
            sum([n for n, rank in zip(sizes, self._owners, strict=True) if rank == peer])
            for peer in range(peers.size)
        ]
        """Elements of each rank's flat shard."""
        self.size = self.sizes[peers.coordinate]

    def rows(self, slot: Slot) -> tuple[int, int]:
        mine = self._owners[self.slots.index(slot)] == self.peers.coordinate
        return (0, slot.rows) if mine else (slot.rows, slot.rows)

    def pack(self, tensors: Sequence[Tensor | None]) -> Tensor:
        flat = self._flat(sum(self.sizes), tensors)
        for i, part in zip(self._order, torch.split(flat, self._counts), strict=True):
            found = tensors[i]
            if found is None:
                part.zero_()
            else:
                part.view(found.shape).copy_(found)
        return flat

    def _flat(self, size: int, like: Sequence[Tensor | None]) -> Tensor:
        first = next((x for x in like if x is not None), self.slots[0].whole.detach())
        return torch.empty(size, dtype=first.dtype, device=first.device)

    def own(self, packed: Tensor) -> Tensor:
        return torch.split(packed, self.sizes)[self.peers.coordinate]

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        for i, part in zip(self._order, torch.split(flat, self._counts), strict=True):
            tensors[i].copy_(part.view(tensors[i].shape))

    def views(self, flat_shard: Tensor) -> list[Tensor]:
        found, used, flat = dict[int, Tensor](), 0, flat_shard.reshape(-1)
        for i in self._order:
            slot = self.slots[i]
            shape = slot.whole.shape or (1,)
            if self._owners[i] == self.peers.coordinate:
                found[i] = flat[used : used + slot.whole.numel()].view(shape)
                used += slot.whole.numel()
            else:
                found[i] = flat.new_empty((0, *shape[1:]))
        return [found[i] for i in range(len(self.slots))]

    def pack_shards(self, shards: Sequence[Tensor]) -> Tensor:
        flat = self._flat(self.size, shards)
        for view, shard in zip(self.views(flat), shards, strict=True):
            view.copy_(shard)
        return flat

    def gather(
        self, flat_shard: Tensor, purpose: Purpose = "parameters"
    ) -> tuple[Tensor, Waitable]:
        flat = flat_shard.new_empty(sum(self.sizes))
        what = self._what(purpose, "all_gather", flat.nbytes)
        start = self._lines.recorder.mark()
        work = start_uneven_gather(flat, flat_shard.reshape(-1), self.sizes, self.peers.group)
        return flat, self._lines.recorder.pending(what, work, start)

    def scatter(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Waitable]:
        flat = self.pack(gradients)
        mine = flat.new_empty(self.size)
        what = self._what("gradients", "reduce_scatter", flat.nbytes)
        start = self._lines.recorder.mark()
        work = reduce_scatter_uneven(mine, flat, self.sizes, self.peers.group)
        return mine, self._lines.recorder.pending(what, work, start)
