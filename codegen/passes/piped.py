"""Whether a block can run on the two halves of a micro-batch, and its code for that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from meshwright.codegen.lower.stage_context import Where
from meshwright.codegen.passes.halves import Halves
from meshwright.codegen.passes.segments import Phases, cut
from meshwright.ir.graph.graph import Block
from meshwright.ir.layout.layout import Axis, Layout, R, Replicate, Shard
from meshwright.ir.trace.halving import has_apart


def in_halves(
    at: Where,
    block: Block,
    known: Mapping[str, Layout],
    outputs: Sequence[Layout],
    module: Callable[[Where], fx.GraphModule],
) -> Halves | None:
    """The block on halves that differ by one sample at most; None where its samples depend on each
    other, or nothing of a half could be beside a collective of the other.

    `module`: its code where a rank has other samples.
    """
    own = at.axes["dp"].shares[at.coordinates["dp"]] if at.axes["dp"].shares else 0
    splits = [_samples_dim(known[name]) for name in block.inputs]
    joins = [_samples_dim(layout) for layout in outputs]
    if own < 2 or -1 in splits or any(dim in (-1, None) for dim in joins):
        return None
    if not has_apart(at.graph, block):
        return None
    samples = own - own // 2, own // 2
    cuts = [cut(module(_with_samples(at, n)), len(block.params)) for n in samples]
    if not _is_worth(cuts[0]) or not _alike(*cuts):
        return None
    return Halves(
        (cuts[0], cuts[1]), samples, len(block.params), tuple(splits),
        tuple(dim for dim in joins if dim is not None),
    )  # fmt: skip


def _with_samples(at: Where, samples: int) -> Where:
    line = at.axes["dp"]
    shares = tuple(samples if i == at.coordinates["dp"] else n for i, n in enumerate(line.shares))
    return replace(at, axes={**at.axes, "dp": Axis(line.size, shares, line.whole)})


def _samples_dim(layout: Layout) -> int | None:
    """The dim with the samples; None if there are none in it, -1 if they cannot be cut."""
    data = layout.get("dp", R)
    if isinstance(data, Replicate):
        return None
    others = [p for axis, p in layout.items() if axis != "dp" and isinstance(p, Shard)]
    if not isinstance(data, Shard) or data.outer > 1 or any(p.dim == data.dim for p in others):
        return -1
    return data.dim


def _is_worth(found: Phases) -> bool:
    """Whether phases after the first wait for a collective of a model axis, and none for `dp`."""
    moves = [moved for phase in found.phases for moved in phase.moves]
    return bool(moves) and all(moved.axis != "dp" for moved in moves)


def _alike(first: Phases, second: Phases) -> bool:
    """Whether what parameters alone go into is the same in both halves."""
    texts = [str(found.phases[0].code.graph) for found in (first, second)]
    return texts[0] == texts[1] and len(first.phases) == len(second.phases)
