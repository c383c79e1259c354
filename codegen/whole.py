"""Between whole tensors and what the ranks store: for tests, for loading and for checking."""

from torch import Tensor

from meshwright.codegen.primitives import Part, take
from meshwright.ir.layout import Axis, Placement, Shard, units_of


def part(whole: Tensor, placement: Placement, axis: Axis, coordinate: int) -> Tensor:
    """What the rank at `coordinate` stores of a whole tensor; the tensor itself if all of it."""
    if not isinstance(placement, Shard):
        return whole
    units = axis.sizes(units_of(whole.shape[placement.dim], placement))
    sizes = tuple(placement.inner * count for count in units)
    return take(whole, Part(placement.dim, sizes, placement.outer), coordinate)
