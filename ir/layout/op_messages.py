"""What ops communicate on their own account: messages that no conversion between ops stands for.

For most ops there is nothing. A cost model adds, to what an op computes, what `inner_traffic` says:

    operands = ...                                # per op input and output, whole on `axis`
    for message in inner_traffic(op, strategy, axis_size, inputs, outputs):
        seconds = message.times * time_of(message.kind, message.nbytes)

`SHIFT` is the time of one point-to-point message while every rank of the axis sends and receives
one; the other kinds are primitives of `ir.layout.conversions`, priced on the whole value as there.
Where `beside` is set, the messages travel while the op computes: what takes longer counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from meshwright.ir.graph.graph import Op, Ref
from meshwright.ir.graph.windows import CONVOLUTIONS, POOLS, Span, sent, spans, windows
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import R, Shard, Strategy, balanced

SHIFT = "shift"
"""Each rank sends to a neighbour on the axis and receives from one, all at the same time."""


@dataclass(frozen=True, slots=True)
class LocalOperand:
    """An input or output of an op as a rank would hold it if it were whole on the axis in question,
    split as it is on the others, for one micro-batch."""

    shape: tuple[int, ...]
    nbytes: int
    """In the dtype that the op computes in."""


@dataclass(frozen=True, slots=True)
class Inner:
    """Equal messages of one pass over an op."""

    kind: str
    """A communicating primitive, or SHIFT."""
    nbytes: int
    """Of each; of a primitive the whole value, of a shift what the busiest rank sends."""
    times: int
    backward: bool
    """Whether they belong to the backward pass."""
    beside: bool = False
    """Whether the op computes meanwhile."""


Operands = Sequence[LocalOperand]


def inner_traffic(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """What the op communicates on an axis of `ranks` on which it has this strategy.

    `inputs` and `outputs` are per `Op.inputs` and `Op.outputs`. Messages of the backward pass are
    those of an op whose inputs need gradients.
    """
    find = _INSIDE.get(op.target.rpartition(".")[0])
    split = any(isinstance(p, Shard) for p in strategy.inputs)
    return find(op, strategy, ranks, inputs, outputs) if find and split and ranks > 1 else ()


def kept_apart(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> dict[int, int]:
    """Inputs of which the op's backward keeps a copy of its own, and the bytes of the copy on the
    busiest rank: what was fetched from others lies in other memory than the operand."""
    if not inner_traffic(op, strategy, ranks, inputs, outputs):
        return {}
    name = op.target.rpartition(".")[0]
    if name == "meshwright.experts":
        copies = copies_of(ranks, inputs[1].shape[-1])
        return {i: ceil(inputs[i].nbytes * copies / ranks) for i in range(3)}
    placed = strategy.inputs[0]
    if _INSIDE[name] is not _windowed or not isinstance(placed, Shard):
        return {}
    needed = _reads(op, placed.dim, ranks, inputs, outputs)
    longest = max(stop - start for start, stop in needed)
    return {0: inputs[0].nbytes // inputs[0].shape[placed.dim] * longest}


def sends(op: Op) -> bool:
    """Whether the op communicates by itself under some strategy."""
    return op.target.rpartition(".")[0] in _INSIDE


def goes_round(strategy: Strategy, dims: int) -> bool:
    """Whether attention on values of so many dims keeps its keys split along the sequence, as the
    queries are, and passes them round."""
    query, key = strategy.inputs[:2]
    return all(isinstance(p, Shard) and p.dim == dims - 2 for p in (query, key))


def _attention(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Ring attention: keys and values go round, and in backward their gradients after them."""
    key, value = inputs[1:3]
    if not goes_round(strategy, len(key.shape)):
        return ()
    length, placed = key.shape[-2], strategy.inputs[1]
    sections = placed.outer if isinstance(placed, Shard) else 1
    part = -(-length // (ranks * sections)) * sections
    nbytes = (key.nbytes + value.nbytes) // length * part
    item = key.nbytes // max(prod(key.shape), 1)
    gradients = nbytes * max(item, 4) // item
    return (
        Inner(SHIFT, nbytes, ranks - 1, backward=False, beside=True),
        Inner(SHIFT, nbytes, ranks - 1, backward=True, beside=True),
        Inner(SHIFT, gradients, ranks - 1, backward=True, beside=True),
    )


def _experts(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Tokens travel to the ranks of their experts and back, once to each rank; balanced routing.

    In backward the gradient of the result goes there, that of the tokens comes back.
    """
    hidden, index, weights = inputs[:3]
    if not (isinstance(strategy.inputs[0], Shard) and isinstance(strategy.inputs[3], Shard)):
        return ()
    if strategy.inputs[0].dim != 0 or strategy.inputs[3].dim != 0:
        return ()
    copies = copies_of(ranks, index.shape[-1])
    tokens, scales, indices = (ceil(o.nbytes * copies) for o in (hidden, weights, index))
    move = Primitive.ALL_TO_ALL
    return (
        Inner(move, 8 * ranks * ranks, 1, backward=False),
        Inner(move, tokens, 2, backward=False),
        Inner(move, scales, 1, backward=False),
        Inner(move, indices, 1, backward=False),
        Inner(move, tokens, 2, backward=True),
        Inner(move, scales, 1, backward=True),
    )


def copies_of(ranks: int, picked: int) -> float:
    """To how many ranks a token goes that picks so many experts, on average."""
    return ranks * (1 - (1 - 1 / ranks) ** picked)


def _windowed(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Rows at the borders of the parts go to the neighbours, their gradients come back."""
    image, placed = inputs[0], strategy.inputs[0]
    needed = _reads(op, placed.dim, ranks, inputs, outputs) if isinstance(placed, Shard) else ()
    if not needed or not isinstance(placed, Shard):
        return ()
    held = spans(balanced(image.shape[placed.dim], ranks))
    rows = sent(held, needed), sent(needed, held)
    row = image.nbytes // image.shape[placed.dim]
    return tuple(Inner(SHIFT, row * n, 1, b) for n, b in zip(rows, (False, True), strict=True) if n)


def _reads(op: Op, dim: int, ranks: int, inputs: Operands, outputs: Operands) -> tuple[Span, ...]:
    """What each rank reads of a dim of the input; nothing if no windows slide over it."""
    found = windows(op, [i.shape for i in inputs], outputs[0].shape)
    lead = len(inputs[0].shape) - len(found)
    window = found[dim - lead] if dim >= lead else None
    if window is None:
        return ()
    return tuple(window.reads(*s) for s in spans(balanced(outputs[0].shape[dim], ranks)))


def _batch_norm(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Sums of values and of squares for each channel; of split channels the statistics, where
    each rank keeps them all."""
    x, placed = inputs[0], strategy.inputs[0]
    if not isinstance(placed, Shard) or dict(op.args).get("training") is False:
        return ()
    channels = x.nbytes // max(prod(x.shape), 1) * x.shape[1]
    if placed.dim == 1:
        kept = zip(op.inputs, strategy.inputs, strict=True)
        whole = sum(p == R and name in _running(op) for name, p in kept)
        return (Inner(Primitive.ALL_GATHER, channels, whole, backward=False),) if whole else ()
    return tuple(Inner(Primitive.ALL_REDUCE, channels, 2, b) for b in (False, True))


def _running(op: Op) -> set[str]:
    found = (dict(op.args).get(name) for name in ("running_mean", "running_var"))
    return {ref.name for ref in found if isinstance(ref, Ref)}


def _cross_entropy(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Largest logit, sum of exponentials and own logit of each row; nothing in backward."""
    logits, placed = inputs[0], strategy.inputs[0]
    if not isinstance(placed, Shard) or placed.dim != 1:
        return ()
    row = logits.nbytes // logits.shape[1]
    single = 2 if dict(op.args).get("label_smoothing") else 1
    return (
        Inner(Primitive.ALL_REDUCE, row, single, backward=False),
        Inner(Primitive.ALL_REDUCE, 2 * row, 1, backward=False),
    )


_Find = Callable[[Op, Strategy, int, Operands, Operands], tuple[Inner, ...]]

_INSIDE: dict[str, _Find] = {
    "aten.scaled_dot_product_attention": _attention,
    "meshwright.experts": _experts,
    "aten.batch_norm": _batch_norm,
    "meshwright.cross_entropy_sum": _cross_entropy,
    **{f"aten.{name}": _windowed for name in sorted(CONVOLUTIONS | POOLS)},
}
"""Op (without overload) -> its messages."""
