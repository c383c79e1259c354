"""Whether the ranks of a job read the same batch.

Where they do not, a job would train on inputs of one with labels of another, and nothing else
would show it.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.ir.comm.by_store import judged
from meshwright.ir.errors import MismatchError

_WHOLE_BYTES = 1 << 26
"""Up to which all of a tensor is compared; of a larger one evenly spaced rows."""
ADVICE = (
    "every rank must read the same global batches, so shuffle with a generator of one seed "
    "(DataLoader(..., generator=torch.Generator().manual_seed(0))), without a DistributedSampler; "
    "or cut each rank's part out with job.shard(batch) and pass it with sharded=True"
)


@dataclass(frozen=True)
class _BatchRead:
    """What a rank says of its batch."""

    samples: tuple[int, ...] | None
    """Which of the global batch it is; None: all."""
    sums: Mapping[str, int]
    """Checksums by input name, of what has values."""


def check_same_batches(batch: Mapping[str, Tensor], samples: Sequence[int] | None) -> None:
    """MismatchError on every rank unless those that read the same samples have the same values.

    Every rank calls it. `samples`: which of the global batch this rank has; None: all.
    """
    sums = {name: _checksum(x) for name, x in batch.items() if not x.is_meta}
    if odd := judged(_BatchRead(None if samples is None else tuple(samples), sums), _first_odd):
        raise MismatchError(f"{odd}: {ADVICE}").on_all_ranks()


def _first_odd(reads: Sequence[_BatchRead]) -> str | None:
    known: dict[tuple[int, ...] | None, dict[str, int]] = {}
    """Of samples, the first rank that has values of each input."""
    for rank, read in enumerate(reads):
        first = known.setdefault(read.samples, {})
        if odd := [
            name for name, own in read.sums.items()
            if reads[first.setdefault(name, rank)].sums[name] != own
        ]:  # fmt: skip
            return (
                f"rank {rank} has read another first batch than rank {first[odd[0]]} "
                f"({', '.join(odd)} {'differs' if len(odd) == 1 else 'differ'})"
            )
    return None


def _checksum(x: Tensor) -> int:
    x = x.detach()
    if x.ndim and (step := x.nbytes // _WHOLE_BYTES) > 0:
        x = x[:: step + 1]
    return zlib.crc32(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
