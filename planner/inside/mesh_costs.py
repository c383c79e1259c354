"""What ops, stored tensors and moves of values cost on a mesh at some prices."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.ops.op_classes import is_view, looks_up
from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.graph.inner_traffic import sends
from meshwright.ir.layout.conversions import Conversion
from meshwright.ir.layout.layout import RP, R, Shard
from meshwright.ir.ops import facts
from meshwright.planner.inside.axis_layout import shard_share, strategy_share
from meshwright.planner.inside.inside_prices import inside_s
from meshwright.planner.inside.layout_objective import Regime
from meshwright.planner.inside.mesh_space import MeshSpace, OpSpace
from meshwright.planner.inside.moves import AxisMove, MoveTable, share

Floats = NDArray[np.float64]


def move_seconds(
    graph: Graph,
    space: MeshSpace,
    regime: Regime,
    name: str,
    table: MoveTable,
    known: dict[object, Floats],
) -> Floats:
    """Of each move of a value, forward and (if a gradient flows) backward; kept in `known`."""
    tensor = graph.tensors[name]
    stored = tensor.kind is Kind.PARAMETER
    nbytes, grad = regime.nbytes(graph, name), tensor.requires_grad
    key = (id(table), nbytes, grad, stored)
    if key not in known:

        def step_s(step: AxisMove) -> float:
            ranks, prices = space.mesh[step.axis][1], regime.prices[step.axis]
            part = round(nbytes * step.share)
            forward_s = prices.primitive_s(step.forward, part, ranks)
            return forward_s + (prices.primitive_s(step.backward, part, ranks) if grad else 0.0)

        known[key] = table.cost(step_s) * (regime.parameter_uses if stored else 1.0)
    return known[key]


def op_seconds(graph: Graph, own: OpSpace, space: MeshSpace, regime: Regime) -> Floats:
    """Forward and backward of each joint strategy, on the rank with most to do."""
    kept = _saved(graph, own, space, regime)
    if is_view(own.op.target):
        return kept
    done = facts(own.op.target).done
    left = np.full(len(own.picks), done(own.op) if done else 1.0)
    for axis in range(len(space.mesh)):
        left *= _shares(graph, own, space, axis) * _unevenness(graph, own, space, axis)
    computing = (
        _timed(graph, own, space, regime, left)
        if regime.timer
        else _priced(graph, own.op, regime, left)
    )
    beside, alone = _inside(graph, own, space, regime)
    return np.asarray(np.maximum(computing, beside) + alone + kept)


def _priced(graph: Graph, op: Op, regime: Regime, left: Floats) -> Floats:
    """By the flops and bytes of the whole op, of which a rank does the share that is left."""
    made = sum(regime.nbytes(graph, name) for name in op.outputs if name)
    read = made if looks_up(op.target) else sum(regime.nbytes(graph, n) for n in op.inputs)
    passes = 3 if any(n and graph.tensors[n].requires_grad for n in op.outputs) else 1
    flops = op.flops * passes / graph.batch_size * regime.samples
    shares, which = np.unique(left, return_inverse=True)
    prices = regime.prices[0]
    found = [prices.op_s(flops * s, (made + read) * passes * s) for s in shares.tolist()]
    return np.array(found)[which.reshape(-1)]


def _timed(graph: Graph, own: OpSpace, space: MeshSpace, regime: Regime, left: Floats) -> Floats:
    """By the shapes that a rank has; each combination of them is asked for once."""
    assert regime.timer
    names = (*own.op.inputs, *own.op.outputs)
    sides = [local_shapes(graph, own, space, regime.samples, i) for i in range(len(names))]
    rows = np.concatenate([*sides, np.round(left * 1e6)[:, None].astype(np.int64)], 1)
    distinct, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    ends = np.cumsum([side.shape[1] for side in sides])[:-1]
    found, count = np.zeros(len(distinct)), len(own.op.inputs)
    for i, row in enumerate(distinct):
        shapes = [tuple(part.tolist()) for part in np.split(row[:-1], ends)]
        share = float(left[first[i]]) * regime.samples / graph.batch_size
        found[i] = regime.timer(own.op, shapes[:count], shapes[count:], share)
    return found[which.reshape(-1)]


def local_shapes(
    graph: Graph, own: OpSpace, space: MeshSpace, samples: int, slot: int
) -> NDArray[np.int64]:
    """State x dim: what the busiest rank has of a tensor of the op; inputs first."""
    name = (*own.op.inputs, *own.op.outputs)[slot]
    shape = graph.tensors[name].shape if name else ()
    dp = space.dp[own.op.name]
    sizes = np.array(shape, np.int64)
    split = (*dp.inputs, *dp.outputs)[slot]
    if isinstance(split, Shard):
        sizes[split.dim] = sizes[split.dim] // graph.batch_size * samples
    found = np.repeat(sizes[None, :].astype(np.float64), len(own.picks), 0)
    for axis, placements in enumerate(own.placements(slot)):
        parts = np.ones((len(placements), len(shape)))
        for row, p in enumerate(placements):
            if isinstance(p, Shard):
                parts[row, p.dim] = share(shape, p, space.mesh[axis][1])
        found *= parts[own.picks[:, axis]]
    return np.ceil(found - 1e-6).astype(np.int64)


def _saved(graph: Graph, own: OpSpace, space: MeshSpace, regime: Regime) -> Floats:
    """What keeping values for backward costs; each of the ops that keep one bears a part."""
    found = np.zeros(len(own.picks))
    if not regime.saved_s_per_byte:
        return found
    names = (*own.op.inputs, *own.op.outputs)
    for name in own.op.saved:
        if name not in names or graph.tensors[name].kind is not Kind.ACTIVATION:
            continue
        keepers = sum(name in op.saved for op in graph.users.get(name, ())) + (
            name in graph.producer[name].saved if name in graph.producer else 0
        )
        left = np.ones(len(own.picks))
        for axis, placements in enumerate(own.placements(names.index(name))):
            ranks = space.mesh[axis][1]
            each = [share(graph.tensors[name].shape, p, ranks) for p in placements]
            left *= np.array(each)[own.picks[:, axis]]
        found += left * regime.nbytes(graph, name) * regime.saved_s_per_byte / max(keepers, 1)
    return found


def _shares(graph: Graph, own: OpSpace, space: MeshSpace, axis: int) -> Floats:
    """Per state: what part of the op an axis leaves to its busiest rank."""
    ranks = space.mesh[axis][1]
    each = [strategy_share(graph, own.op, s, ranks) for s in own.found[axis]]
    return np.array(each)[own.picks[:, axis]]


def _sent_shares(graph: Graph, own: OpSpace, space: MeshSpace, axis: int) -> Floats:
    """Per state: what an axis leaves of what the op sends on others. That is of its results, or of
    its first operand, which a rank may have whole though it has a part of the op's weights."""
    ranks, name = space.mesh[axis][1], own.op.inputs[0]
    each = [
        strategy_share(graph, own.op, replace(s, inputs=(R,) * len(s.inputs)), ranks)
        if any(isinstance(p, Shard) for p in s.outputs)
        else shard_share(graph, name, s.inputs[0], ranks)
        for s in own.found[axis]
    ]
    return np.array(each)[own.picks[:, axis]]


def _unevenness(graph: Graph, own: OpSpace, space: MeshSpace, axis: int) -> Floats:
    """Per state: how much more than the mean the busiest rank of an axis does."""
    count, ranks = facts(own.op.target).busiest, space.mesh[axis][1]
    if count is None:
        return np.ones(len(own.picks))
    shape = graph.tensors[own.op.inputs[0]].shape
    each = [count(own.op, s, ranks, shape) or 1.0 for s in own.found[axis]]
    return np.array(each)[own.picks[:, axis]]


def _inside(graph: Graph, own: OpSpace, space: MeshSpace, regime: Regime) -> tuple[Floats, Floats]:
    """Seconds that the op communicates by itself: while it computes, and alone."""
    beside, alone = np.zeros(len(own.picks)), np.zeros(len(own.picks))
    if not sends(own.op):
        return beside, alone
    for axis, (_, size) in enumerate(space.mesh):
        samples = np.full(len(own.picks), float(regime.samples))
        for other in range(len(space.mesh)):
            if other != axis:
                samples *= _sent_shares(graph, own, space, other)
        rows = np.stack([own.picks[:, axis].astype(np.float64), samples], 1)
        distinct, which = np.unique(rows, axis=0, return_inverse=True)
        found = [
            inside_s(graph, own.op, own.found[axis][int(i)], size, regime.prices[axis], float(n))
            for i, n in distinct
        ]
        beside += np.array([i.beside for i in found])[which.reshape(-1)]
        alone += np.array([i.alone for i in found])[which.reshape(-1)]
    return beside, alone


def stored_seconds(graph: Graph, space: MeshSpace, regime: Regime, name: str) -> Floats:
    """What storing a tensor and summing its gradient once per step costs, per place."""
    tensor, places = graph.tensors[name], space.params[name]
    found = np.zeros(len(places))
    if tensor.kind is not Kind.PARAMETER:
        return found
    once = Conversion(R, RP).backward
    for row, place in enumerate(places):
        shares = [share(tensor.shape, p, n) for p, (_, n) in zip(place, space.mesh, strict=True)]
        nbytes = round(tensor.nbytes * float(np.prod(shares)))
        found[row] = regime.stored_s(nbytes)
        for axis, p in enumerate(place):
            if p == RP:
                ranks = space.mesh[axis][1]
                found[row] += regime.once * regime.prices[axis].primitive_s(once, nbytes, ranks)
    return found
