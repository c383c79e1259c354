"""Recurrent layers, whole as one op: only the batch may be split."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Op
from meshwright.ir.graph.op_facts import Args, CallPart, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
    slots,
)
from meshwright.ir.ops.noise import seeded


def _rule(op: Op, graph: Graph) -> Rule | None:
    """x[t, b, i] (or [b, t, i]), states[layers, b, h], weights -> out as x, states."""
    shapes = input_shapes(op, graph)
    if not op.target.endswith(".input") or len(shapes[0]) != 3:
        return None
    states, weights = slots(op, "hx"), slots(op, "params")
    at = 0 if given(op, "batch_first") else 1
    inputs: list[Dims] = []
    for i, shape in enumerate(shapes):
        own = letters(f"i{i}_", len(shape))
        place = at if i == 0 else 1
        inputs.append(own if i in weights else _with_batch(own, place))
        assert i == 0 or i in states or i in weights
    outs = [
        _with_batch(letters(f"o{k}_", len(shape)), 1 if k else at)
        for k, shape in enumerate(output_shapes(op, graph))
    ]
    whole = {f for dims in (*inputs, *outs) for d in dims for f in d} - {"b"}
    return make_rule(op, graph, inputs, outs, whole=whole)


def _with_batch(dims: Dims, at: int) -> Dims:
    return (*dims[:at], ("b",), *dims[at + 1 :])


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Each weight matrix once per token (tokens: the first two dims of the input)."""
    params = args.get("params")
    assert isinstance(params, tuple)
    weights = (of(p) for p in params)
    return 2 * prod(of(args.get("input"))[:2]) * sum(prod(w) for w in weights if len(w) == 2)


def _cell_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Both weight matrices once per sample; without samples the input is a vector."""
    weights = prod(of(args.get("w_ih"))) + prod(of(args.get("w_hh")))
    return 2 * prod(of(args.get("input"))[:-1]) * weights


_PAGE, _LINE = 4096, 64
_LSTM_GATES = 4
_ONEDNN = frozenset({"float32", "bfloat16"})
"""What oneDNN's LSTMs are called for; float16 needs a CPU that few have."""
_FLOAT = 4
"""Bytes; of oneDNN's rooms, of the lines of a processor's cache, and of a value in float32."""


@dataclass(frozen=True, slots=True)
class _Pass:
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
        parts += 2 * [_FLOAT * states * _row(widest, _FLOAT)]
        parts += [each * states * self.width for each in (_FLOAT, width)]
        return sum([_up(part, _PAGE) for part in parts])


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _row(values: int, width: int) -> int:
    found = _up(values, _LINE // width)
    return found if found % 256 else found + _LINE // width


def _passes(op: Op, shapes: Sequence[Shape]) -> Iterator[list[_Pass]]:
    """Of each layer, its directions."""
    weights = [shapes[i] for i in slots(op, "params") if len(shapes[i]) == 2]
    layers, ways = given(op, "num_layers"), 1 + bool(given(op, "bidirectional"))
    assert isinstance(layers, int)
    steps, samples = shapes[0][:2][:: -1 if given(op, "batch_first") else 1]
    each = len(weights) // (layers * ways)
    for layer in range(layers):
        read, state, *projection = weights[each * ways * layer :][:each]
        cells = projection[0][1] if projection else state[1]
        yield ways * [_Pass(steps, samples, read[1], state[1], cells)]


def _is_onednn(op: Op, shapes: Sequence[Shape], dtype: str) -> bool:
    """Whether torch calls oneDNN on a CPU (`use_mkldnn` of its RNN.cpp; of bfloat16 where the CPU
    has AVX-512, as those of servers do)."""
    states = [shapes[i][2] for i in slots(op, "hx")]
    return dtype in _ONEDNN and len(shapes[0]) == 3 and len(set(states)) == 1


def _lstm_keeps(op: Op, shapes: Sequence[Shape], dtype: str) -> int | None:
    """Rooms and results of all layers but the last one's, states at their ends, what dropout
    between layers makes (masks and values), and copies of weights that come without biases."""
    if not _is_onednn(op, shapes, dtype):
        return None
    passes, width = list(_passes(op, shapes)), DTYPE_BYTES[dtype]
    ways = len(passes[0])
    drops = bool(given(op, "dropout") and given(op, "train"))
    found = prod(shapes[0]) * width * bool(given(op, "batch_first"))
    if not given(op, "has_biases"):
        found += sum([prod(shapes[i]) for i in slots(op, "params")]) * width
    for number, layer in enumerate(passes):
        found += sum([one.room_bytes(width) + 2 * one.samples * one.width * width for one in layer])
        made = sum([one.made for one in layer]) * width
        is_last = number == len(passes) - 1
        # Directions are put side by side, which the next layer reads, and are kept apart, too.
        found += made * (ways > 1) + made * (1 + 2 * drops) * (not is_last)
    return found


def _by_cells(op: Op, part: CallPart) -> list[list[_Pass]]:
    """Of each layer, its directions, where torch calls a cell for each step on a CPU; none where
    another kernel runs."""
    if part.device_kind != "cpu" or len(part.shapes[0]) != 3:
        return []
    return list(_passes(op, part.shapes))


@dataclass(frozen=True, slots=True)
class _Cells:
    """What steps of a kind of cell have of each value of a gate."""

    gates: int
    freed: int
    """Values that a step keeps, at least, and gives back as it runs backwards."""
    wide: int = 0
    """Of these, as wide as the state where autocast casts what linear layers read."""
    wide_result: bool = False
    """Whether what they make is as wide then; linear layers read copies."""


_LSTM, _GRU, _RNN = _Cells(_LSTM_GATES, 7, 2), _Cells(3, 7, 1, wide_result=True), _Cells(1, 1)


def _is_cast(part: CallPart) -> bool:
    return part.stored > part.width


def _cells_inside(cells: _Cells, op: Op, part: CallPart) -> int:
    """What the gates of all steps read of the input is there until the steps have run; two
    directions are there beside what they are put together to (torch's RNN.cpp). Wide results of
    steps, of which others keep copies, go with them, and what a layer reads with the layer."""
    inside, layers = 0, _by_cells(op, part)
    wide = cells.wide_result and _is_cast(part)
    width = part.stored if wide else part.width
    for number, layer in enumerate(layers):
        one, ways = layer[0], len(layer)
        own = part.width * cells.gates * one.gated + width * 2 * one.made * (ways > 1)
        if wide:
            own += width * ways * one.gated
            own += width * one.read * (number > 0)
        inside = max(inside, own)
    return inside


def _cells_cast(cells: _Cells, op: Op, part: CallPart, inside: int) -> int:
    """What all steps keep where autocast casts what linear layers read. The weight of a projection
    is turned for each step, and what was turned is cast anew; what dropout between layers keeps is
    as wide as their results."""
    layers = _by_cells(op, part)
    passes = [one for layer in layers for one in layer]
    if not _is_cast(part) or not passes:
        return inside
    wide = cells.wide * sum([one.gated for one in passes])
    if cells.wide_result and given(op, "dropout") and given(op, "train"):
        wide += sum([one.made for layer in layers[:-1] for one in layer])
    # One of these counts as what the op keeps of the weight.
    again = sum([(one.steps - 1) * one.projection for one in passes])
    if cells.wide_result:  # each direction has its own copy of what both read
        again += sum([(len(layer) - 1) * layer[0].read for layer in layers[1:]])
    narrow = inside * part.width // part.stored
    return narrow + (part.stored - part.width) * wide + part.width * again


def _cells_temporaries(cells: _Cells, op: Op, part: CallPart) -> int:
    """Directions and layers run backwards one by one. A step's gradient of the weight of the state
    is added to that of the steps before it, which makes a third; then the gates' gradients of all
    steps are put together; then that of what they read is made beside these. Meanwhile a step gives
    back what it kept. Gradients of the weight of a projection are added up as those of the state's
    are, before them. What autocast has cast has narrow gradients, of a projection cast back in each
    step, of others when all have run; the copy of a weight has gone then, too."""
    layers, width = _by_cells(op, part), part.width
    if not layers:
        return 0
    stored, casts, gates = max(width, part.stored), _is_cast(part), cells.gates
    wide = casts and cells.wide_result
    most = done = 0
    biases = bool(given(op, "has_biases"))
    for number in range(len(layers) - 1, -1, -1):
        reads = number > 0 or part.wanted[0]
        for index, one in enumerate(layers[number]):
            ends = index == len(layers[number]) - 1 and number < len(layers) - 1
            state, read = gates * one.cells * one.width, gates * one.cells * one.given
            bias, after = gates * one.cells * biases, stored * one.projection
            copies = [casts * width * values for values in (state, read)]
            made, back = width * gates * one.gated, one.read * reads
            turned = width * one.projection * casts
            gone = (width * cells.freed + (stored - width) * cells.wide) * one.gated
            gone += (one.steps - 1) * turned
            gone += casts * width * one.samples * one.width * (not cells.wide_result)
            adds = (min(3, one.steps) - 1) * (max(after, width * state) - turned)
            most = max(most, done + after + width * state + adds)
            # Steps have read the gradient of the layer's result, but for what others still hold.
            done += after + stored * (state + bias) - gone - copies[0]
            done -= ends * len(layers[number]) * (stored if wide else width) * one.made
            most = max(most, done + max(2 * made, width * state * casts))
            done += width * read + stored * bias + width * back
            most = max(most, done + made, done + stored * read * casts - copies[1])
            done += (stored - width) * read - copies[1]
            if number:  # what the layer before has made goes with the last that keeps it
                done -= width * back * (wide or index == len(layers[number]) - 1)
                most = max(most, done + stored * back * wide)
                done += (stored - width) * back * wide
            # The second is added to the first in place.
            done -= (stored if number and wide else width) * back * (index > 0)
    weights = sum([prod(part.shapes[i]) * part.wanted[i] for i in slots(op, "params")])
    return most - width * part.wanted_values() - (stored - width) * weights


def _lstm_inside(op: Op, part: CallPart) -> int:
    return 0 if _by_onednn(op, part) else _cells_inside(_LSTM, op, part)


def _lstm_temporaries(op: Op, part: CallPart) -> int:
    if _by_onednn(op, part):
        return _onednn_temporaries(op, part)
    return _cells_temporaries(_LSTM, op, part)


def _by_onednn(op: Op, part: CallPart) -> bool:
    return part.device_kind == "cpu" and _is_onednn(op, part.shapes, part.dtype)


def _onednn_temporaries(op: Op, part: CallPart) -> int:
    """Layers and directions run backwards one by one: the gradient of what one reads is there
    beside what those before it have kept, and none yet of their weights or of what the first
    reads. Narrow ones are made in float32, all of one direction, and cast one by one."""
    layers = list(_passes(op, part.shapes))
    passes = [one for layer in layers for one in layer]
    weights = [prod(part.shapes[i]) * part.wanted[i] for i in slots(op, "params")]
    each, read = len(weights) // len(passes), prod(part.shapes[0])
    stored = part.stored or part.width
    found = -(stored * sum(weights) + part.width * read)
    for number, one in enumerate(passes):
        made = 0
        if number >= len(layers[0]):
            made = one.steps * one.samples * one.given - read * part.wanted[0]
        gone = sum([later.room_bytes(part.width) for later in passes[number + 1 :]])
        # Those of weights that autocast has cast are cast back when all have run.
        to_come = stored * sum(weights) - part.width * sum(weights[each * number :])
        found = max(found, part.width * made - to_come - gone)
        if part.width < _FLOAT:
            reads = number >= len(layers[0]) or part.wanted[0]
            own = [one.steps * one.samples * one.given * reads]
            own += weights[each * number : each * (number + 1)]
            casts = [values - sum(own[:i]) for i, values in enumerate(own)]
            to_come += part.width * (sum(own[1:]) + read * part.wanted[0])
            found = max(found, _FLOAT * sum(own) + part.width * max(casts) - to_come - gone)
    return found


def _is_turned(op: Op) -> bool:
    return op.target.endswith(".input") and bool(given(op, "batch_first"))


_CELL = OpFacts(op_class=OpClass.RECURRENT)
_LAYER = replace(_CELL, rule=_rule, form=seeded, turned=_is_turned)
FACTS = {
    **named("lstm gru", replace(_LAYER, flops=_flops)),
    "aten.lstm.input": replace(
        _LAYER,
        flops=_flops,
        cpu_keeps=_lstm_keeps,
        cpu_casts=partial(_cells_cast, _LSTM),
        temporaries=_lstm_temporaries,
        forward_inside=_lstm_inside,
        inside_to_end=True,
    ),
    "aten.gru.input": replace(
        _LAYER,
        flops=_flops,
        cpu_casts=partial(_cells_cast, _GRU),
        temporaries=partial(_cells_temporaries, _GRU),
        forward_inside=partial(_cells_inside, _GRU),
        inside_to_end=True,
    ),
    **named(
        "rnn_tanh rnn_relu",
        replace(
            _LAYER,
            flops=_flops,
            cpu_casts=partial(_cells_cast, _RNN),
            temporaries=partial(_cells_temporaries, _RNN),
            forward_inside=partial(_cells_inside, _RNN),
            inside_to_end=True,
        ),
    ),
    **named("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", replace(_CELL, flops=_cell_flops)),
}
