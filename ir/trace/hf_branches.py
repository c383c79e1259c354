"""Models of transformers that do something else where they are exported run as PyTorch runs them.

Qwen3-Next's delta rule, say, is two triangular solves, and in an export a loop over 64 rows.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_ASKS, _ALSO = "is_torchdynamo_exporting", "is_torchdynamo_compiling"
"""Where a file asks both it takes what a compiler can have, which no export sees through."""


@contextmanager
def as_it_runs(model: nn.Module) -> Iterator[None]:
    """Inside, files of the model's layers that ask only whether they are exported hear that they
    are not. The library's own, such as those of masks, go by what an export can have."""
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]
    asking = [file for file in files if hasattr(file, _ASKS) and not hasattr(file, _ALSO)]
    asked = [getattr(file, _ASKS) for file in asking]
    try:
        for file in asking:
            setattr(file, _ASKS, _no)
        yield
    finally:
        for file, function in zip(asking, asked, strict=True):
            setattr(file, _ASKS, function)


def _no() -> bool:
    return False
