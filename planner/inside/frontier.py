"""Exact dynamic programming over the frontier of a run of ops.

A state is where each live value lies and which conversions of it are already paid. The states after
an op are all states before it times all strategies of the op; of equal states the cheapest stays.
Costs are whole picoseconds, so that sums and ties do not depend on rounding. Only if more states
than `beam` are left are the dearest dropped.

What is minimised, with x[o, s] = 1 if op o runs strategy s, and y[v, t] = 1 if value v is converted
to placement t:   sum cost[o, s] x[o, s] + sum price[v, made(v), t] y[v, t].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.layout.layout import Placement, R, Strategy

Ints = NDArray[np.int64]
Price = Callable[[str, Placement, Placement], int]
"""Picoseconds to convert a value, forward and backward."""


@dataclass(frozen=True, slots=True)
class OpCosts:
    """One op: its strategies and what each costs, in picoseconds."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpChain:
    """What to solve."""

    steps: tuple[OpCosts, ...]
    given: Mapping[str, tuple[tuple[Placement, int], ...]]
    """Value that no step makes -> placements it may come in, and what each costs. Others are R."""
    exits: Mapping[str, Placement]
    """Where the results must lie."""
    price: Price


@dataclass(frozen=True, slots=True)
class Solution:
    """The cheapest choice."""

    cost: int
    chosen: tuple[Strategy, ...]
    placed: dict[str, Placement]
    """Placement of each value of `OpChain.given` that a step reads."""


@dataclass
class _Value:
    """A value and its codes: `source + mask * len(sources)`, bit i of mask: targets[i] is paid."""

    name: str
    sources: list[Placement]
    targets: list[Placement]
    price: Price
    tables: dict[Placement, tuple[Ints, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count = len(self.sources) << len(self.targets)
        codes = np.arange(self.count, dtype=np.int64)
        self.source_of = codes % len(self.sources)
        self.mask_of = codes // len(self.sources)

    def cost(self, source: Placement, target: Placement) -> int:
        return 0 if source == target else self.price(self.name, source, target)

    def use(self, target: Placement) -> tuple[Ints, Ints]:
        """Per code: what the conversion to `target` costs, and the code afterwards."""
        if target not in self.tables:
            prices = np.array([self.cost(s, target) for s in self.sources], dtype=np.int64)
            cost = prices[self.source_of]
            codes = np.arange(self.count, dtype=np.int64)
            if target in self.targets:
                bit = self.targets.index(target)
                paid = (self.mask_of >> bit) & 1
                after = codes + np.where((paid == 0) & (cost > 0), len(self.sources) << bit, 0)
                self.tables[target] = np.where(paid == 1, 0, cost), after
            else:
                self.tables[target] = cost, codes
        return self.tables[target]

    def keeping(self, targets: set[Placement]) -> Ints:
        """Per code: the code without bits that nobody asks for any more."""
        bits = sum(1 << i for i, target in enumerate(self.targets) if target in targets)
        return self.source_of + (self.mask_of & bits) * len(self.sources)

    def reach(self, code: int, single: bool) -> Ints:
        """What it costs at most to get from one code to each other; -1 if that is not known.

        With several uses left, one conversion may stand for many, so sources must be equal.
        """
        source, mask = self.sources[code % len(self.sources)], code // len(self.sources)
        if single:
            far = np.array([self.cost(source, s) for s in self.sources], dtype=np.int64)
        else:
            far = np.array([0 if s == source else -1 for s in self.sources], dtype=np.int64)
        total = far[self.source_of]
        for bit, target in enumerate(self.targets):
            needed = ((self.mask_of >> bit) & 1).astype(bool) & (not mask >> bit & 1)
            total = np.where((total >= 0) & needed, total + self.cost(source, target), total)
        return total


@dataclass
class _Layer:
    """The states after a step."""

    names: list[str]
    codes: Ints
    """State x live value."""
    cost: Ints
    parent: Ints
    choice: Ints


def solve(run: OpChain, beam: int = 2048) -> Solution:
    """The cheapest strategies of all steps."""
    values, uses = _values(run)
    steps = [*run.steps, _exit_step(run)]
    layer = _Layer([], np.zeros((1, 0), np.int64), *(np.zeros(1, np.int64) for _ in range(3)))
    layers: list[tuple[str, _Layer]] = []
    for at, step in enumerate(steps):
        for name in dict.fromkeys(step.inputs):
            if name not in layer.names:
                layer = _open(layer, values[name], run.given.get(name, ((R, 0),)))
                layers.append((name, layer))
        layer = _advance(layer, step, values, {n: u for n, u in uses.items()}, at)
        layer = _prune(layer, values, uses, at, beam)
        layers.append(("", layer))
    return _trace_back(run, steps, layers)


def _exit_step(run: OpChain) -> OpCosts:
    names, wanted = tuple(run.exits), tuple(run.exits.values())
    return OpCosts(names, (), (Strategy(wanted, ()),), (0,))


def _values(run: OpChain) -> tuple[dict[str, _Value], dict[str, list[tuple[int, set[Placement]]]]]:
    """Every value, and per value the steps that read it with the placements they may want."""
    uses: dict[str, list[tuple[int, set[Placement]]]] = {}
    sources: dict[str, dict[Placement, None]] = {}
    for at, step in enumerate([*run.steps, _exit_step(run)]):
        for i, name in enumerate(step.inputs):
            wanted = {strategy.inputs[i] for strategy in step.strategies}
            uses.setdefault(name, []).append((at, wanted))
            if name not in sources:
                given = run.given.get(name, ((R, 0),))
                sources[name] = dict.fromkeys(placement for placement, _ in given)
        for i, name in enumerate(step.outputs):
            sources[name] = dict.fromkeys(strategy.outputs[i] for strategy in step.strategies)
    values = {}
    for name, found in sources.items():
        used = uses.setdefault(name, [])
        shared = len(used) > 1
        targets = sorted({t for _, wanted in used for t in wanted}, key=str) if shared else []
        values[name] = _Value(name, list(found), targets, run.price)
    return values, uses


def _open(layer: _Layer, value: _Value, given: Sequence[tuple[Placement, int]]) -> _Layer:
    """A value from outside appears, in each placement it may have."""
    n, k = len(layer.cost), len(given)
    rows = np.repeat(np.arange(n, dtype=np.int64), k)
    column = np.tile(np.arange(k, dtype=np.int64), n)
    costs = np.array([cost for _, cost in given], dtype=np.int64)
    codes = np.concatenate([layer.codes[rows], column[:, None]], axis=1)
    return _Layer([*layer.names, value.name], codes, layer.cost[rows] + costs[column], rows, column)


def _advance(
    layer: _Layer,
    step: OpCosts,
    values: Mapping[str, _Value],
    uses: Mapping[str, Sequence[tuple[int, set[Placement]]]],
    at: int,
) -> _Layer:
    """All states times all strategies."""
    left = {
        name: [w for when, w in uses[name] if when > at] for name in (*layer.names, *step.outputs)
    }
    kept = [i for i, name in enumerate(layer.names) if left[name]]
    new = [(i, name) for i, name in enumerate(step.outputs) if name and left[name]]
    keep = {
        name: values[name].keeping(set().union(*left[name])) for name in dict.fromkeys(step.inputs)
    }
    blocks, costs = [], []
    for strategy, own in zip(step.strategies, step.costs, strict=True):
        codes, cost = layer.codes.copy(), layer.cost + own
        for name, target in dict.fromkeys(zip(step.inputs, strategy.inputs, strict=True)):
            column = layer.names.index(name)
            price, after = values[name].use(target)
            cost = cost + price[codes[:, column]]
            codes[:, column] = after[codes[:, column]]
        for name, table in keep.items():
            column = layer.names.index(name)
            codes[:, column] = table[codes[:, column]]
        made = [values[name].sources.index(strategy.outputs[i]) for i, name in new]
        columns = np.broadcast_to(np.array(made, dtype=np.int64), (len(cost), len(made)))
        blocks.append(np.concatenate([codes[:, kept], columns], axis=1))
        costs.append(cost)
    n = len(layer.cost)
    names = [layer.names[i] for i in kept] + [name for _, name in new]
    return _Layer(
        names,
        np.concatenate(blocks),
        np.concatenate(costs),
        np.tile(np.arange(n, dtype=np.int64), len(blocks)),
        np.repeat(np.arange(len(blocks), dtype=np.int64), n),
    )


def _prune(
    layer: _Layer,
    values: Mapping[str, _Value],
    uses: Mapping[str, Sequence[tuple[int, set[Placement]]]],
    at: int,
    beam: int,
) -> _Layer:
    """Of equal states the cheapest, without dominated ones, at most `beam` of them."""
    order = _distinct(layer, values)
    order = order[np.argsort(layer.cost[order], kind="stable")]
    codes, cost = layer.codes[order], layer.cost[order]
    single = {name: sum(when > at for when, _ in uses[name]) == 1 for name in layer.names}
    alive = np.ones(len(order), dtype=bool)
    for pivot in range(min(len(order), 8)):
        if not alive[pivot]:
            continue
        limit, known = np.full(len(order), cost[pivot]), np.ones(len(order), dtype=bool)
        for i, name in enumerate(layer.names):
            far = values[name].reach(int(codes[pivot, i]), single[name])[codes[:, i]]
            limit, known = limit + far, known & (far >= 0)
        beaten = known & (cost >= limit)
        beaten[: pivot + 1] = False
        alive &= ~beaten
    rows = order[alive][:beam]
    return _Layer(
        layer.names, layer.codes[rows], layer.cost[rows], layer.parent[rows], layer.choice[rows]
    )


def _distinct(layer: _Layer, values: Mapping[str, _Value]) -> Ints:
    """Rows of the cheapest of each group of equal states; the earliest of equally cheap ones."""
    words, width = [np.zeros(len(layer.cost), np.int64)], 1
    for i, name in enumerate(layer.names):
        count = values[name].count
        if width * count >= 1 << 62:
            words.append(np.zeros(len(layer.cost), np.int64))
            width = 1
        words[-1] = words[-1] * count + layer.codes[:, i]
        width *= count
    order = np.lexsort((layer.cost, *words))
    first = np.ones(len(order), dtype=bool)
    changed = np.zeros(len(order) - 1, dtype=bool)
    for word in words:
        changed |= word[order][1:] != word[order][:-1]
    first[1:] = changed
    return np.sort(order[first])


def _trace_back(
    run: OpChain, steps: Sequence[OpCosts], layers: Sequence[tuple[str, _Layer]]
) -> Solution:
    state = int(np.argmin(layers[-1][1].cost))
    cost = int(layers[-1][1].cost[state])
    chosen: list[Strategy] = []
    placed: dict[str, Placement] = {}
    at = len(steps) - 1
    for name, layer in reversed(layers):
        choice = int(layer.choice[state])
        if name:
            placed[name] = run.given.get(name, ((R, 0),))[choice][0]
        else:
            chosen.append(steps[at].strategies[choice])
            at -= 1
        state = int(layer.parent[state])
    return Solution(cost, tuple(reversed(chosen))[:-1], placed)
