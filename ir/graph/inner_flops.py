"""Products inside an operator that nobody has counted, seen by running it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from meshwright.ir.torch_private import DispatchMode


class ProductCounter(DispatchMode):  # type: ignore[misc]
    """Sums the floating-point operations of matrix products, convolutions and attention, as torch
    counts them; a multiply-add is 2."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=made)
        return made


def inner_flops(run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> int:
    """Returns the floating-point operations of products in one call on such tensors."""
    counter = ProductCounter()
    with torch.no_grad(), counter:
        run(*tensors)
    return counter.flops
