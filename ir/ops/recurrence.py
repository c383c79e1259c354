"""Steps over a dim: what no step mixes may be split, and the dim that they go along stays whole."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.flops import flops
from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.graph.graph import Tensor as GraphTensor
from meshwright.ir.graph.op_facts import Args, CallPart, InnerPass, OpFacts, Shape, ShapeOf
from meshwright.ir.graph.recurrence import RUN, StepCall, step_of
from meshwright.ir.graph.rules import Dims, Rule, given, input_shapes, make_rule, slots
from meshwright.ir.graph.step_work import pages_of_part, refs, values_of, work_of_step
from meshwright.ir.ops import facts

_ALONG = "steps"
"""The factor that steps go along."""
Place = tuple[str, int]
"""A dim of a value of the step."""


def _rule(op: Op, graph: Graph) -> Rule:
    """Factors are dims that go together through all calls of the step."""
    text, shapes = str(given(op, "step")), input_shapes(op, graph)
    dims, made_dims = (_ints(given(op, name)) for name in ("dims", "made_dims"))
    count, places = len(slots(op, "states")), slots(op, "steps")
    along = dict(zip(places, dims, strict=True))
    inner = _without_steps(shapes, count, dims)
    links = _linked(text, inner, count)
    inputs = [
        _with_steps(links.dims_of(str(i), len(shape)), along.get(i))
        for i, shape in enumerate(inner)
    ]
    outputs = list[Dims]()
    for number, name in enumerate(step_of(text).results):
        at = None if number < count else made_dims[number - count]
        outputs.append(_with_steps(links.dims_of(name, links.rank(name)), at))
    factors = {f for side in (*inputs, *outputs) for dim in side for f in dim}
    everywhere = {f for f in factors if all(any(f in dim for dim in side) for side in outputs)}
    whole = (factors - everywhere) | links.whole() | {_ALONG}
    return make_rule(op, graph, inputs, outputs, whole=whole)


def _with_steps(dims: Dims, at: int | None) -> Dims:
    return dims if at is None else (*dims[:at], (_ALONG,), *dims[at:])


def _ints(value: object) -> tuple[int, ...]:
    assert isinstance(value, tuple)
    return tuple(x for x in value if isinstance(x, int))


class _Links:
    """Which dims of a step's values are split together, and which never."""

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self._shapes = shapes
        self._above: dict[Place, Place] = {}
        self._mixed: set[Place] = set()

    def rank(self, name: str) -> int:
        return len(self._shapes[name])

    def dims_of(self, name: str, rank: int) -> Dims:
        return tuple((self._factor((name, dim)),) for dim in range(rank))

    def whole(self) -> set[str]:
        """Factors of dims that some call mixes."""
        return {self._factor(place) for place in self._mixed}

    def join(self, places: Sequence[Place]) -> None:
        for place in places[1:]:
            first, other = self._root(places[0]), self._root(place)
            if first != other:
                self._above[other] = first

    def mix(self, places: Sequence[Place]) -> None:
        self._mixed.update(places)

    def _root(self, place: Place) -> Place:
        while place in self._above:
            place = self._above[place]
        return place

    def _factor(self, place: Place) -> str:
        name, dim = self._root(place)
        return f"v{name}_{dim}"


@lru_cache(maxsize=256)
def _linked(text: str, shapes: tuple[Shape, ...], count: int) -> _Links:
    values = values_of(text, shapes)
    links = _Links({name: tuple(x.shape) for name, x in values.items()})
    tensors = {
        name: GraphTensor(
            name, tuple(x.shape), str(x.dtype).removeprefix("torch."), Kind.ACTIVATION
        )
        for name, x in values.items()
    }
    for call in step_of(text).calls:
        _link(links, call, tensors)
    for number, name in enumerate(step_of(text).results[:count]):
        for dim in range(links.rank(name)):
            links.join([(str(number), dim), (name, dim)])
    return links


def _link(links: _Links, call: StepCall, tensors: dict[str, GraphTensor]) -> None:
    """What the rule of one call says of the dims of its operands and of its result."""
    names = tuple(ref.name for _, value in call.args for ref in refs(value))
    op = Op(
        name=call.output, key="", target=call.target, args=call.args, inputs=names,
        outputs=(call.output,), module_path="",
    )  # fmt: skip
    graph = Graph(
        tensors=tensors, ops=(op,), prelude=0, blocks=(), inputs=(), input_names=(),
        loss=call.output, batch_size=1, batch_inputs=(),
    )  # fmt: skip
    make = facts(call.target).rule
    rule = make(op, graph) if make else None
    sides = [*zip(names, rule.inputs, strict=True), (call.output, rule.outputs[0])] if rule else []
    known = set[Place]()
    by_factor = dict[str, list[Place]]()
    for name, dims in sides:
        for dim, factors in enumerate(dims):
            if len(factors) == 1:
                by_factor.setdefault(factors[0], []).append((name, dim))
            known.update([(name, dim)] if len(factors) < 2 else [])
    every = [(n, d) for n in (*names, call.output) for d in range(links.rank(n))]
    links.mix([place for place in every if place not in known])
    for factor, places in by_factor.items():
        links.join(places)
        lost = not any(name == call.output for name, _ in places)
        if rule is None or factor not in rule.split or factor in rule.joined or lost:
            links.mix(places)


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Those of one step, as many times as there are steps."""
    text, dims = str(args["step"]), _ints(args["dims"])
    states, steps, fixed = (args[name] for name in ("states", "steps", "fixed"))
    assert isinstance(states, tuple) and isinstance(steps, tuple) and isinstance(fixed, tuple)
    inner = _without_steps([of(x) for x in (*states, *steps, *fixed)], len(states), dims)
    values = values_of(text, inner)
    each = [flops(c.target, dict(c.args), values, [c.output]) for c in step_of(text).calls]
    return of(steps[0])[dims[0]] * sum(each)


def _one_by_one(op: Op, graph: Graph) -> tuple[InnerPass, InnerPass]:
    """Those of all steps, with each step's part of what it reads and leaves."""
    shapes, dims = input_shapes(op, graph), _ints(given(op, "dims"))
    count, text = len(slots(op, "states")), str(given(op, "step"))
    kinds = [getattr(torch, name).itemsize for name in step_of(text).dtypes[count:]]
    pages = tuple(map(pages_of_part, shapes[count:], dims, kinds))
    once, gradients = work_of_step(text, _without_steps(shapes, count, dims), count, pages)
    length = shapes[count][dims[0]]
    return once.times(length), gradients.times(length)


def _temporaries(op: Op, part: CallPart) -> int:
    """What the steps of a run make, all at once."""
    dims, text = _ints(given(op, "dims")), str(given(op, "step"))
    count = len(slots(op, "states"))
    steps = min(RUN, part.shapes[count][dims[0]])
    values = values_of(text, _without_steps(part.shapes, count, dims))
    return steps * sum(values[call.output].nbytes for call in step_of(text).calls)


def _without_steps(
    shapes: Sequence[Shape], count: int, dims: Sequence[int]
) -> tuple[Shape, ...]:  # fmt: skip
    """Shapes of what a step reads, from those of operands, of which `count` are states."""
    along = dict(enumerate(dims, start=count))
    return tuple(
        tuple(n for d, n in enumerate(shape) if d != along.get(i)) for i, shape in enumerate(shapes)
    )


FACTS = {
    "meshwright.recurrence": OpFacts(
        op_class=OpClass.ELEMENTWISE, rule=_rule, flops=_flops, autocast="traced",
        one_by_one=_one_by_one, temporaries=_temporaries,
    )
}  # fmt: skip
