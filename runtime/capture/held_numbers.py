"""Keys of random numbers in memory of the device, where recorded calls read them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.sharded.places import Drawn
from meshwright.codegen.sharded.seeds import key_in
from meshwright.ir.errors import PlanError
from meshwright.ir.pinned import sent


class HeldNumbers:
    """Of one micro-batch in flight, for all ops that draw in calls that are recorded: keys that the
    uncaptured calls would have in its step, and where its samples begin."""

    def __init__(self, comm: Comm, wanted: Iterable[Drawn]) -> None:
        self._comm, self._wanted = comm, tuple(dict.fromkeys(wanted))
        size = len(self._wanted), 2
        self._table = torch.zeros(size, dtype=torch.int64, device=comm.device)
        self._rows = dict(zip(self._wanted, self._table.unbind(), strict=True))

    def write(self) -> None:
        """Puts there what holds for the micro-batch that begins. Nothing waits: replays come after
        it in the stream."""
        if not self._wanted:
            return
        comm = self._comm
        said = [
            (key_in(comm, block, op), comm.sample_offset * per_sample)
            for block, op, per_sample in self._wanted
        ]
        self._table.copy_(sent(torch.tensor(said), comm.device))

    def __call__(self, block: str, op: str, per_sample: int) -> Tensor:
        """Where an op reads its own."""
        found = self._rows.get((block, op, per_sample))
        if found is None:
            raise PlanError(f"{op} draws numbers, and nobody said so before")
        return found
