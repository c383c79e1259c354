"""Fused kernels, one file each: Triton forward and backward, and the torch reference beside them.

A file has `OPERATORS`: by name an operator of torch, which traces, compiles and differentiates, and
its reference in plain torch; and `builds`, what to compile ahead of time. Operators take Triton on
a GPU and torch elsewhere; `launch.way` says which. `load` makes all of them known to torch.
"""

import importlib
import pkgutil
from types import ModuleType

FILES = tuple(sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"launch"}))


def load() -> tuple[ModuleType, ...]:
    """All kernels' modules; importing them registers their operators."""
    return tuple(importlib.import_module(f"{__name__}.{name}") for name in FILES)
