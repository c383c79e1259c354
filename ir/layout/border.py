"""What moves between two neighbouring stages whose meshes and batch shares may differ.

Positions are a coordinate on dp and a number within the replica; axes that split a value's samples,
too, belong to dp for it (`ir.layout.samples`). A value is whole on every rank of a replica, so each
target rank has one source rank per piece, spread over the source's replica; or it is split alike on
both sides, and ranks of one number have the same part. Gradients go the opposite way.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from meshwright.ir.layout.layout import Placement, Shard


@dataclass(frozen=True, slots=True)
class Side:
    """One stage at a border: samples of a micro-batch per dp coordinate, and its devices."""

    shares: tuple[int, ...]
    replica: int
    """Ranks of one replica: the size of its model mesh."""
    devices: tuple[int, ...]
    """Global ranks, row-major over dp and the model axes."""

    def rank(self, dp: int, member: int) -> int:
        return self.devices[dp * self.replica + member]

    def spans(self) -> tuple[tuple[int, int], ...]:
        """First sample of a micro-batch and one past the last, per dp coordinate."""
        ends = tuple(accumulate(self.shares))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))


@dataclass(frozen=True, slots=True)
class Transfer:
    """One piece of one value of one micro-batch that goes from a rank to another (or itself)."""

    source: int
    target: int
    source_span: tuple[int, int] | None
    """Samples within the source's local part; None: the whole value."""
    target_span: tuple[int, int] | None
    """Samples within the target's local part; None: the whole value, to be summed with others."""


def forward_transfers(placement: Placement, source: Side, target: Side) -> tuple[Transfer, ...]:
    """How the target's ranks get a value that the source's ranks hold."""
    if isinstance(placement, Shard):
        return _intervals(source, target)
    return _copies(source, target)


def gradient_transfers(placement: Placement, source: Side, target: Side) -> tuple[Transfer, ...]:
    """How the gradients get back; here `source` made the value and `target` has its gradient.

    A sharded value has a sharded gradient. The target ranks of a replicated value hold summands:
    each goes to one coordinate of the source, which adds up what it gets (nothing means zero).
    """
    if isinstance(placement, Shard):
        return _intervals(target, source)
    sources = len(source.shares)
    return tuple(
        Transfer(target.rank(dp, m % target.replica), source.rank(dp % sources, m), None, None)
        for dp in range(len(target.shares))
        for m in range(source.replica)
    )


def _copies(source: Side, target: Side) -> tuple[Transfer, ...]:
    sources = len(source.shares)
    return tuple(
        Transfer(source.rank(dp % sources, m % source.replica), target.rank(dp, m), None, None)
        for dp in range(len(target.shares))
        for m in range(target.replica)
    )


def _intervals(source: Side, target: Side) -> tuple[Transfer, ...]:
    """Pieces that both sides share, in order of target and then of samples."""
    found = []
    sources = source.spans()
    ends = [stop for _, stop in sources]
    for e, (target_start, target_stop) in enumerate(target.spans()):
        for c in range(bisect_right(ends, target_start), len(sources)):
            source_start, source_stop = sources[c]
            start, stop = max(source_start, target_start), min(source_stop, target_stop)
            if source_start >= target_stop:
                break
            if start >= stop:
                continue
            for member in range(target.replica):
                found.append(
                    Transfer(
                        source.rank(c, member % source.replica),
                        target.rank(e, member),
                        (start - source_start, stop - source_start),
                        (start - target_start, stop - target_start),
                    )
                )
    return tuple(found)


def piece_view(
    shape: tuple[int, ...], placement: Shard, samples: int, span: tuple[int, int]
) -> tuple[tuple[int, ...], int, int, int]:
    """How to reach the samples `span` of a local part that holds `samples`.

    Returns a shape to view the part as, the dim to narrow in it, and the start and length there.
    """
    size = shape[placement.dim]
    per_sample = size // (placement.outer * samples)
    start, stop = span
    view = (
        prod(shape[: placement.dim]) * placement.outer,
        samples,
        per_sample,
        prod(shape[placement.dim + 1 :]),
    )
    return view, 1, start, stop - start  # fmt: skip
