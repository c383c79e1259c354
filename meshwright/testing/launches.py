"""How many kernels a step launches: what reaches the device, counted at torch's dispatcher."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NO_KERNEL = frozenset(
    "_record_function_enter_new _record_function_exit _reshape_alias alias as_strided detach empty "
    "empty_like empty_strided expand is_same_size lift_fresh narrow new_empty permute reshape "
    "select slice split split_with_sizes squeeze t transpose unbind unsqueeze view view_as".split()
)
"""Views, room that nothing is written to, and marks."""


class Launches(TorchDispatchMode):
    """Counts by operator while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _NO_KERNEL and func.namespace != "profiler":
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """Count all."""
        return sum(self.counts.values())


def of_plain_step(model: torch.nn.Module, batch: dict[str, Any]) -> Launches:
    """Count forward and backward of a model as written, which returns its loss."""
    model(**batch).loss.backward()
    model.zero_grad()
    found = Launches()
    with found:
        model(**batch).loss.backward()
    return found
