"""Keys of random numbers: of a job's seed, step, block, op, and of more where that matters."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from threading import Lock

import torch

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import TOTALS
from meshwright.ir.graph.prelude import PRELUDE


def key_of(comm: Comm, op: str) -> int:
    """The key of an op's numbers in this step, the same on all ranks: 0 <= key < 2^63."""
    return _hashed(comm.seed, comm.step, _block(comm), op)


def seed_of(comm: Comm, op: str, sample: int, axes: tuple[str, ...] = ()) -> int:
    """The seed of one sample's numbers in one op; `axes` are those whose coordinate matters."""
    where = (f"{axis}={comm.coordinates[axis]}" for axis in axes)
    return _hashed(comm.seed, comm.step, _block(comm), op, sample, *where)


def _block(comm: Comm) -> str:
    # What the totals of a batch are computed from is drawn again in the prelude.
    return PRELUDE if comm.block == TOTALS else comm.block


@lru_cache(maxsize=4096)
def _hashed(*parts: object) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


_DEFAULT = Lock()
"""Threads have one default generator together: simulated ranks take turns with it."""


@contextmanager
def default_generator(device: torch.device) -> Iterator[torch.Generator]:
    """The generator that operators on `device` draw from by themselves, to be given seeds; it is as
    before afterwards."""
    generator = torch.default_generator
    if device.type == "cuda" and torch.cuda.is_available():  # not where tensors are fake
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    with _DEFAULT:
        before = generator.get_state()
        try:
            yield generator
        finally:
            generator.set_state(before)
