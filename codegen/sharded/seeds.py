"""Keys of random numbers: of a job's seed, step, block, op, and of more where that matters."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.program import TOTALS
from meshwright.ir.graph.prelude import PRELUDE


def key_of(comm: Comm, op: str) -> int:
    """The key of an op's numbers in this step, the same on all ranks: 0 <= key < 2^63."""
    return key_in(comm, _block(comm), op)


def key_in(comm: Comm, block: str, op: str) -> int:
    """The same of an op of any block."""
    return _hashed(comm.seed, comm.step, block, op)


class NumbersHere(NamedTuple):
    """Where an op's numbers begin for the samples of this micro-batch."""

    key: int
    first: int
    """0 for the batch's first sample."""
    held: Tensor | None
    """Has both, if it is there: see `ir.random.dropout.dropout`."""


def numbers_here(comm: Comm, op: str, per_sample: int) -> NumbersHere:
    """Numbers of an op that has so many for each sample."""
    if comm.held is not None:
        return NumbersHere(0, 0, comm.held(_block(comm), op, per_sample))
    return NumbersHere(key_of(comm, op), comm.sample_offset * per_sample, None)


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
