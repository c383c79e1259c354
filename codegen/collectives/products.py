"""Matrix products with the collective of their tensor parallelism under way beside them.

`columns`: the input's gradient is on its way over the axis while the weights' are computed. `rows`:
the rows are worked off in two halves, and the sum of the first is on its way beside the second.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from meshwright.codegen.collectives.comm import AxisConversion, Comm

Product = tuple[str, Tensor, Tensor | None]
"""`linear`, `addmm` or `mm` of the input with a weight, and what is added."""


def columns(
    comm: Comm,
    x: Tensor,
    axis: str,
    products: Sequence[Product],
    forward: str,
    backward: str,
    where: tuple[Any, ...] = (),
) -> tuple[Tensor, ...]:
    """The products of x, once it has been moved as `forward` says."""
    move = comm.move(forward, axis, *where, backward=backward)
    kinds, weights, added = zip(*products, strict=True)
    apply: Callable[..., tuple[Tensor, ...]] = _Columns.apply
    return apply(x, comm, move, kinds, *weights, *added)


def rows(
    comm: Comm, x: Tensor, axis: str, kind: str, weight: Tensor, added: Tensor | None
) -> Tensor:
    """The product of x, summed over the axis; its gradient every rank has."""
    apply: Callable[..., Tensor] = _Rows.apply
    return apply(x, comm, comm.move("all_reduce", axis, backward="identity"), kind, weight, added)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Comm,
        move: AxisConversion,
        kinds: tuple[str, ...],
        *operands: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.comm, ctx.move, ctx.kinds = comm, move, kinds
        ctx.dtypes = [x.dtype, *(None if o is None else o.dtype for o in operands)]
        whole = _cast(comm.begin_forward(move, x)())
        used = [None if o is None else _cast(o) for o in operands]
        weights, added = used[: len(kinds)], used[len(kinds) :]
        ctx.save_for_backward(whole, *weights)
        ctx.shapes = [None if o is None else o.shape for o in added]
        found = zip(kinds, weights, added, strict=True)
        return tuple(_product(kind, whole, w, b) for kind, w, b in found if w is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        count, needs = len(weights), ctx.needs_input_grad[4:]
        arrive = None
        if ctx.needs_input_grad[0]:
            parts = map(_input_gradient, ctx.kinds, gradients, weights)
            arrive = ctx.comm.begin_backward(ctx.move, _sum(parts))
        own = [
            _weight_gradient(kind, whole, g) if needed else None
            for kind, g, needed in zip(ctx.kinds, gradients, needs, strict=False)
        ]
        own += [
            g.sum_to_size(shape) if needed and shape is not None else None
            for g, shape, needed in zip(gradients, ctx.shapes, needs[count:], strict=True)
        ]
        # Each narrow one goes as it is cast, and what was sent before what has come is.
        own.reverse()
        typed = [_as(own.pop(), dtype) for dtype in ctx.dtypes[1:]]
        if arrive is None:
            return (None, None, None, None, *typed)
        came, arrive = arrive(), None
        return (came.to(ctx.dtypes[0]), None, None, None, *typed)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Comm,
        move: AxisConversion,
        kind: str,
        weight: Tensor,
        added: Tensor | None,
    ) -> Tensor:
        ctx.kind, ctx.shape = kind, None if added is None else added.shape
        ctx.dtypes = [x.dtype, weight.dtype, None if added is None else added.dtype]
        x, weight = _cast(x), _cast(weight)
        added = None if added is None else _cast(added)
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])
        whole = added is not None and added.ndim > 1
        halves = [half for half in flat.tensor_split(1 if whole else 2) if len(half)]
        # Each sum begins before the next half is computed.
        begun = [comm.begin_forward(move, _product(kind, h, weight, added)) for h in halves]
        result = torch.cat([arrive() for arrive in begun])
        return result.view(*x.shape[:-1], result.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        needs = ctx.needs_input_grad
        found = [
            _input_gradient(ctx.kind, gradient, weight) if needs[0] else None,
            _weight_gradient(ctx.kind, x, gradient) if needs[4] else None,
            gradient.sum_to_size(ctx.shape) if needs[5] and ctx.shape is not None else None,
        ]
        typed = [None if g is None else g.to(t) for g, t in zip(found, ctx.dtypes, strict=True)]
        return (typed[0], None, None, None, *typed[1:])


def _as(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else gradient.to(dtype)


def _cast(x: Tensor) -> Tensor:
    """As autocast does it."""
    kind = x.device.type
    wanted = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.element_size() < 8
    return x.to(torch.get_autocast_dtype(kind)) if wanted else x


def _product(kind: str, x: Tensor, weight: Tensor, added: Tensor | None) -> Tensor:
    if kind == "linear":
        return linear(x, weight, added)
    return torch.mm(x, weight) if added is None else torch.addmm(added, x, weight)


def _input_gradient(kind: str, gradient: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(gradient, weight if kind == "linear" else weight.t())


def _weight_gradient(kind: str, x: Tensor, gradient: Tensor) -> Tensor:
    left, right = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    return right.t() @ left if kind == "linear" else left.t() @ right


def _sum(parts: Iterable[Tensor]) -> Tensor:
    first, *others = parts
    for part in others:
        first.add_(part)
    return first
