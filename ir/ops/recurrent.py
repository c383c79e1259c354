"""Recurrent layers, whole as one op: only the batch may be split."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Op
from meshwright.ir.graph.op_facts import Args, CallPart, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.recurrent_halves import cells_halves, lstm_halves
from meshwright.ir.graph.recurrent_passes import (
    FLOAT,
    GRU,
    LSTM,
    RNN,
    Cells,
    Pass,
    by_cells,
    by_onednn,
    is_cast,
    is_onednn,
    passes_of,
)
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


def _lstm_keeps(op: Op, shapes: Sequence[Shape], dtype: str) -> int | None:
    """Rooms and results of all layers but the last one's, states at their ends, what dropout
    between layers makes (masks and values), and copies of weights that come without biases."""
    if not is_onednn(op, shapes, dtype):
        return None
    passes, width = list(passes_of(op, shapes)), DTYPE_BYTES[dtype]
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


def _cells_inside(cells: Cells, op: Op, part: CallPart) -> int:
    """What the gates of all steps read of the input is there until the steps have run; two
    directions are there beside what they are put together to (torch's RNN.cpp). Wide results of
    steps, of which others keep copies, go with them, and what a layer reads with the layer."""
    inside, layers = 0, by_cells(op, part)
    wide = cells.wide_result and is_cast(part)
    width = part.stored if wide else part.width
    for number, layer in enumerate(layers):
        one, ways = layer[0], len(layer)
        own = part.width * cells.gates * one.gated + width * 2 * one.made * (ways > 1)
        if wide:
            own += width * ways * one.gated
            own += width * one.read * (number > 0)
        inside = max(inside, own)
    return inside


def _cells_cast(cells: Cells, op: Op, part: CallPart, inside: int) -> int:
    """What all steps keep where autocast casts what linear layers read. The weight of a projection
    is turned for each step, and what was turned is cast anew; what dropout between layers keeps is
    as wide as their results."""
    layers = by_cells(op, part)
    passes = [one for layer in layers for one in layer]
    if not is_cast(part) or not passes:
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


@dataclass(slots=True)
class _Course:
    """What is there as layers run backwards."""

    done: int = 0
    finished: int = 0
    """Of it, gradients of parameters."""
    most: int = 0
    adding: int = 0
    """Most where each of these is added to another as soon as it is made."""

    def reach(self, more: int = 0) -> None:
        self.most = max(self.most, self.done + more)
        self.adding = max(self.adding, self.done - self.finished + more)

    def finish(self, nbytes: int) -> None:
        self.done += nbytes
        self.finished += nbytes


def _cells_course(cells: Cells, op: Op, part: CallPart, layers: list[list[Pass]]) -> _Course:
    """Directions and layers run backwards one by one. A step's gradient of the weight of the state
    is added to that of the steps before it, which makes a third; then the gates' gradients of all
    steps are put together; then that of what they read is made beside these. Meanwhile a step gives
    back what it kept. Gradients of the weight of a projection are added up as those of the state's
    are, before them. What autocast has cast has narrow gradients, of a projection cast back in each
    step, of others when all have run; the copy of a weight has gone then, too."""
    width, course = part.width, _Course()
    stored, casts, gates = max(width, part.stored), is_cast(part), cells.gates
    wide = casts and cells.wide_result
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
            course.reach(after + width * state + adds)
            # Steps have read the gradient of the layer's result, but for what others still hold.
            course.finish(after + stored * (state + bias))
            course.done -= gone + copies[0]
            course.done -= ends * len(layers[number]) * (stored if wide else width) * one.made
            course.reach(max(2 * made, width * state * casts))
            course.done += width * (read + back)
            course.finish(stored * bias)
            course.reach(made)
            course.reach(stored * read * casts - copies[1])
            course.finish(stored * read)
            course.done -= width * read + copies[1]
            if number:  # what the layer before has made goes with the last that keeps it
                course.done -= width * back * (wide or index == len(layers[number]) - 1)
                course.reach(stored * back * wide)
                course.done += (stored - width) * back * wide
            # The second is added to the first in place.
            course.done -= (stored if number and wide else width) * back * (index > 0)
    return course


def _cells_temporaries(cells: Cells, op: Op, part: CallPart) -> int:
    layers = by_cells(op, part)
    if not layers:
        return 0
    weights = sum([prod(part.shapes[i]) * part.wanted[i] for i in slots(op, "params")])
    most = _cells_course(cells, op, part, layers).most
    return most - part.width * part.wanted_values() - max(0, part.stored - part.width) * weights


def _cells_adding(cells: Cells, op: Op, part: CallPart) -> int | None:
    layers = by_cells(op, part)
    if not layers:
        return None
    return _cells_course(cells, op, part, layers).adding - _read_back(part)


def _read_back(part: CallPart) -> int:
    """Bytes of the gradient of what the first layer reads, as its cells make it."""
    return part.width * prod(part.shapes[0]) * part.wanted[0]


def _lstm_inside(op: Op, part: CallPart) -> int:
    return 0 if by_onednn(op, part) else _cells_inside(LSTM, op, part)


def _lstm_temporaries(op: Op, part: CallPart) -> int:
    if by_onednn(op, part):
        return _onednn_course(op, part)[0]
    return _cells_temporaries(LSTM, op, part)


def _lstm_adding(op: Op, part: CallPart) -> int | None:
    if by_onednn(op, part):
        return _onednn_course(op, part)[1]
    return _cells_adding(LSTM, op, part)


def _onednn_course(op: Op, part: CallPart) -> tuple[int, int]:
    """Layers and directions run backwards one by one: the gradient of what one reads is there
    beside what those before it have kept, and none yet of their weights or of what the first
    reads. Narrow ones are made in float32, all of one direction, and cast one by one. Returns most
    beside gradients of all operands; and most with those of weights, where each direction's are
    added to others when it has run, beside that of what the first reads."""
    layers = list(passes_of(op, part.shapes))
    passes = [one for layer in layers for one in layer]
    weights = [prod(part.shapes[i]) * part.wanted[i] for i in slots(op, "params")]
    each, read = len(weights) // len(passes), prod(part.shapes[0])
    stored = part.stored or part.width
    made_all = stored * sum(weights) + part.width * read
    found, adding = -made_all, 0
    for number, one in enumerate(passes):
        made = 0
        if number >= len(layers[0]):
            made = one.steps * one.samples * one.given - read * part.wanted[0]
        gone = sum([later.room_bytes(part.width) for later in passes[number + 1 :]])
        # Those of weights that autocast has cast are cast back when all have run.
        to_come = stored * sum(weights) - part.width * sum(weights[each * number :])
        most = part.width * made - to_come - gone
        if part.width < FLOAT:
            reads = number >= len(layers[0]) or part.wanted[0]
            own = [one.steps * one.samples * one.given * reads]
            own += weights[each * number : each * (number + 1)]
            casts = [values - sum(own[:i]) for i, values in enumerate(own)]
            to_come += part.width * (sum(own[1:]) + read * part.wanted[0])
            most = max(most, FLOAT * sum(own) + part.width * max(casts) - to_come - gone)
        found = max(found, most)
        added = stored * sum(weights[each * (number + 1) :]) * (not is_cast(part))
        adding = max(adding, most + stored * sum(weights) - added)
    return found, adding


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
        cpu_casts=partial(_cells_cast, LSTM),
        temporaries=_lstm_temporaries,
        temporaries_adding=_lstm_adding,
        forward_inside=_lstm_inside,
        inside_to_end=True,
        halves=lstm_halves,
    ),
    "aten.gru.input": replace(
        _LAYER,
        flops=_flops,
        cpu_casts=partial(_cells_cast, GRU),
        temporaries=partial(_cells_temporaries, GRU),
        temporaries_adding=partial(_cells_adding, GRU),
        forward_inside=partial(_cells_inside, GRU),
        halves=partial(cells_halves, GRU),
        inside_to_end=True,
    ),
    **named(
        "rnn_tanh rnn_relu",
        replace(
            _LAYER,
            flops=_flops,
            cpu_casts=partial(_cells_cast, RNN),
            temporaries=partial(_cells_temporaries, RNN),
            temporaries_adding=partial(_cells_adding, RNN),
            forward_inside=partial(_cells_inside, RNN),
            halves=partial(cells_halves, RNN),
            inside_to_end=True,
        ),
    ),
    **named("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", replace(_CELL, flops=_cell_flops)),
}
