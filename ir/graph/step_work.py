"""What a step of a recurrence does in kernels, and what its gradients take."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Ref
from meshwright.ir.graph.op_facts import InnerPass, Shape
from meshwright.ir.graph.recurrence import StepCall, inner_values, step_of
from meshwright.ir.ops import facts

_VIEWS_OF_PRODUCT = 3
"""That a product of matrices makes of its operands and result each time."""
_PAGE = 4096
"""Bytes."""
_KNOWN_PAGES = 512
"""Whose addresses a CPU still knows when the next step comes to them. A step of rows that were on
512 pages took no longer than one whose part was whole, of 1,024 pages 13 ns a page, of 4,096 31 ns
(2-core cloud machine, 2026-11-30)."""


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


def pages_of_part(shape: Shape, dim: int, itemsize: int) -> int:
    """Counts the pages of memory that one place of a tensor along a dim lies on, rows apart."""
    rows = prod(shape[:dim])
    return min(rows, -(-rows * prod(shape[dim:]) * itemsize // _PAGE))


@lru_cache(maxsize=256)
def work_of_step(
    text: str, shapes: tuple[Shape, ...], states: int, pages: tuple[int, ...]
) -> tuple[InnerPass, InnerPass]:
    """Counts a step's forward, and what its gradients take when that is made again: the first
    `states` of `shapes` are those of states, the next are its parts of tensors, each of which lies
    on so many `pages` of memory."""
    values, step, parts = values_of(text, shapes), step_of(text), len(pages)
    on = {str(states + i): number for i, number in enumerate(pages)}
    left = [values[name].nbytes for name in step.results[states:]]
    read = sum(values[str(states + i)].nbytes for i in range(parts))
    forward = [InnerPass(len(left), len(left) + parts, 2 * sum(left))]
    # Gradients of parts are put side by side, then into their place among those of all steps.
    back = [InnerPass(0, len(left) + parts, 4 * read)]
    readers = Counter[str]()
    for call in step.calls:
        names = [ref.name for _, value in call.args for ref in refs(value)]
        readers.update(names)
        forward.append(_of_call(call, names, values, on))
        back += (_of_gradient(call, name, names, values, on) for name in names)
        if _is_view(call, names, values):
            on[call.output] = on.get(names[0], 0)
    back += (
        InnerPass(number - 1, 0, 3 * (number - 1) * values[name].nbytes)
        for name, number in readers.items()
    )
    return _looked_up(_total(forward)), _looked_up(_total(back))


def _looked_up(work: InnerPass) -> InnerPass:
    return work._replace(pages=max(0, work.pages - _KNOWN_PAGES))


def _total(found: list[InnerPass]) -> InnerPass:
    kernels, views, nbytes, pages = zip(*found, strict=True)
    return InnerPass(sum(kernels), sum(views), sum(nbytes), sum(pages))


def _of_call(
    call: StepCall, names: list[str], values: Mapping[str, Tensor], on: Mapping[str, int]
) -> InnerPass:
    if _is_view(call, names, values):
        return InnerPass(0, 1, 0)
    nbytes = sum(values[name].nbytes for name in (*names, call.output))
    pages = sum(on.get(name, 0) for name in names)
    return InnerPass(1, _VIEWS_OF_PRODUCT * _is_product(call), nbytes, pages)


def _of_gradient(
    call: StepCall, name: str, names: list[str], values: Mapping[str, Tensor],
    on: Mapping[str, int],
) -> InnerPass:  # fmt: skip
    """Of the gradient of one operand."""
    operand, made = values[name], values[call.output]
    pages = sum(on.get(n, 0) for n in names if n != name)
    if not operand.is_floating_point():
        return InnerPass(0, 0, 0)
    if _is_view(call, names, values):
        return InnerPass(0, 1, 0)
    if _is_product(call):
        nbytes = made.nbytes + sum(values[n].nbytes for n in names)
        return InnerPass(1, _VIEWS_OF_PRODUCT, nbytes, pages)
    if operand.numel() > made.numel():  # summed over: spread again
        return InnerPass(0, 1, 0)
    # An operand that was spread has its gradient made as large as the result, then summed.
    spread = operand.numel() < made.numel()
    summed = InnerPass(1, 0, made.nbytes + operand.nbytes) if spread else InnerPass(0, 0, 0)
    if facts(call.target).backward.startswith("handed on"):
        return summed
    others = sum(values[n].nbytes for n in names if n != name) or made.nbytes
    return _total([summed, InnerPass(1, 0, 2 * made.nbytes + others, pages)])


def _is_product(call: StepCall) -> bool:
    return facts(call.target).op_class is OpClass.MATMUL


def _is_view(call: StepCall, names: list[str], values: Mapping[str, Tensor]) -> bool:
    """Whether there is no kernel: of views, and of casts to the same."""
    if facts(call.target).op_class is OpClass.VIEW:
        return True
    is_cast = call.target.startswith("aten.to.")
    return is_cast and values[names[0]].dtype == values[call.output].dtype
