"""What the kernels share: Triton where there is one, which way a call goes, sizes of blocks."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.ir.interpreter import read_ends_of_loops
from meshwright.ir.placed.peers import MOST_WIDTH

# Triton asks to be told; products and sums of one expression may be one instruction.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
try:
    import triton as triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:  # an extra: without it all calls take torch
    triton, tl = None, SimpleNamespace(constexpr=Any)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs kernels on the CPU, slowly, to test them."""
if INTERPRETED and triton is not None:
    read_ends_of_loops()
Call = tuple[str, str]
"""A kernel, and why it was not Triton's but torch's operators; "" if it was Triton's."""
TAKEN: Counter[Call] = Counter()
"""Calls in this process."""
ELEMENTS = 1024
"""That one program takes where each stands for itself."""


def jit(function: Callable[..., Any], varying: Sequence[str] = ()) -> Any:
    """A Triton kernel, not compiled anew for values of its `varying` parameters; where there is no
    Triton nobody calls it."""
    return function if triton is None else triton.jit(function, do_not_specialize=list(varying))


def way(kernel: str, x: Tensor, width: int = 1) -> Literal["triton", "torch"]:
    """How a kernel on rows of `width` elements runs for this tensor; `TAKEN` counts it."""
    why = why_torch(x, width)
    TAKEN[kernel, why] += 1
    return "torch" if why else "triton"


def why_torch(x: Tensor, width: int = 1) -> str:
    """Why Triton has no kernel for such rows; "" if it has."""
    if triton is None:
        return "Triton is not installed"
    if not x.is_cuda and not (INTERPRETED and x.device.type == "cpu"):
        return f"tensors are on {x.device.type}"
    if not x.numel() or not width:
        return "there are no elements"
    return f"rows have more than {MOST_WIDTH} elements" if width > MOST_WIDTH else ""


def block(width: int) -> int:
    """Elements that a program takes: a power of two."""
    return int(triton.next_power_of_2(width))


def warps(width: int) -> int:
    """Threads grow with the row: 8 elements each, up to 512 threads."""
    return min(16, max(1, block(width) // 256))


def grid(x: Tensor) -> tuple[int]:
    """Programs where each element stands for itself."""
    return (-(-x.numel() // ELEMENTS),)


def programs(x: Tensor, rows: int, width: int = 2048) -> int:
    """Programs that share all rows where each sums over its own: so many per processor as keep
    memory busy, and no more, since each writes a sum as wide as a row."""
    if not x.is_cuda:
        return min(rows, 4)
    count: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    return min(rows, each(width) * count)


def each(width: int) -> int:
    """How many of these programs a processor gets."""
    return max(1, min(6, 8192 // block(width)))


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of such values are held in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def wide(dtype: torch.dtype) -> Any:
    """The same, for a kernel."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def element(dtype: torch.dtype) -> Any:
    """What a pointer to such values points to, for a kernel."""
    return getattr(tl, str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel to be compiled without a device: types of its parameters, values of constants.

    `values`: of its numbers, as they are at such a width; a launch compiles what 16 divides as
    such, and 1 as a constant. `moves`: bytes that one program, or one turn of its `looped` loop,
    cannot do without; 0 where products bound it. `cached`: bytes beside these that all programs
    read, such as a norm's gain, which stay near. `filled`: the part of its lanes that it needs.
    `most`: programs that a launch has per processor. `targets`: compute capabilities on which
    launches have it; empty: on all.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    values: dict[str, int] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    moves: float = 0.0
    cached: float = 0.0
    filled: float = 1.0
    looped: bool = False
    most: int = 32
    targets: tuple[int, ...] = ()

    def is_for(self, target: int) -> bool:
        """Whether a launch on such a device has it."""
        return not self.targets or target in self.targets


__all__ = [
    "ELEMENTS", "TAKEN", "Build", "Call", "block", "element", "grid", "held_dtype", "jit",
    "programs", "tl", "triton", "warps", "way", "why_torch", "wide",
]  # fmt: skip
