"""Layers of a recurrent network one by one, and what torch's kernels on CPUs have of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright.ir.graph.graph import Op
from meshwright.ir.graph.op_facts import CallPart, Shape
from meshwright.ir.graph.rules import given, slots

_PAGE, _LINE = 4096, 64
LSTM_GATES = 4
_ONEDNN = frozenset({"float32", "bfloat16"})
"""What oneDNN's LSTMs are called for; float16 needs a CPU that few have."""
FLOAT = 4
"""Bytes; of oneDNN's rooms, of the lines of a processor's cache, and of a value in float32."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One layer of a recurrent network in one direction."""

    steps: int
    samples: int
    given: int
    """Width of what it reads."""
    width: int
    """Of its result."""
    cells: int
    """Width of what its gates make: another one where an LSTM projects that."""

    @property
    def made(self) -> int:
        """Values of its result."""
        return self.steps * self.samples * self.width

    @property
    def read(self) -> int:
        """Values that it reads."""
        return self.steps * self.samples * self.given

    @property
    def gated(self) -> int:
        """Values of one gate."""
        return self.steps * self.samples * self.cells

    @property
    def projection(self) -> int:
        """Values of the weight that makes its result of what its gates make; 0: it has none."""
        return self.width * self.cells * (self.width != self.cells)

    def room_bytes(self, width: int) -> int:
        """Its workspace, where a value takes so many bytes (`set_workspace_sizes` of oneDNN's
        `rnn_utils.hpp`, kernels without tiles): gates, what they make of the state, then values of
        both sides and all steps. Of these, three have rows that end with a line of the cache and
        are no multiple of 256 values; gradients of states, and cells' states of one side, are as
        wide as float32."""
        rows, states = self.steps * self.samples, 2 * (self.steps + 1) * self.samples
        widest = max(self.given, self.width)
        parts = [width * rows * _row(4 * self.width, width), width * rows * _row(self.width, width)]
        parts += [width * states * _row(widest, width)]
        parts += 2 * [FLOAT * states * _row(widest, FLOAT)]
        parts += [each * states * self.width for each in (FLOAT, width)]
        return sum([_up(part, _PAGE) for part in parts])


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _row(values: int, width: int) -> int:
    found = _up(values, _LINE // width)
    return found if found % 256 else found + _LINE // width


def passes_of(op: Op, shapes: Sequence[Shape]) -> Iterator[list[Pass]]:
    """Of each layer, its directions."""
    weights = [shapes[i] for i in slots(op, "params") if len(shapes[i]) == 2]
    layers, ways = given(op, "num_layers"), 1 + bool(given(op, "bidirectional"))
    assert isinstance(layers, int)
    steps, samples = shapes[0][:2][:: -1 if given(op, "batch_first") else 1]
    each = len(weights) // (layers * ways)
    for layer in range(layers):
        read, state, *projection = weights[each * ways * layer :][:each]
        cells = projection[0][1] if projection else state[1]
        yield ways * [Pass(steps, samples, read[1], state[1], cells)]


def is_onednn(op: Op, shapes: Sequence[Shape], dtype: str) -> bool:
    """Whether torch calls oneDNN on a CPU (`use_mkldnn` of its RNN.cpp; of bfloat16 where the CPU
    has AVX-512, as those of servers do)."""
    states = [shapes[i][2] for i in slots(op, "hx")]
    return dtype in _ONEDNN and len(shapes[0]) == 3 and len(set(states)) == 1


def by_cells(op: Op, part: CallPart) -> list[list[Pass]]:
    """Of each layer, its directions, where torch calls a cell for each step on a CPU; none where
    another kernel runs."""
    if part.device_kind != "cpu" or len(part.shapes[0]) != 3:
        return []
    return list(passes_of(op, part.shapes))


@dataclass(frozen=True, slots=True)
class Cells:
    """What steps of a kind of cell have of each value of a gate."""

    gates: int
    freed: int
    """Values that a step keeps, at least, and gives back as it runs backwards."""
    wide: int = 0
    """Of these, as wide as the state where autocast casts what linear layers read."""
    wide_result: bool = False
    """Whether what they make is as wide then; linear layers read copies."""


LSTM, GRU, RNN = Cells(LSTM_GATES, 7, 2), Cells(3, 7, 1, wide_result=True), Cells(1, 1)


def is_cast(part: CallPart) -> bool:
    return part.stored > part.width


def by_onednn(op: Op, part: CallPart) -> bool:
    return part.device_kind == "cpu" and is_onednn(op, part.shapes, part.dtype)
