"""Which boxes of a global tensor a rank holds, after tensor and ZeRO sharding."""

from dataclasses import dataclass

from torch import Tensor

from meshwright.ir.layout import Axis, Placement, Shard, units_of


@dataclass(frozen=True, slots=True)
class Piece:
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


def chunk_rows(rows: int, parts: int, index: int) -> tuple[int, int]:
    """First row and one past the last of part `index`: equal chunks, the last ones shorter."""
    chunk = -(-rows // parts)
    return min(index * chunk, rows), min((index + 1) * chunk, rows)


def pieces(
    shape: tuple[int, ...],
    tp: Placement,
    tp_size: int,
    tp_coordinate: int,
    rows: tuple[int, int] | None = None,
) -> tuple[Piece, ...]:
    """The boxes of `shape` that a rank holds; `rows` are those of its tp-local tensor it keeps."""
    if not shape:
        return (Piece((), (), ()),) if rows is None or rows[1] > rows[0] else ()
    found = []
    for dim, local, start, length in _sections(shape, tp, tp_size, tp_coordinate):
        offsets, sizes, local_offsets = [0] * len(shape), list(shape), [0] * len(shape)
        offsets[dim], sizes[dim], local_offsets[dim] = start, length, local
        if rows is not None:
            first = max(local_offsets[0], rows[0])
            last = min(local_offsets[0] + sizes[0], rows[1])
            offsets[0] += first - local_offsets[0]
            sizes[0], local_offsets[0] = last - first, first - rows[0]
        if min(sizes) > 0:
            found.append(Piece(tuple(offsets), tuple(sizes), tuple(local_offsets)))
    return tuple(found)


def _sections(
    shape: tuple[int, ...], tp: Placement, tp_size: int, coordinate: int
) -> list[tuple[int, int, int, int]]:
    """(dim, local start, global start, length) of each run of `tp`'s dim."""
    if not isinstance(tp, Shard):
        return [(0, 0, 0, shape[0])]
    units = units_of(shape[tp.dim], tp)
    start, stop = Axis(tp_size).span(units, coordinate)
    length = (stop - start) * tp.inner
    return [(tp.dim, n * length, (n * units + start) * tp.inner, length) for n in range(tp.outer)]
