"""One step after the other over a dim of tensors, as one operator: what state-space models and
linear attention write as a loop over tokens or over chunks of them.

What a step computes is data: calls of operators on numbered values, without sizes, so that it is
the same on a part of the batch or of heads. The operator keeps the states before each run of `RUN`
steps; its backward goes back from the last run, and computes each again.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.own_operators import LIBRARY
from meshwright.ir.torch_private import OpOverload, is_fake

RUN = 16
"""Steps that a backward makes again at once: more at once need more memory, fewer more states kept.
"""
_ARGUMENTS = (
    "Tensor[] states, Tensor[] steps, Tensor[] fixed, int[] dims, int[] made_dims, str step"
)
LIBRARY.define(f"recurrence({_ARGUMENTS}) -> Tensor[]")
LIBRARY.define(f"recurrence_forward({_ARGUMENTS}) -> Tensor[]")


@dataclass(frozen=True, slots=True)
class StepCall:
    """An operator that a step calls, on values by their numbers."""

    target: str
    args: tuple[tuple[str, Arg], ...]
    """As an `Op` has them; a `Ref` names the number of a value."""
    output: str


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """What a step computes of states, of its parts of tensors, and of what is the same for all."""

    dtypes: tuple[str, ...]
    """Of its inputs."""
    calls: tuple[StepCall, ...]
    results: tuple[str, ...]
    """The states after it, then what it makes for the outside."""

    def text(self) -> str:
        """Returns it as one line, from which `step_of` makes it again."""
        calls = [[c.target, {k: _plain(v) for k, v in c.args}, c.output] for c in self.calls]
        return json.dumps([self.dtypes, calls, self.results], separators=(",", ":"))


def _plain(value: Arg) -> Any:
    if isinstance(value, Ref):
        return {"value": value.name}
    return [_plain(x) for x in value] if isinstance(value, tuple) else value


def _arg(value: Any) -> Arg:
    if isinstance(value, dict):
        return Ref(value["value"])
    return tuple(map(_arg, value)) if isinstance(value, list) else value


@lru_cache(maxsize=256)
def step_of(text: str) -> RecurrentStep:
    """The step that a text says."""
    dtypes, calls, results = json.loads(text)
    return RecurrentStep(
        tuple(dtypes),
        tuple(StepCall(t, tuple((k, _arg(v)) for k, v in a.items()), o) for t, a, o in calls),
        tuple(results),
    )


@dataclass(frozen=True, slots=True)
class _Ready:
    """A call that can be made."""

    target: OpOverload
    positional: tuple[Any, ...]
    keyword: dict[str, Any]
    output: str


@lru_cache(maxsize=256)
def _ready(text: str) -> tuple[_Ready, ...]:
    return tuple(map(_made_ready, step_of(text).calls))


def _made_ready(call: StepCall) -> _Ready:
    from meshwright.ir.graph.operators import operator  # which imports all of our operators

    target, given = operator(call.target), dict(call.args)
    positional, keyword = list[Any](), dict[str, Any]()
    for argument in target._schema.arguments:
        value: Any = given[argument.name]
        if isinstance(value, str) and "ScalarType" in str(argument.real_type):
            value = getattr(torch, value)
        if not argument.kwarg_only:
            positional.append(value)
        elif value is not None:
            keyword[argument.name] = value
    return _Ready(target, tuple(positional), keyword, call.output)


def inner_values(text: str, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """All values of a step by their numbers; its inputs have the first ones."""
    values = {str(number): x for number, x in enumerate(inputs)}
    for call in _ready(text):
        args = [_given(x, values) for x in call.positional]
        keyword = {k: _given(x, values) for k, x in call.keyword.items()}
        values[call.output] = call.target(*args, **keyword)
    return values


def _given(value: Any, values: dict[str, Tensor]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    return [_given(x, values) for x in value] if isinstance(value, tuple) else value


def _results(text: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    values = inner_values(text, inputs)
    return [values[name] for name in step_of(text).results]


def _parts(steps: Sequence[Tensor], dims: Sequence[int], at: int) -> Iterator[Tensor]:
    return (x.select(dim, at) for x, dim in zip(steps, dims, strict=True))


def recurrence_forward(
    states: list[Tensor], steps: list[Tensor], fixed: list[Tensor], dims: list[int],
    made_dims: list[int], step: str,
) -> list[Tensor]:  # fmt: skip
    """The states after all steps, what steps made, put side by side along `made_dims`, and the
    states before each run, along a first dim. Step i reads place i of `steps`, along `dims`."""
    length, count = steps[0].shape[dims[0]], len(states)
    before = [x.new_empty(-(-length // RUN), *x.shape) for x in states]
    made: list[Tensor] = []
    # A step computes as it was traced: what autocast would do to it happened there.
    with torch.autocast(steps[0].device.type, enabled=False):
        for at in range(length):
            if at % RUN == 0:
                for kept, state in zip(before, states, strict=True):
                    kept[at // RUN].copy_(state)
            found = _results(step, [*states, *_parts(steps, dims, at), *fixed])
            states = found[:count]
            if not at:
                made = [
                    _room(x, dim, length) for x, dim in zip(found[count:], made_dims, strict=True)
                ]
            for whole, dim, part in zip(made, made_dims, found[count:], strict=True):
                whole.select(dim, at).copy_(part)
        states = [x.clone() for x in states]
    return [*states, *made, *before]


def _room(part: Tensor, dim: int, length: int) -> Tensor:
    return part.new_empty(*part.shape[:dim], length, *part.shape[dim:])


def _forward_shapes(
    states: list[Tensor], steps: list[Tensor], fixed: list[Tensor], dims: list[int],
    made_dims: list[int], step: str,
) -> list[Tensor]:  # fmt: skip
    length, count = steps[0].shape[dims[0]], len(states)
    found = _results(step, [*states, *_parts(steps, dims, 0), *fixed])
    made = [_room(x, dim, length) for x, dim in zip(found[count:], made_dims, strict=True)]
    return [
        *(x.new_empty(x.shape) for x in found[:count]), *made,
        *(x.new_empty(-(-length // RUN), *x.shape) for x in states),
    ]  # fmt: skip


class _Recurrence(Function):
    """The operator with its gradients."""

    @staticmethod
    def forward(ctx: Any, counts: tuple[int, int], *args: Any) -> Any:
        """All tensors come one by one, after how many are states and how many are steps."""
        dims, made_dims, step, *tensors = args
        states, steps, fixed = _cut(tensors, counts)
        found = torch.ops.meshwright.recurrence_forward(
            states, steps, fixed, dims, made_dims, step
        )  # fmt: skip
        results = len(step_of(step).results)
        ctx.said = counts, dims, made_dims, step
        ctx.save_for_backward(*found[results:], *steps, *fixed)
        return tuple(found[:results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """From the last run to the first."""
        counts, dims, made_dims, step = ctx.said
        before, steps, fixed = _cut(ctx.saved_tensors, counts)
        wanted = ctx.needs_input_grad[4:]
        if any(map(is_fake, grads)):
            given = [*grads[: counts[0]], *steps, *fixed]
            made = [
                torch.empty_like(x) if has else None for x, has in zip(given, wanted, strict=True)
            ]
            return (None,) * 4 + tuple(made)
        with torch.autocast(steps[0].device.type, enabled=False):
            back = _Back(list(grads), before, steps, fixed, dims, made_dims, step, wanted)
            return (None,) * 4 + tuple(back.run())


def _cut(values: Sequence[Any], counts: tuple[int, int]) -> tuple[list[Any], list[Any], list[Any]]:
    first, second = counts[0], sum(counts)
    return list(values[:first]), list(values[first:second]), list(values[second:])


@dataclass(slots=True)
class _Back:
    """The backward of one call."""

    grads: list[Tensor]
    """Of the states after all steps, and of what steps made."""
    before: list[Tensor]
    steps: list[Tensor]
    fixed: list[Tensor]
    dims: Sequence[int]
    made_dims: Sequence[int]
    step: str
    wanted: Sequence[bool]

    def run(self) -> list[Tensor | None]:
        """Returns the gradients of states at first, of what steps read, and of what is fixed."""
        count, length = len(self.before), self.steps[0].shape[self.dims[0]]
        of_states = self.grads[:count]
        of_rest = [
            torch.zeros_like(x) if has else None
            for x, has in zip([*self.steps, *self.fixed], self.wanted[count:], strict=True)
        ]
        for number in reversed(range(-(-length // RUN))):
            first = number * RUN
            of_states = self._go_back(first, min(first + RUN, length), of_states, of_rest)
        pairs = zip(of_states, self.wanted, strict=False)
        return [*(x if has else None for x, has in pairs), *of_rest]

    def _go_back(
        self, first: int, end: int, of_states: list[Tensor], of_rest: list[Tensor | None]
    ) -> list[Tensor]:
        """From the gradients after a run to those before it; adds to the others."""
        count, many = len(self.before), end - first
        states = [_leaf(x[first // RUN], True) for x in self.before]
        rest = [x.narrow(d, first, many) for x, d in zip(self.steps, self.dims, strict=True)]
        others = [
            _leaf(x, has) for x, has in zip([*rest, *self.fixed], self.wanted[count:], strict=True)
        ]
        leaves = [*states, *others]
        found, given = list[Tensor](), list[Tensor]()
        with torch.enable_grad():
            parts = [x.unbind(d) for x, d in zip(others, self.dims, strict=False)]
            fixed = others[len(parts) :]
            for at in range(many):
                made = _results(self.step, [*states, *(x[at] for x in parts), *fixed])
                states, left = made[:count], made[count:]
                found += left
                given += [
                    g.select(d, first + at)
                    for g, d in zip(self.grads[count:], self.made_dims, strict=True)
                ]
        pairs = [
            (x, g) for x, g in zip([*states, *found], [*of_states, *given], strict=True)
            if x.requires_grad
        ]  # fmt: skip
        asked = [i for i, x in enumerate(leaves) if x.requires_grad]
        got = torch.autograd.grad(
            [x for x, _ in pairs], [leaves[i] for i in asked], [g for _, g in pairs],
            allow_unused=True,
        )  # fmt: skip
        by_leaf = dict(zip(asked, got, strict=True))
        for number, total in enumerate(of_rest):
            made_here = by_leaf.get(count + number)
            if total is None or made_here is None:
                continue
            if number < len(self.steps):
                total.narrow(self.dims[number], first, many).copy_(made_here)
            else:
                total.add_(made_here)
        return [
            torch.zeros_like(x) if (made_here := by_leaf.get(i)) is None else made_here
            for i, x in enumerate(leaves[:count])
        ]


def _leaf(x: Tensor, live: bool) -> Tensor:
    return x.detach().requires_grad_(live and x.is_floating_point())


_apply: Any = _Recurrence.apply  # a trace has another one for the time that it lasts


def _recurrence(
    states: list[Tensor], steps: list[Tensor], fixed: list[Tensor], dims: list[int],
    made_dims: list[int], step: str,
) -> list[Tensor]:  # fmt: skip
    counts, given = (len(states), len(steps)), [*states, *steps, *fixed]
    asked = (getattr(torch, name) for name in step_of(step).dtypes)
    # Under autocast operands may have come in another dtype than they were traced in.
    tensors = [x if x.dtype == kind else x.to(kind) for x, kind in zip(given, asked, strict=True)]
    return list(_apply(counts, tuple(dims), tuple(made_dims), step, *tensors))


def _without_gradients(
    states: list[Tensor], steps: list[Tensor], fixed: list[Tensor], dims: list[int],
    made_dims: list[int], step: str,
) -> list[Tensor]:  # fmt: skip
    found = recurrence_forward(states, steps, fixed, dims, made_dims, step)
    return found[: len(step_of(step).results)]


def _shapes_of_results(
    states: list[Tensor], steps: list[Tensor], fixed: list[Tensor], dims: list[int],
    made_dims: list[int], step: str,
) -> list[Tensor]:  # fmt: skip
    found = _forward_shapes(states, steps, fixed, dims, made_dims, step)
    return found[: len(step_of(step).results)]


LIBRARY.impl("recurrence", _recurrence, "Autograd")
LIBRARY.impl("recurrence", _without_gradients, "CompositeExplicitAutograd")
LIBRARY.impl("recurrence", _shapes_of_results, "Meta")
LIBRARY.impl("recurrence_forward", recurrence_forward, "CompositeExplicitAutograd")
LIBRARY.impl("recurrence_forward", _forward_shapes, "Meta")
RECURRENCE = torch.ops.meshwright.recurrence.default
