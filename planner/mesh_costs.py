"""What ops, stored tensors and moves of values cost on a mesh at some prices."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.conversions import Conversion
from meshwright.ir.graph import Graph, Kind
from meshwright.ir.inside import sends
from meshwright.ir.layout import RP, R
from meshwright.ir.plan import ModelMesh
from meshwright.planner.axis_layout import FREE, LOOKUPS, strategy_share
from meshwright.planner.inside_prices import inside_s
from meshwright.planner.mesh_space import MeshSpace, OpSpace, Place
from meshwright.planner.moves import Moves, share
from meshwright.planner.prices import Regime
from meshwright.planner.rules import name_of

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Pricer:
    """Prices of moves; values alike share them."""

    graph: Graph
    mesh: ModelMesh
    regime: Regime
    moves: Moves
    known: dict[object, Floats] = field(default_factory=dict)

    def seconds(self, name: str, sources: Sequence[Place], targets: Sequence[Place]) -> Floats:
        tensor, regime = self.graph.tensors[name], self.regime
        stored = tensor.kind is Kind.PARAMETER
        nbytes = regime.nbytes(self.graph, name)
        grad = tensor.requires_grad
        key = (tensor.shape, nbytes, grad, stored, tuple(sources), tuple(targets))
        if key not in self.known:

            def step_s(axis: int, conversion: Conversion, left: float) -> float:
                ranks, prices = self.mesh[axis][1], regime.prices[axis]
                part = round(nbytes * left)
                found = prices.primitive_s(conversion.forward, part, ranks)
                return found + (prices.primitive_s(conversion.backward, part, ranks) if grad else 0)

            times = regime.parameter_uses if stored else 1.0
            self.known[key] = self.moves.price(tensor.shape, sources, targets, step_s) * times
        return self.known[key]


def op_seconds(graph: Graph, own: OpSpace, space: MeshSpace, regime: Regime) -> Floats:
    """Forward and backward of each joint strategy, on the rank with most to do."""
    op = own.op
    left = np.ones(len(own.picks))
    for axis, (_, size) in enumerate(space.mesh):
        each = [strategy_share(graph, op, s, size) for s in own.found[axis]]
        left *= np.array(each)[own.picks[:, axis]]
    if name_of(op) in FREE:
        return np.zeros(len(left))
    made = sum(regime.nbytes(graph, name) for name in op.outputs if name)
    read = made if name_of(op) in LOOKUPS else sum(regime.nbytes(graph, n) for n in op.inputs)
    passes = 3 if any(n and graph.tensors[n].requires_grad for n in op.outputs) else 1
    flops = op.flops * passes / graph.batch_size * regime.samples
    shares, which = np.unique(left, return_inverse=True)
    found = [regime.op_s(op, flops * s, (made + read) * passes * s) for s in shares.tolist()]
    beside, alone = _inside(graph, own, space, regime)
    return np.asarray(np.maximum(np.array(found)[which.reshape(-1)], beside) + alone)


def _inside(graph: Graph, own: OpSpace, space: MeshSpace, regime: Regime) -> tuple[Floats, Floats]:
    """Seconds that the op communicates by itself: while it computes, and alone."""
    beside, alone = np.zeros(len(own.picks)), np.zeros(len(own.picks))
    if not sends(own.op):
        return beside, alone
    for axis, (_, size) in enumerate(space.mesh):
        found = [inside_s(graph, own.op, s, size, regime.prices[axis]) for s in own.found[axis]]
        times = np.full(len(own.picks), float(regime.samples))
        for other, (_, ranks) in enumerate(space.mesh):
            if other != axis:
                shares = [strategy_share(graph, own.op, s, ranks) for s in own.found[other]]
                times *= np.array(shares)[own.picks[:, other]]
        beside += np.array([i.beside for i in found])[own.picks[:, axis]] * times
        alone += np.array([i.alone for i in found])[own.picks[:, axis]] * times
    return beside, alone


def stored_seconds(
    graph: Graph, space: MeshSpace, regime: Regime, name: str, places: Sequence[Place]
) -> Floats:
    """What storing a tensor and summing its gradient once per step costs."""
    tensor = graph.tensors[name]
    if tensor.kind is not Kind.PARAMETER:
        return np.zeros(len(places))
    once = Conversion(R, RP).backward
    found = np.zeros(len(places))
    for row, place in enumerate(places):
        shares = [share(tensor.shape, p, n) for p, (_, n) in zip(place, space.mesh, strict=True)]
        nbytes = round(tensor.nbytes * float(np.prod(shares)))
        found[row] = regime.stored_s(nbytes)
        for axis, p in enumerate(place):
            if p == RP:
                ranks = space.mesh[axis][1]
                found[row] += regime.once * regime.prices[axis].primitive_s(once, nbytes, ranks)
    return found
