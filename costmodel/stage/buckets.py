"""Parameters of a stage on a rank, and the buckets in which their gradients move."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

BUCKET_BYTES = 25 * 2**20
"""Gradients that the runtime reduces together."""


class LocalParam(NamedTuple):
    """A parameter on one rank."""

    nbytes: int
    dtype: str
    trained: bool


@dataclass(frozen=True, slots=True)
class Owned:
    """Parameters that a block is the first of its stage to read: its backward is the last to add to
    their gradients. Equal blocks share one of these."""

    read_bytes: int
    """As blocks read them: copies, where there are some."""
    trained_bytes: int
    frozen_bytes: int
    """Of those that are not trained."""
    tensors: int
    """Trained ones."""
    largest_trained: int
    runs: tuple[tuple[str, int, int], ...]
    """Trained ones in order, those of one dtype together: (dtype, bytes, tensors)."""
    sizes: tuple[int, ...] = ()
    """Bytes of each trained one, in order; empty: those of a run are equal."""
    casting: int = 0
    """Where gradients of all are there as they are read, and one after the other is cast to what is
    stepped: the most beside all that are cast, as of the gradient that is cast then."""

    @classmethod
    def of(cls, params: Sequence[LocalParam], read: float = 1.0) -> "Owned":
        """`read`: bytes that blocks read of a trained one, per byte of it."""
        trained = [param for param in params if param.trained]
        runs = [(dtype, [p.nbytes for p in own])
                for dtype, own in groupby(trained, key=lambda p: p.dtype)]  # fmt: skip
        return cls(
            sum([round(p.nbytes * (read if p.trained else 1.0)) for p in params]),
            sum([p.nbytes for p in trained]),
            sum([p.nbytes for p in params if not p.trained]), len(trained),
            max([p.nbytes for p in trained], default=0),
            tuple((dtype, sum(sizes), len(sizes)) for dtype, sizes in runs),
            tuple([nbytes for _, sizes in runs for nbytes in sizes]),
            _casting([param.nbytes for param in trained], read),
        )  # fmt: skip

    def each(self) -> Iterator[tuple[str, int]]:
        """Yields dtype and bytes of each trained one, in order."""
        at = 0
        for dtype, nbytes, tensors in self.runs:
            own = self.sizes[at : at + tensors] or (nbytes // max(1, tensors),) * tensors
            yield from ((dtype, size) for size in own)
            at += tensors


def _casting(sizes: Sequence[int], read: float) -> int:
    """Later ones are narrow meanwhile."""
    found, later = 0, 0
    for nbytes in reversed(sizes):
        found = max(found, nbytes - round(later * (1 - read) / read))
        later += nbytes
    return found


class Tied(NamedTuple):
    """A trained parameter that several blocks of a stage read, in order: the last one's backward is
    the first to make its gradient, and others make one of their own and add it."""

    nbytes: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockParams:
    """The parameters of a stage on one rank, by the block that owns them."""

    owned: tuple[Owned, ...]
    also: Mapping[int, frozenset[int]]
    """Block -> earlier ones of which it reads parameters too."""
    tied: tuple[Tied, ...] = ()

    @property
    def trained_bytes(self) -> int:
        return sum([own.trained_bytes for own in self.owned])

    @property
    def frozen_bytes(self) -> int:
        return sum([own.frozen_bytes for own in self.owned])

    @property
    def tensors(self) -> int:
        """Trained ones."""
        return sum([own.tensors for own in self.owned])

    @property
    def gathered(self) -> list[int]:
        """Bytes of each block's parameters: what it reads, and all kept with that."""
        return self._gathered([own.read_bytes for own in self.owned])

    @property
    def gathered_frozen(self) -> list[int]:
        """Of those, bytes of parameters that are not trained."""
        return self._gathered([own.frozen_bytes for own in self.owned])

    def _gathered(self, sizes: list[int]) -> list[int]:
        found = [*sizes]
        for block, others in self.also.items():
            found[block] += sum(sizes[other] for other in others)
        return found


class Bucket(NamedTuple):
    """Gradients that move together."""

    owner: int
    nbytes: int
    tensors: int


def buckets(owned: Sequence[Owned], limit_bytes: int) -> tuple[Bucket, ...]:
    """As `forms.flat.buckets` makes them; `limit_bytes` 0: one for each owner."""
    found: list[Bucket] = []
    last = ""
    nbytes = tensors = 0
    for owner in range(len(owned) - 1, -1, -1):
        for number, (dtype, more_bytes, more) in enumerate(owned[owner].runs):
            # The rest of a run is of one dtype and one owner: it joins its first.
            if number == 0 and dtype == last and nbytes < limit_bytes:
                nbytes, tensors = nbytes + more_bytes, tensors + more
                found[-1] = Bucket(owner, nbytes, tensors)
            else:
                last, nbytes, tensors = dtype, more_bytes, more
                found.append(Bucket(owner, nbytes, tensors))
    return tuple(found)


def forward_buckets(owned: Sequence[Owned], limit_bytes: int) -> tuple[Bucket, ...]:
    """Returns buckets of consecutive parameters as the forward reads them, a dtype at a time; one
    is closed when it has `limit_bytes`."""
    found: list[Bucket] = []
    for dtype in dict.fromkeys(dtype for own in owned for dtype, *_ in own.runs):
        nbytes = limit_bytes
        for owner, own in enumerate(owned):
            for size in [size for kind, size in own.each() if kind == dtype]:
                if nbytes >= limit_bytes:
                    found.append(Bucket(owner, 0, 0))
                    nbytes = 0
                last = found[-1]
                found[-1] = Bucket(last.owner, last.nbytes + size, last.tensors + 1)
                nbytes += size
    return tuple(reversed(found))
