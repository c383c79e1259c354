"""What every conversion must do, straight from the definition of the placements."""

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.layout.conversions import Conversion, Primitive, dual
from meshwright.ir.layout.layout import (
    RP,
    Axis,
    P,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    units_of,
)

PLACEMENTS: tuple[Placement, ...] = (
    R, RP, P, Shard(0), Shard(1), Shard(0, outer=2), Shard(1, inner=2), Shard(0, outer=2, inner=2),
)  # fmt: skip
SHAPE = (12, 10)


def sizes_of(shard: Shard, ranks: int) -> tuple[int, ...]:
    units = Axis(ranks).sizes(units_of(SHAPE[shard.dim], shard))
    return tuple(shard.inner * count for count in units)


def part_of(whole: Tensor, placement: Placement, comm: Comm) -> Tensor:
    """What a rank holds of `whole`: summands sum to it, shards are its index sets."""
    ranks, rank = comm.sizes["tp"], comm.coordinates["tp"]
    match placement:
        case Replicate():
            return whole.clone()
        case Partial():
            noise = [whole * (i + 0.5) for i in range(ranks - 1)]
            return noise[rank] if rank < ranks - 1 else whole - sum(noise)
        case Shard(dim, outer, _):
            sizes = sizes_of(placement, ranks)
            section = whole.shape[dim] // outer
            start = sum(sizes[:rank])
            index = [s * section + start + i for s in range(outer) for i in range(sizes[rank])]
            return whole.index_select(dim, torch.tensor(index, dtype=torch.int64))


def convert(x: Tensor, source: Placement, target: Placement, comm: Comm) -> Tensor:
    """The call that codegen emits for this conversion."""
    conversion = Conversion(source, target)
    ranks = comm.sizes["tp"]
    backward = str(conversion.backward)
    from_part = source if isinstance(source, Shard) else None
    to_part = target if isinstance(target, Shard) else None
    if conversion.forward is Primitive.ALL_TO_ALL:
        assert from_part and to_part
        return comm.all_to_all(
            x, "tp", from_part.dim, sizes_of(from_part, ranks), to_part.dim,
            sizes_of(to_part, ranks), backward, outer=from_part.outer, to_outer=to_part.outer,
        )  # fmt: skip
    part = from_part or to_part
    method = getattr(comm, str(conversion.forward))
    if part is None or conversion.forward is Primitive.IDENTITY:
        return method(x, "tp", backward)
    return method(x, "tp", part.dim, sizes_of(part, ranks), backward, outer=part.outer)


def summed(comm: Comm, x: Tensor) -> Tensor:
    return comm.sum_over(x, "tp")


def check(source: Placement, target: Placement, comm: Comm) -> None:
    """Forward gives what `target` means; backward gives what dual(source) means."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    gradient = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    x = part_of(whole, source, comm).requires_grad_()
    y = convert(x, source, target, comm)
    same(y, whole, target, comm, f"{source} -> {target} forward")
    y.backward(part_of(gradient, dual(target), comm))
    assert x.grad is not None
    same(x.grad, gradient, dual(source), comm, f"{source} -> {target} backward")


def same(held: Tensor, whole: Tensor, placement: Placement, comm: Comm, what: str) -> None:
    held = held.detach()
    if placement == P:
        held, placement = summed(comm, held), R
    torch.testing.assert_close(held, part_of(whole, placement, comm), msg=lambda m: f"{what}: {m}")
