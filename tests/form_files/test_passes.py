"""What files of `forms/updates` say of passes and kernels is what torch's kernels do."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.forms.updates import UPDATES, update


class Counted(TorchDispatchMode):
    """Counts kernels on lists of tensors, and the reads and writes of whole lists by each."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.passes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if "_foreach_" not in name and "_fused_" not in name:
            return result
        self.kernels += "_foreach_" in name
        written = dict[int, bool]()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if not _is_list(value):
                continue
            # A fused kernel writes gradients only where a scaler has been given.
            writes = argument.alias_info is not None and argument.alias_info.is_write
            writes = writes and argument.name != "grads"
            first = value[0].data_ptr()
            written[first] = written.get(first, False) or writes
        self.passes += sum(1 + wrote for wrote in written.values()) + _is_list(result)
        return result


def _is_list(value: Any) -> bool:
    """Whether it is a list of tensors of more than a step's count."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and isinstance(value[0], Tensor) and value[0].numel() > 1


@pytest.mark.parametrize("name", [name for name in UPDATES if update(name).takes((5,))])
def test_passes_are_those_of_the_kernels(name):
    form = update(name)
    params = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
    how = {"fused": True} if form.launches == 1 else {"foreach": True}
    optimizer = form.kind(params, lr=0.1, **form.settings, **how)
    for _ in range(2):  # the first step makes the state
        for param in params:
            param.grad = torch.randn(5)
        with Counted() as counted:
            optimizer.step()
    assert counted.passes == form.passes
    if form.launches > 1:
        assert form.launches == counted.kernels
