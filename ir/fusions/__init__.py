"""Runs of operators that one fused kernel stands for: one file per pattern, found by itself.

A file has `ANCHORS`, the operators at which to look, and `find(flow, op)`: a Match, a Miss that
says why not, or None where there is nothing to fuse. Its name is the kernel's in plans. With
`AFTER` it comes after the patterns of those names, and is compared with what they leave.
"""

import difflib
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from meshwright.ir.errors import PlanError

_FOLDER = Path(__file__).parents[1] / "placed"
TRACED = tuple(sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"flow"}))
"""Kernels that are put in while a model is traced."""
_SHARED = {"found", "peers", "spots"}
PLACED = tuple(sorted({m.name for m in pkgutil.iter_modules([str(_FOLDER)])} - _SHARED))
"""Those whose places a plan's layout decides (`ir.placed`)."""
KERNELS = tuple(sorted({*TRACED, *PLACED}))
"""Names that plans and searches know."""


def check_kernels(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once, in order; PlanError for one that is none."""
    for name in names:
        if name not in KERNELS:
            near = difflib.get_close_matches(name, KERNELS, 1, 0.0)[0]
            known = ", ".join(KERNELS)
            raise PlanError(f"kernel {name!r} is not known: there are {known}; nearest: {near}")
    return tuple(name for name in KERNELS if name in names)
