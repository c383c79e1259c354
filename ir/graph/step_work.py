"""What a step of a recurrence does in kernels, and what its gradients take."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Ref
from meshwright.ir.graph.op_facts import InnerPass, Shape
from meshwright.ir.graph.recurrence import StepCall, inner_values, step_of
from meshwright.ir.ops import facts

_VIEWS_OF_PRODUCT = 3
"""That a product of matrices makes of its operands and result each time."""


@lru_cache(maxsize=256)
def values_of(text: str, shapes: tuple[Shape, ...]) -> dict[str, Tensor]:
    """Makes the values of a step on tensors of these shapes, which have no memory."""
    kinds = (getattr(torch, name) for name in step_of(text).dtypes)
    given = [
        torch.empty(shape, dtype=kind, device="meta")
        for shape, kind in zip(shapes, kinds, strict=True)
    ]
    with torch.no_grad():
        return inner_values(text, given)


def refs(value: object) -> Iterator[Ref]:
    """Yields the values that an argument names."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs(item)


@lru_cache(maxsize=256)
def work_of_step(
    text: str, shapes: tuple[Shape, ...], states: int, parts: int
) -> tuple[InnerPass, InnerPass]:
    """Counts a step's forward, and what its gradients take when that is made again: the first
    `states` of `shapes` are those of states, the next are its `parts` of tensors."""
    values, step = values_of(text, shapes), step_of(text)
    left = [values[name].nbytes for name in step.results[states:]]
    read = sum(values[str(states + i)].nbytes for i in range(parts))
    forward = [InnerPass(len(left), len(left) + parts, 2 * sum(left))]
    # Gradients of parts are put side by side, then into their place among those of all steps.
    back = [InnerPass(0, len(left) + parts, 4 * read)]
    readers = Counter[str]()
    for call in step.calls:
        names = [ref.name for _, value in call.args for ref in refs(value)]
        readers.update(names)
        forward.append(_of_call(call, names, values))
        back += (_of_gradient(call, name, names, values) for name in names)
    back += (
        InnerPass(number - 1, 0, 3 * (number - 1) * values[name].nbytes)
        for name, number in readers.items()
    )
    return _total(forward), _total(back)


def _total(found: list[InnerPass]) -> InnerPass:
    kernels, views, nbytes = zip(*found, strict=True)
    return InnerPass(sum(kernels), sum(views), sum(nbytes))


def _of_call(call: StepCall, names: list[str], values: Mapping[str, Tensor]) -> InnerPass:
    if _is_view(call, names, values):
        return InnerPass(0, 1, 0)
    nbytes = sum(values[name].nbytes for name in (*names, call.output))
    return InnerPass(1, _VIEWS_OF_PRODUCT * _is_product(call), nbytes)


def _of_gradient(
    call: StepCall, name: str, names: list[str], values: Mapping[str, Tensor]
) -> InnerPass:
    """Of the gradient of one operand."""
    operand, made = values[name], values[call.output]
    if not operand.is_floating_point():
        return InnerPass(0, 0, 0)
    if _is_view(call, names, values):
        return InnerPass(0, 1, 0)
    if _is_product(call):
        nbytes = made.nbytes + sum(values[n].nbytes for n in names)
        return InnerPass(1, _VIEWS_OF_PRODUCT, nbytes)
    if operand.numel() > made.numel():  # summed over: spread again
        return InnerPass(0, 1, 0)
    # An operand that was spread has its gradient made as large as the result, then summed.
    spread = operand.numel() < made.numel()
    summed = InnerPass(1, 0, made.nbytes + operand.nbytes) if spread else InnerPass(0, 0, 0)
    if facts(call.target).backward.startswith("handed on"):
        return summed
    others = sum(values[n].nbytes for n in names if n != name) or made.nbytes
    return _total([summed, InnerPass(1, 0, 2 * made.nbytes + others)])


def _is_product(call: StepCall) -> bool:
    return facts(call.target).op_class is OpClass.MATMUL


def _is_view(call: StepCall, names: list[str], values: Mapping[str, Tensor]) -> bool:
    """Whether there is no kernel: of views, and of casts to the same."""
    if facts(call.target).op_class is OpClass.VIEW:
        return True
    is_cast = call.target.startswith("aten.to.")
    return is_cast and values[names[0]].dtype == values[call.output].dtype
