"""The primitives of `ir.layout.conversions` on tensors, without autograd."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.codegen.collectives.line import Line, settled
from meshwright.ir.layout.conversions import COMMUNICATES, Primitive

_MAKES = frozenset(Primitive) - {Primitive.IDENTITY, Primitive.MASK}
"""Primitives whose result is laid out anew in memory."""


@dataclass(frozen=True, slots=True)
class DimShares:
    """How the ranks of an axis share a tensor dim: `outer` sections, each split into `sizes`."""

    dim: int
    sizes: tuple[int, ...]
    """Elements of each rank in each section."""
    outer: int = 1
    whole: int = 0
    """Elements of a section of the whole value; 0 means the sum of sizes. With micro-batches the
    sizes are those of one micro-batch only."""
    start: int = -1
    """Where this rank's elements begin in a section; -1 means after those of the ranks before."""
    zigzag: bool = False
    """Every second section is shared out in reverse; all sizes are equal then."""

    def span(self, rank: int) -> tuple[int, int, int]:
        """Elements before, of and after this rank in a section."""
        start = sum(self.sizes[:rank]) if self.start < 0 else self.start
        size = self.sizes[rank]
        return start, size, (self.whole or sum(self.sizes)) - start - size


def run(
    primitive: Primitive,
    x: Tensor,
    line: Line,
    source: DimShares | None = None,
    target: DimShares | None = None,
    keeps: bool = True,
    channels_last: bool = False,
) -> Tensor:
    """What this rank holds after `primitive`; x itself (not a copy) where nothing moves.

    `keeps` says whether this rank holds the value after MASK. `channels_last`: images are to have
    their channels innermost in memory, on all ranks of the line, so they move so.
    """
    if channels_last and primitive in _MAKES:
        ends = _turned(source, x.ndim), _turned(target, x.ndim)
        return run(primitive, x.movedim(1, -1), line, *ends, keeps).movedim(-1, 1)
    x = settled(x) if primitive in COMMUNICATES else x
    match primitive:
        case Primitive.IDENTITY:
            return x
        case Primitive.ALL_REDUCE:
            return x if line.size == 1 else line.all_reduce(x)
        case Primitive.MASK:
            return x if keeps else torch.zeros_like(x)
        case Primitive.ALL_GATHER:
            return _gather(x, line, _given(source))
        case Primitive.REDUCE_SCATTER:
            return _reduce_scatter(x, line, _given(target))
        case Primitive.SLICE:
            return take(x, _given(target), line.rank)
        case Primitive.PAD:
            return _pad(x, _given(source), line.rank)
        case Primitive.ALL_TO_ALL:
            return _all_to_all(x, line, _given(source), _given(target))


def begin(
    primitive: Primitive,
    x: Tensor,
    line: Line,
    source: DimShares | None = None,
    target: DimShares | None = None,
    keeps: bool = True,
    channels_last: bool = False,
) -> Callable[[], Tensor]:
    """Starts what `run` does; what it returns waits for that. All-to-all is over at once."""
    if channels_last and primitive in _MAKES:
        ends = _turned(source, x.ndim), _turned(target, x.ndim)
        arrive = begin(primitive, x.movedim(1, -1), line, *ends, keeps)
        return lambda: arrive().movedim(-1, 1)
    if line.size > 1:
        x = settled(x)
        match primitive:
            case Primitive.ALL_REDUCE:
                return line.begin_all_reduce(x)
            case Primitive.ALL_GATHER:
                gathered = line.begin_all_gather(_gathered_part(x, _given(source)))
                return lambda: _joined(gathered(), _given(source))
            case Primitive.REDUCE_SCATTER:
                part = _given(target)
                summed = line.begin_reduce_scatter(_scattered_parts(x, part))
                return lambda: _own_part(summed(), part, line.rank)
    result = run(primitive, x, line, source, target, keeps)
    return lambda: result


def _turned(part: DimShares | None, dims: int) -> DimShares | None:
    """The same of images whose channels, dim 1, have come to be the last dim."""
    if part is None or not part.dim:
        return part
    return replace(part, dim=dims - 1 if part.dim == 1 else part.dim - 1)


def _given(part: DimShares | None) -> DimShares:
    assert part is not None
    return part


def sections(x: Tensor, part: DimShares) -> Tensor:
    """x with dim `dim` as two: sections, and elements in a section."""
    shape, dim = x.shape, part.dim
    return x.reshape(*shape[:dim], part.outer, shape[dim] // part.outer, *shape[dim + 1 :])


def _in_pairs(x: Tensor, part: DimShares) -> Tensor:
    """x with dim `dim` as four: pairs of sections, the two of them, ranks, and elements of each."""
    shape, dim, ranks = x.shape, part.dim, len(part.sizes)
    four = part.outer // 2, 2, ranks, shape[dim] // (part.outer * ranks)
    return x.reshape(*shape[:dim], *four, *shape[dim + 1 :])


def reordered(whole: Tensor, part: DimShares) -> Tensor:
    """Between a whole value and the one whose plain sections are the zigzag's of the other: parts
    of every second section the other way round, so that doing it twice changes nothing."""
    if not part.zigzag:
        return whole
    rows = _in_pairs(whole, part)
    first, second = rows.unbind(part.dim + 1)
    return torch.stack([first, second.flip(part.dim + 1)], part.dim + 1).reshape(whole.shape)


def take(x: Tensor, part: DimShares, rank: int) -> Tensor:
    """The elements of `rank`, out of the whole."""
    if part.zigzag:
        rows, ways = _in_pairs(x, part), (rank, len(part.sizes) - 1 - rank)
        halves = [rows.select(part.dim + 1, i).select(part.dim + 1, w) for i, w in enumerate(ways)]
        return torch.stack(halves, part.dim + 1).flatten(part.dim, part.dim + 2)
    start, size, _ = part.span(rank)
    if part.outer == 1:
        return x.narrow(part.dim, start, size).contiguous()
    mine = sections(x, part).narrow(part.dim + 1, start, size)
    return mine.flatten(part.dim, part.dim + 1).contiguous()


def _pad(x: Tensor, part: DimShares, rank: int) -> Tensor:
    before, _, after = part.span(rank)
    dims_behind = x.ndim - part.dim - 1
    whole = pad(sections(x, part), [0, 0] * dims_behind + [before, after])
    return reordered(whole.flatten(part.dim, part.dim + 1), part)


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros after it along dim: collectives want equal shapes."""
    missing = size - x.shape[dim]
    return pad(x, [0, 0] * (x.ndim - dim - 1) + [0, missing]) if missing else x


def _gather(x: Tensor, line: Line, part: DimShares) -> Tensor:
    if line.size == 1:
        return x
    return _joined(line.all_gather(_gathered_part(x, part)), part)


def _gathered_part(x: Tensor, part: DimShares) -> Tensor:
    return _padded(sections(x, part), part.dim + 1, max(part.sizes))


def _joined(everyone: Tensor, part: DimShares) -> Tensor:
    dim = part.dim + 1
    parts = [theirs.narrow(dim, 0, size) for theirs, size in zip(everyone, part.sizes, strict=True)]
    return reordered(torch.cat(parts, dim).flatten(part.dim, dim), part)


def _reduce_scatter(x: Tensor, line: Line, part: DimShares) -> Tensor:
    if line.size == 1:
        return x
    return _own_part(line.reduce_scatter(_scattered_parts(x, part)), part, line.rank)


def _scattered_parts(x: Tensor, part: DimShares) -> Tensor:
    dim, longest = part.dim + 1, max(part.sizes)
    split = torch.split_with_sizes(sections(reordered(x, part), part), part.sizes, dim)
    return torch.stack([_padded(one, dim, longest) for one in split])


def _own_part(summed: Tensor, part: DimShares, rank: int) -> Tensor:
    mine = summed.narrow(part.dim + 1, 0, part.sizes[rank])
    return mine.flatten(part.dim, part.dim + 1).contiguous()


def _all_to_all(x: Tensor, line: Line, source: DimShares, target: DimShares) -> Tensor:
    if line.size == 1:
        return x
    if source.dim == target.dim:
        return take(_gather(x, line, source), target, line.rank)
    parts = [take(x, target, rank) for rank in range(line.size)]
    shapes = []
    for size in source.sizes:
        shape = list(parts[line.rank].shape)
        shape[source.dim] = size * source.outer
        shapes.append(tuple(shape))
    received = line.all_to_all(parts, shapes)
    split = [sections(one, source) for one in received]
    made = torch.cat(split, source.dim + 1).flatten(source.dim, source.dim + 1)
    return reordered(made, source)
