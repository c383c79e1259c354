"""Lines of ranks that are not there: collectives give tensors of the right shape at no cost."""

from collections.abc import Callable

from torch import Tensor

from meshwright.codegen.collectives.line import AtOnce


class FreeLine(AtOnce):
    """A rank alone that acts as one of `size`: what others would send is a view of its own."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).expand(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[self.rank]

    def all_to_all(self, parts: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        return [_shaped(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def shift(self, x: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: _shaped(x, shape)


def _shaped(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(x.shape) == shape:
        return x
    if not x.numel():
        return x.new_zeros(shape)
    return x.reshape(-1)[:1].view([1] * len(shape)).expand(shape)
