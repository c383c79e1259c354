"""Which boxes of a global tensor a rank holds, after tensor and ZeRO sharding."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from torch import Tensor

from meshwright.ir.layout.nesting import Runs


@dataclass(frozen=True, slots=True)
class ShardBox:
    """One box: where it lies in the global tensor and where in the local one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    def of_global(self, x: Tensor) -> Tensor:
        return _box(x, self.offsets, self.sizes)

    def of_local(self, x: Tensor) -> Tensor:
        return _box(x, self.local_offsets, self.sizes)


def _box(x: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
        x = x.narrow(dim, start, length)
    return x.view(()) if not sizes else x


def pieces(runs: tuple[Runs, ...], rows: tuple[int, int] | None = None) -> tuple[ShardBox, ...]:
    """The boxes that a rank holds, whose elements of each dim are `runs`; `rows` are those of its
    local tensor that it keeps."""
    if not runs:
        return (ShardBox((), (), ()),) if rows is None or rows[1] > rows[0] else ()
    dims = [list(_placed(found)) for found in runs]
    if rows is not None:
        dims[0] = [cut for span in dims[0] for cut in _cut(span, rows)]
    return tuple(
        ShardBox(
            tuple(s.start for s in box), tuple(s.length for s in box), tuple(s.at for s in box)
        )
        for box in product(*dims)
    )


class _Span(NamedTuple):
    """Consecutive elements of a dim, and where they lie in the local tensor."""

    start: int
    length: int
    at: int


def _placed(runs: Runs) -> Iterator[_Span]:
    at = 0
    for start, length in runs:
        if length:
            yield _Span(start, length, at)
        at += length


def _cut(span: _Span, rows: tuple[int, int]) -> Iterator[_Span]:
    """What of it lies in `rows`, which begin at 0 in what is kept."""
    first, last = max(span.at, rows[0]), min(span.at + span.length, rows[1])
    if first < last:
        yield _Span(span.start + first - span.at, last - first, first - rows[0])
