"""The ways of `codegen.collectives.together` by kernels that work on the peers' memory; where there
is none, or shapes or types do not fit, what comes back says why."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm, SentCollective
from meshwright.codegen.collectives.primitives import DimShares
from meshwright.codegen.collectives.symmetric import Turn, Workspace, workspace
from meshwright.ir.kernels import gather_linear as gathering
from meshwright.ir.kernels import linear_scatter as scattering
from meshwright.ir.kernels import reduce_norm as summing
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.placed import peers


def reduce_norm(
    comm: Comm, axis: str, summand: Tensor, residual: Tensor, gain: Tensor, bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...] | str:  # fmt: skip
    width = summand.shape[-1]
    if width > peers.MOST_WIDTH:
        return f"rows have more than {peers.MOST_WIDTH} elements"
    if not summand.numel():
        return "there are no elements"
    found = _turn(comm, axis, summand, summand.nbytes, Primitive.ALL_REDUCE)
    if isinstance(found, str):
        return found
    _, turn = found
    own = turn.view((summand.numel() // width, width), summand.dtype)
    own.copy_(summand.reshape(own.shape))
    turn.barrier()
    one_shot = summand.nbytes <= peers.ONE_SHOT_BYTES
    if not one_shot:
        summing.sum_rows(turn.peers, own, comm.line(axis).rank)
        turn.barrier()
    return summing.norm_rows(
        turn.peers, summand.dtype, residual, gain, bias, eps, one_shot=one_shot
    )


def gather_linear(
    comm: Comm, axis: str, part: DimShares, x: Tensor, weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, list[Tensor]] | str:  # fmt: skip
    """The whole of x, for the backward, and the products."""
    if why := _why_not(part, x):
        return why
    found = _turn(comm, axis, x, x.nbytes, Primitive.ALL_GATHER)
    if isinstance(found, str):
        return found
    space, turn = found
    rank, inner = comm.line(axis).rank, _inner(x.shape, part.dim)
    parts, signals = space.bring(turn, x.reshape(-1, x.shape[-1]), rank)
    shape = list(x.shape[:-1])
    shape[part.dim] *= len(parts)
    made = [
        gathering.product(parts, signals, 1, weight, bias, inner, rank).view(*shape, -1)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    space.brought()
    return gathering.in_order(parts, inner).view(*shape, x.shape[-1]), made


def begin_linear_scatter(
    comm: Comm, axis: str, part: DimShares, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Callable[[], Tensor] | str:
    """Starts this rank's part of the sum of all ranks' products; what it returns waits for them."""
    ranks = comm.line(axis).size
    if why := _why_not(part, x):
        return why
    shape = list(x.shape[:-1])
    shape[part.dim] //= ranks
    rows, n = torch.Size(shape).numel(), len(weight)
    nbytes = ranks * rows * n * x.dtype.itemsize
    found = _turn(comm, axis, x, nbytes, Primitive.REDUCE_SCATTER)
    if isinstance(found, str):
        return found
    _, turn = found
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    inner, rank = _inner((*shape, n), part.dim), comm.line(axis).rank
    scattering.product(flat, weight, bias, turn.peers, turn.peer_signals, turn.epoch, inner, rank)
    slot = turn.view((ranks, rows, n), x.dtype)
    return lambda: scattering.sum_parts(slot, turn.signals, turn.epoch).view(*shape, n)


def _why_not(part: DimShares, x: Tensor) -> str:
    if len(set(part.sizes)) > 1 or part.outer > 1 or part.start >= 0:
        return "the ranks' parts are not equal"
    if x.dtype not in gathering.DTYPES:
        return f"no kernel multiplies {str(x.dtype).removeprefix('torch.')}"
    return "" if x.numel() else "there are no elements"


def _inner(shape: tuple[int, ...], dim: int) -> int:
    """Rows of a rank's part that lie in one run of the whole value."""
    return torch.Size(shape[dim:-1]).numel()


def _turn(
    comm: Comm, axis: str, x: Tensor, nbytes: int, primitive: Primitive
) -> tuple[Workspace, Turn] | str:
    space = workspace(comm.line(axis), x)
    if isinstance(space, str):
        return space
    if comm.log is not None:
        moved = nbytes if primitive is Primitive.REDUCE_SCATTER else x.nbytes
        comm.log.append(SentCollective(axis, primitive, moved))
    return space, space.turn(nbytes)
