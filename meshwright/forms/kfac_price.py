"""What K-FAC holds, computes and sends in a step, as rows of the table that every model reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Axis, Event, Hold, Rewrite, Row, Send, Shaped
from meshwright.forms.factors import base_size, message_size
from meshwright.forms.kfac_layout import KfacLayers, KfacSettings, base_values, base_work
from meshwright.forms.placing import ALL
from meshwright.ir.layout.conversions import Primitive

_FLOPS = 2.0
"""Of a multiplication and its addition."""
_FOLDED, _TAKEN, _SENT_BASES = 10, 17, 16
"""Bytes that move per byte of a message: to make it of a matrix; to make a matrix of it, and add
that to a mean; to do both with a base. Those that are turned or cut along a diagonal count more, as
they take longer: within steps of four processes 0.24, 0.4 and 0.37 ms of a message of 526 kB, where
copies moved 24 GB/s (as `PANEL`)."""
_STEPPED, _CLIPPED = 8, 4
"""Values that move per value of a gradient beside products: to add the bias's column, scale the
gradient and put it where it is stepped; to find how long the step is."""
_CALLS_OF_READ, _CALLS_OF_GRADIENT = 6, 5
"""Ops of torch's that a layer takes for each factor and message beside its products."""
_CALLS_OF_BASE, _CALLS_OF_LAYER = 5, 14
"""The same to make a base, and to take sums and precondition a gradient."""


@dataclass(frozen=True, slots=True)
class _OwnersWork:
    """Of the ranks that own the same layers."""

    flops: float
    """Of the rank with most, in a step on average."""
    values: float
    """Of means and bases."""
    sums: float
    """Values of the messages that it gets."""
    sent: float
    """Values of bases that go among them."""
    made: float
    """Of those the most that one of them makes."""
    multiplied: float
    """Values that products read and write, of the same rank as `flops`."""
    stepped: float
    """Values of its layers' gradients."""


def priced(
    made: Exchange,
    told: KfacSettings,
    shapes: Sequence[Shaped],
    ranks: int,
    workers: int,
    shared_out: bool,
) -> Exchange:
    """Returns the table of a form that sums gradients with what K-FAC does beside it. `ranks`: that
    share layers out; `workers`: that precondition the same."""
    found = KfacLayers([x.shape for x in shapes])
    nbytes = sum([x.nbytes for x in shapes])
    if not found.layers or not nbytes:
        even = 1 / ranks if shared_out else 0.0
        return replace(made, largest=even, busiest=even)
    owners = found.owners(ranks)
    own = [
        _work(told, [d for d, o in zip(found.layers, owners, strict=False) if o == rank], workers)
        for rank in range(ranks)
    ]
    per_byte = nbytes / sum([prod(x.shape) for x in shapes]) / nbytes
    """Bytes of a value, per byte of all parameters."""
    reads = sum([message_size(c) for c, _ in found.layers])
    gradients = sum([message_size(o) for _, o in found.layers])
    bases = sum([work.sent for work in own])
    numels = [float(prod(x.shape)) for x in shapes]
    largest = _most(found.per_shape(owners), numels, ranks)
    flops = [work.flops for work in own]
    going = reads + gradients
    square = max([max(pair) for pair in found.layers]) ** 2
    # Messages, and a matrix that is made of one, in parts if of a triangle.
    moving = max(
        going + (max(w.sums for w in own) if shared_out else 0.0) + 2.0 * square,
        max([w.sent + w.made for w in own]) + square * (1.0 if told.eigen else 2.0),
    )
    stated = {
        "reads": reads * per_byte,
        "factors": gradients * per_byte,
        "kept": (sum([c * c + o * o for c, o in found.layers]) + max(w.values for w in own))
        * per_byte,
        # What goes, and what a rank gets of it; bases; or parameters.
        "moving": max(moving * per_byte, 1 + largest if shared_out else 0.0),
    }
    if workers > 1 and bases:
        stated["bases"] = bases * per_byte
    if shared_out and workers > 1:
        stated["sums"] = going * per_byte
    if told.clips and shared_out:
        stated["length"] = 8 / nbytes
    rows = (*_without_moving(made.rows), *_rows(told, found, shapes, stated, own, shared_out))
    return replace(
        made, rows=rows, stated=stated,
        largest=largest if shared_out else 0.0,
        busiest=max(flops) / sum(flops) if shared_out else 0.0,
    )  # fmt: skip


def _work(told: KfacSettings, layers: Sequence[tuple[int, int]], workers: int) -> _OwnersWork:
    dims = [n for pair in layers for n in pair]
    makers = told.makers(dims, workers)
    alone = sum([
        base_work(n, eigen=told.eigen) for n, m in zip(dims, makers.of, strict=True) if m == ALL
    ])  # fmt: skip
    made = (alone + max(makers.loads)) / told.every("inv_update_steps")
    times = 2 if told.eigen else 1
    products = sum([o * o * c + o * c * c for c, o in layers]) * times
    operands = sum([o * o + 4 * o * c + c * c for c, o in layers]) * times
    whole = sum([base_work(n, eigen=told.eigen) for n in dims])
    of_bases = sum([base_values(n, eigen=told.eigen) for n in dims])
    extra = sum(dims) if told.eigen else 0
    sizes = [0.0] * workers
    for n, maker in zip(dims, makers.of, strict=True):
        if maker != ALL:
            sizes[maker] += base_size(n, eigen=told.eigen)
    return _OwnersWork(
        flops=_FLOPS * (made + products),
        values=2.0 * sum([n * n for n in dims]) + extra,
        sums=float(sum([message_size(n) for n in dims])),
        sent=sum(sizes),
        made=max(sizes),
        multiplied=operands + (of_bases * made / whole if whole else 0.0),
        stepped=float(sum([c * o for c, o in layers])),
    )


def _most(owners: Sequence[int], sizes: Sequence[float], ranks: int) -> float:
    """The share of the rank that has most."""
    sums = [0.0] * ranks
    for owner, size in zip(owners, sizes, strict=True):
        sums[owner] += size
    return max(sums) / sum(sums)


def _without_moving(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        if not (isinstance(row, Hold) and row.kind == "communication"):
            yield row


def _rows(
    told: KfacSettings,
    found: KfacLayers,
    shapes: Sequence[Shaped],
    stated: dict[str, float],
    own: Sequence[_OwnersWork],
    shared_out: bool,
) -> Iterator[Row]:
    nbytes = sum([x.nbytes for x in shapes])
    every, inverted = told.every("factor_update_steps"), told.every("inv_update_steps")
    rows = [shapes[number].reads for number in found.weights]
    layers, tensors = len(found.layers), len(shapes)
    pairs = list(zip(rows, found.layers, strict=True))
    squares = [sum([n * pair[at] ** 2 for n, pair in pairs]) for at in (0, 1)]
    # What is read is copied beside a column of ones, and a sum read and written.
    operands = [
        sum([times * n * pair[at] + 2 * pair[at] ** 2 for n, pair in pairs])
        for at, times in ((0, 3), (1, 1))
    ]
    nbytes_each = nbytes / sum([prod(x.shape) for x in shapes])
    primitive = Primitive.REDUCE_SCATTER if shared_out else Primitive.ALL_REDUCE
    axis: Axis = "dp_shard" if shared_out else "dp"
    among: Axis = "dp_replicate" if shared_out else "dp"
    last = {
        "reads": (Event.LAST_FORWARD, _CALLS_OF_READ, squares[0], operands[0]),
        "factors": (Event.AFTER_LAST, _CALLS_OF_GRADIENT, squares[1], operands[1]),
    }
    for share, (at, calls, flops, values) in last.items():
        yield Rewrite(
            what="gradients", unit="bucket", at=at, thin=False,
            moved=values * nbytes_each / nbytes / every, flops=_FLOPS * flops / nbytes / every,
            calls=calls * layers / tensors / every,
        )  # fmt: skip
        yield Rewrite(what="gradients", unit="bucket", at=at,
                      moved=_FOLDED * stated[share] / every)  # fmt: skip
        yield Send(what="gradients", unit="bucket", at=at, until=Event.END, share=share,
                   every=every, primitive=primitive, axis=axis)  # fmt: skip
    end = Send(what="gradients", unit="bucket", at=Event.END, until=Event.END,
               primitive=Primitive.ALL_REDUCE, axis=among)  # fmt: skip
    if "sums" in stated:
        yield replace(end, of_part=True, share="sums", every=every)
    if "bases" in stated:
        yield replace(end, primitive=Primitive.ALL_GATHER, of_part=shared_out, share="bases",
                      every=inverted)  # fmt: skip
    if "length" in stated:
        yield replace(end, axis=axis, share="length", joint=True)
    of_rank = layers / len(own)
    busiest = max(own, key=lambda work: work.flops)
    stepped = (_STEPPED + _CLIPPED * told.clips) * max(work.stepped for work in own)
    yield Rewrite(
        what="gradients", unit="bucket", at=Event.END,
        moved=_TAKEN * (stated["reads"] + stated["factors"]) / len(own) / every
        + (_SENT_BASES * stated["bases"] / len(own) / inverted if "bases" in stated else 0.0)
        + stepped * nbytes_each / nbytes,
    )  # fmt: skip
    yield Rewrite(
        what="gradients", unit="bucket", at=Event.END, thin=False,
        moved=busiest.multiplied * nbytes_each / nbytes, flops=busiest.flops / nbytes,
        calls=(2 * _CALLS_OF_BASE * of_rank / inverted + _CALLS_OF_LAYER * of_rank) / tensors,
    )  # fmt: skip
    yield Hold(kind="kept", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1, share="kept")
    yield Hold(kind="communication", unit="bucket", since=Event.END, until=Event.END, whole=1,
               share="moving")  # fmt: skip
