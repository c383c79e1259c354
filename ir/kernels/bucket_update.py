"""One step of Adam, AdamW or SGD over many tensors at once: gradients, as they lie in their bucket,
are read, cast and scaled on the way, and parameters and the optimizer's state updated in one pass.

A table says which piece of which tensor each program updates. Numbers of a step lie on the device,
in float64. All this is outside autograd. With `over`, the new values also take the place of the
gradients, which nobody reads again: they lie packed there for the ranks that gather them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.aligned import count_of, lies_whole, run_of
from meshwright.ir.kernels.bucket import addresses_of
from meshwright.ir.launch import Build, element, held_dtype, jit, tl, way, wide
from meshwright.ir.pinned import sent

ADAM, SGD = 8, 6
"""How many numbers a step has."""
SENT = "numbers"
"""The argument of an operator that the host has, and that the operator sends to the device."""
PIECE = 2048
"""Elements that one program updates."""


def table(sizes: Sequence[int]) -> Tensor:
    """Tensor, first element and count of what each program updates."""
    rows = [
        (index, start, min(size - start, PIECE))
        for index, size in enumerate(sizes)
        for start in range(0, size, PIECE)
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3)


def adam_numbers(
    step: int, lr: float, betas: tuple[float, float], eps: float, decay: float, decoupled: bool,
    sign: float,
) -> Tensor:  # fmt: skip
    """What a step number `step`, counted from 1, works with: see `adam_reference`."""
    first, second = betas
    pace, root = lr / (1 - first**step), sqrt(1 - second**step)
    kept = 1 - lr * decay if decoupled else 1.0
    added = 0.0 if decoupled else decay
    found = [sign, kept, added, first, second, eps, pace, root]
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def adam_reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor],
    squares: Sequence[Tensor], numbers: Tensor, factor: Tensor, over: bool = False,
) -> None:  # fmt: skip
    """The reference: parameters and both moments change in place."""
    sign, kept, added, first, second, eps, pace, root = numbers.tolist()
    for p, g, mean, square in zip(params, grads, means, squares, strict=True):
        held = held_dtype(p.dtype)
        value, m, v = p.to(held), mean.to(held), square.to(held)
        grad = g.to(held) * (factor.to(held) * sign) + added * value
        m = m + (1 - first) * (grad - m)
        v = second * v + (1 - second) * grad * grad
        p.copy_(kept * value - pace * m / (v.sqrt() / root + eps))
        mean.copy_(m)
        square.copy_(v)
        if over:
            g.copy_(p)


def sgd_numbers(
    first: bool, lr: float, momentum: float, dampening: float, decay: float, nesterov: bool,
    sign: float,
) -> Tensor:  # fmt: skip
    """What a step works with: see `sgd_reference`. Before the first the buffer is all zeros."""
    share = 1.0 if first else 1 - dampening
    found = [sign, decay, lr, momentum, share, float(nesterov)]
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def sgd_reference(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], numbers: Tensor,
    factor: Tensor, over: bool = False,
) -> None:  # fmt: skip
    """The reference; without momentum there are no buffers."""
    sign, decay, lr, momentum, share, nesterov = numbers.tolist()
    for index, (p, g) in enumerate(zip(params, grads, strict=True)):
        held = held_dtype(p.dtype)
        value = p.to(held)
        grad = g.to(held) * (factor.to(held) * sign) + decay * value
        if buffers:
            summed = momentum * buffers[index].to(held) + share * grad
            buffers[index].copy_(summed)
            grad = grad + momentum * summed if nesterov else summed
        p.copy_(value - lr * grad)
        if over:
            g.copy_(p)


@jit
def _place(row, addresses, TYPE: tl.constexpr):
    """The address at which the piece of one of the tensors begins."""
    return tl.load(addresses + tl.load(row)) + tl.load(row + 1) * (TYPE.primitive_bitwidth // 8)


@jit
def _adam(
    param, mean_at, square_at, grad_at, count, numbers, factor, PARAM: tl.constexpr,
    GRAD: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    OVER: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < count_of(count, WHOLE)
    to_param, to_mean = run_of(param, PARAM, WHOLE) + at, run_of(mean_at, PARAM, WHOLE) + at
    to_square, to_grad = run_of(square_at, PARAM, WHOLE) + at, run_of(grad_at, GRAD, WHOLE) + at
    value = tl.load(to_param, inside, 0.0).to(WIDE)
    grad = tl.load(to_grad, inside, 0.0).to(WIDE)
    mean = tl.load(to_mean, inside, 0.0).to(WIDE)
    square = tl.load(to_square, inside, 0.0).to(WIDE)
    grad *= tl.load(factor).to(WIDE) * tl.load(numbers).to(WIDE)
    grad += tl.load(numbers + 2).to(WIDE) * value
    first, second = tl.load(numbers + 3), tl.load(numbers + 4)
    mean += (1.0 - first).to(WIDE) * (grad - mean)
    square = second.to(WIDE) * square
    square += (1.0 - second).to(WIDE) * grad * grad
    below = tl.sqrt(square) / tl.load(numbers + 7).to(WIDE) + tl.load(numbers + 5).to(WIDE)
    value = tl.load(numbers + 1).to(WIDE) * value - tl.load(numbers + 6).to(WIDE) * mean / below
    tl.store(to_param, value.to(PARAM), inside)
    if OVER:
        tl.store(to_grad, value.to(PARAM).to(GRAD), inside)
    tl.store(to_mean, mean.to(PARAM), inside)
    tl.store(to_square, square.to(PARAM), inside)


@jit
def adam_kernel(
    rows, params, grads, means, squares, numbers, factor, PARAM: tl.constexpr, GRAD: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0).to(tl.int64) * 3
    param, mean = _place(row, params, PARAM), _place(row, means, PARAM)
    square, grad = _place(row, squares, PARAM), _place(row, grads, GRAD)
    count = tl.load(row + 2)
    if lies_whole(param | mean | square | grad, count):
        _adam(
            param, mean, square, grad, count, numbers, factor, PARAM, GRAD, True, BLOCK, WIDE, OVER
        )
    else:
        _adam(
            param, mean, square, grad, count, numbers, factor, PARAM, GRAD, False, BLOCK, WIDE, OVER
        )


@jit
def _sgd(
    param, grad_at, buffer, count, numbers, factor, PARAM: tl.constexpr, GRAD: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, HEAVY: tl.constexpr,
    OVER: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < count_of(count, WHOLE)
    to_param, to_grad = run_of(param, PARAM, WHOLE) + at, run_of(grad_at, GRAD, WHOLE) + at
    value = tl.load(to_param, inside, 0.0).to(WIDE)
    grad = tl.load(to_grad, inside, 0.0).to(WIDE)
    grad *= tl.load(factor).to(WIDE) * tl.load(numbers).to(WIDE)
    grad += tl.load(numbers + 1).to(WIDE) * value
    if HEAVY:
        momentum = tl.load(numbers + 3).to(WIDE)
        to_buffer = run_of(buffer, PARAM, WHOLE) + at
        summed = momentum * tl.load(to_buffer, inside, 0.0).to(WIDE)
        summed += tl.load(numbers + 4).to(WIDE) * grad
        tl.store(to_buffer, summed.to(PARAM), inside)
        grad = tl.where(tl.load(numbers + 5) > 0.0, grad + momentum * summed, summed)
    value -= tl.load(numbers + 2).to(WIDE) * grad
    tl.store(to_param, value.to(PARAM), inside)
    if OVER:
        tl.store(to_grad, value.to(PARAM).to(GRAD), inside)


@jit
def sgd_kernel(
    rows, params, grads, buffers, numbers, factor, PARAM: tl.constexpr, GRAD: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, HEAVY: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    row = rows + tl.program_id(0).to(tl.int64) * 3
    param, grad = _place(row, params, PARAM), _place(row, grads, GRAD)
    buffer = _place(row, buffers, PARAM) if HEAVY else param
    count = tl.load(row + 2)
    if lies_whole(param | grad | buffer, count):
        _sgd(
            param, grad, buffer, count, numbers, factor, PARAM, GRAD, True, BLOCK, WIDE, HEAVY, OVER
        )
    else:
        _sgd(
            param, grad, buffer, count, numbers, factor, PARAM, GRAD, False, BLOCK, WIDE, HEAVY,
            OVER,
        )  # fmt: skip


@custom_op("meshwright::adam_update", mutates_args=("params", "grads", "means", "squares"))
def adam_update(
    params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor],
    squares: Sequence[Tensor], rows: Tensor, numbers: Tensor, factor: Tensor, over: bool = False,
) -> None:  # fmt: skip
    """As `adam_reference`, of contiguous tensors of one dtype; `rows` are their `table`."""
    if not len(rows) or way("bucket_update", rows) == "torch":
        adam_reference(params, grads, means, squares, numbers, factor, over)
        return
    where = [addresses_of(x, rows) for x in (params, grads, means, squares)]
    adam_kernel[(len(rows),)](
        rows, *where, sent(numbers, rows.device), factor,
        PARAM=element(params[0].dtype), GRAD=element(grads[0].dtype), BLOCK=PIECE,
        WIDE=wide(params[0].dtype), OVER=over,
    )  # fmt: skip


@custom_op("meshwright::sgd_update", mutates_args=("params", "grads", "buffers"))
def sgd_update(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], rows: Tensor,
    numbers: Tensor, factor: Tensor, over: bool = False,
) -> None:  # fmt: skip
    """As `sgd_reference`, likewise."""
    if not len(rows) or way("bucket_update", rows) == "torch":
        sgd_reference(params, grads, buffers, numbers, factor, over)
        return
    where = [addresses_of(x, rows) for x in (params, grads, buffers or params)]
    sgd_kernel[(len(rows),)](
        rows, *where, sent(numbers, rows.device), factor,
        PARAM=element(params[0].dtype), GRAD=element(grads[0].dtype), BLOCK=PIECE,
        WIDE=wide(params[0].dtype), HEAVY=bool(buffers), OVER=over,
    )  # fmt: skip


@adam_update.register_fake
def _adam_shapes(
    params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor],
    squares: Sequence[Tensor], rows: Tensor, numbers: Tensor, factor: Tensor, over: bool = False,
) -> None:  # fmt: skip
    return None


@sgd_update.register_fake
def _sgd_shapes(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], rows: Tensor,
    numbers: Tensor, factor: Tensor, over: bool = False,
) -> None:  # fmt: skip
    return None


class Steps(NamedTuple):
    """A kernel's two halves on the host."""

    numbers: Callable[..., Tensor]
    """Makes what a step works with of an optimizer's settings."""
    update: Callable[..., None]
    """Takes params, grads, each list of buffers, rows, numbers, factor, over."""


STEPS = {"adam": Steps(adam_numbers, adam_update), "sgd": Steps(sgd_numbers, sgd_update)}
"""By the name that forms of optimizers give (`forms.updates.KernelStep`)."""


def builds(name: str, width: int) -> Iterator[Build]:
    """For parameters and gradients of `name`, such as bf16."""
    kind = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[name]
    tables = dict.fromkeys(("rows", "params", "grads"), "*i64")
    numbers = {"numbers": "*fp64", "factor": "*fp32"}
    constants = {"PARAM": kind, "GRAD": kind, "BLOCK": PIECE, "WIDE": tl.float32}
    once = PIECE * kind.primitive_bitwidth // 8
    for over in (False, True):
        own = {**constants, "OVER": over}
        given = {**tables, "means": "*i64", "squares": "*i64", **numbers}
        yield Build(adam_kernel, given, own, moves=(7 + over) * once)
        for heavy in (False, True):
            given = {**tables, "buffers": "*i64", **numbers}
            moves = (3 + over + 2 * heavy) * once
            yield Build(sgd_kernel, given, {**own, "HEAVY": heavy}, moves=moves)
