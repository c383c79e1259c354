"""What recurrent layers hold on a CPU in the halves of a backward that is split.

Autograd has a node for the product of all steps with what a layer reads: that is where its weight
joins, and what has come there stays. The weight of the state joins at each step, so the steps run
backwards once more for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.op_facts import CallHalves, CallPart
from meshwright.ir.graph.recurrent_passes import (
    FLOAT,
    LSTM,
    Cells,
    Pass,
    by_cells,
    by_onednn,
    is_cast,
    passes_of,
)
from meshwright.ir.graph.rules import given, slots


def lstm_halves(op: Op, part: CallPart) -> CallHalves | None:
    """Of LSTMs, which oneDNN computes or cells do."""
    return _onednn_halves(op, part) if by_onednn(op, part) else cells_halves(LSTM, op, part)


def cells_halves(cells: Cells, op: Op, part: CallPart) -> CallHalves | None:
    """Of layers that torch computes with a cell for each step; None where it does not."""
    layers = by_cells(op, part)
    if not layers or layers[0][0].steps == 1:
        return None
    sizes = _CellSizes(cells, part, bool(given(op, "has_biases")))
    first = _First(sizes)
    for number in range(len(layers) - 1, -1, -1):
        first.layer(layers[number], number < len(layers) - 1, number > 0)
    kept = sum([sizes.gates(one) for layer in layers for one in layer])
    second = _Second(sizes)
    for number in range(len(layers) - 1, -1, -1):
        second.layer(layers[number], number < len(layers) - 1, number > 0)
    second.joins([one for layer in layers for one in layer])
    made = part.width * layers[0][0].read * part.wanted[0]
    return CallHalves(first.most - made, kept, False, True, second.growing, second.adding)


@dataclass(frozen=True, slots=True)
class _CellSizes:
    """Bytes of what a pass makes as it runs backwards."""

    cells: Cells
    part: CallPart
    biases: bool

    @property
    def stored(self) -> int:
        """Of a value of a parameter."""
        return max(self.part.width, self.part.stored)

    @property
    def wide(self) -> bool:
        """Whether states are as wide as parameters, which autocast casts."""
        return is_cast(self.part) and self.cells.wide_result

    def gates(self, one: Pass) -> int:
        """Gradients of the gates of all steps."""
        return self.part.width * self.cells.gates * one.gated

    def result(self, layer: Sequence[Pass]) -> int:
        """The gradient of what a layer makes."""
        width = self.stored if self.wide else self.part.width
        return width * sum([one.made for one in layer])

    def read(self, one: Pass) -> int:
        """That of what a pass reads."""
        return self.part.width * one.read

    def state(self, one: Pass) -> int:
        """That of the weight of the state, as steps make it."""
        return self.part.width * self.cells.gates * one.cells * one.width

    def own(self, one: Pass) -> int:
        """Those of parameters of which each step makes one, as they are kept."""
        values = self.cells.gates * one.cells * (one.width + self.biases) + one.projection
        return self.stored * values


class _First:
    """The first half, from the last layer on."""

    def __init__(self, sizes: _CellSizes) -> None:
        self._sizes = sizes
        self.most = self._done = 0

    def layer(self, passes: Sequence[Pass], has_next: bool, has_previous: bool) -> None:
        """Directions run one by one. When all steps have run, gates' gradients are put together,
        and are there twice; nothing else goes but the gradient of the layer's result, which the
        next one has made and steps have read."""
        sizes = self._sizes
        for index, one in enumerate(passes):
            self._reach(sizes.gates(one))
            if has_next and index == len(passes) - 1:
                self._done -= sizes.result(passes)
            self._reach(2 * sizes.gates(one))
            self._done += sizes.gates(one)
            self._reads(one, index > 0, has_previous)

    def _reads(self, one: Pass, is_added: bool, has_previous: bool) -> None:
        """The gradient of what a pass reads; of two directions, their sum is a third."""
        sizes = self._sizes
        narrow, wide = sizes.read(one), sizes.wide and has_previous
        self._done += narrow
        self._reach()
        if wide:
            self._reach(sizes.stored * one.read)
            self._done += sizes.stored * one.read - narrow
        if is_added:
            own = sizes.stored * one.read if wide else narrow
            self._reach(own)
            self._done -= own

    def _reach(self, more: int = 0) -> None:
        self.most = max(self.most, self._done + more)


class _Second:
    """The second half: steps run once more, then products with what layers read."""

    def __init__(self, sizes: _CellSizes) -> None:
        self._sizes = sizes
        self.growing = self.adding = self._done = self._grown = 0

    def layer(self, passes: Sequence[Pass], has_next: bool, has_previous: bool) -> None:
        """A step's gradient of the weight of the state is added to those of the steps before, at
        first to a third. Gates' gradients are put together where a layer before needs them."""
        sizes = self._sizes
        for index, one in enumerate(passes):
            state, after = sizes.state(one), sizes.stored * one.projection
            gates = sizes.gates(one) * has_previous
            more = max(state, after)
            self._reach(state + after + (min(3, one.steps) - 1) * more + 2 * gates // one.steps)
            self._reach(state + after + more + gates)
            if is_cast(sizes.part):
                self._reach(state + sizes.own(one))
            self._grown += sizes.own(one)
            if has_next and index == len(passes) - 1:
                self._done -= sizes.result(passes)
            if has_previous:
                self._reach(2 * gates)
                self._reads(one, gates, index > 0)

    def _reads(self, one: Pass, gates: int, is_added: bool) -> None:
        sizes = self._sizes
        narrow = sizes.read(one)
        wide = sizes.stored * one.read if sizes.wide else narrow
        self._reach(gates + narrow)
        self._reach((narrow + wide) * sizes.wide)
        self._reach(2 * wide * is_added)
        self._done += wide * (not is_added)

    def joins(self, passes: Sequence[Pass]) -> None:
        """Weights of what passes read, one after the other."""
        sizes, self._done = self._sizes, 0
        for one in passes:
            values = sizes.cells.gates * one.cells * one.given
            narrow, kept = sizes.part.width * values, sizes.stored * values
            self._reach(narrow + kept * is_cast(sizes.part))
            self._grown += kept + sizes.stored * sizes.cells.gates * one.cells * sizes.biases

    def _reach(self, more: int) -> None:
        self.adding = max(self.adding, self._done + more)
        self.growing = max(self.growing, self._done + self._grown + more)


def _onednn_halves(op: Op, part: CallPart) -> CallHalves:
    """A layer's direction is one node, which makes all gradients in both halves, in float32: those
    that nobody wants go at once, before others are cast one by one. What has come to it stays."""
    layers, params = list(passes_of(op, part.shapes)), slots(op, "params")
    each, width = len(params) // sum(map(len, layers)), part.width
    stored = max(width, part.stored)
    weights = iter([prod(part.shapes[i]) for i in params])
    made, growing, adding, grown = list[list[int]](), 0, 0, 0
    for layer in layers:
        made.append([])
        for one in layer:
            own = list(islice(weights, each))
            nbytes = FLOAT * (one.read + sum(own) + 2 * one.samples * one.width)
            made[-1].append(nbytes)
            most = max(nbytes, _cast_one_by_one(own, FLOAT, width))
            growing = max(growing, grown + max(most, _cast_one_by_one(own, width, stored)))
            alone = [width * sum(own[i:]) + stored * own[i] * (stored > width) for i in range(each)]
            adding = max(adding, most, *alone)
            grown += stored * sum(own)
    first = done = 0
    for layer, sizes in zip(reversed(layers), reversed(made), strict=True):
        for index, nbytes in enumerate(sizes):
            first = max(first, done + nbytes)
            done += width * layer[0].read * (index == 0)
    reads = width * layers[0][0].read
    return CallHalves(first - reads, done - reads, True, False, growing, adding)


def _cast_one_by_one(values: Sequence[int], before: int, after: int) -> int:
    """Most bytes, where so many values of tensors are cast from a width to another."""
    if before == after:
        return before * sum(values)
    return max([
        before * sum(values[i:]) + after * sum(values[: i + 1]) for i in range(len(values))
    ])  # fmt: skip
