"""Fused kernels, one file each, which has all that anybody must know of one.

`OPERATORS`: by name an operator of torch, which traces, compiles and differentiates, and its
reference in plain torch. Operators take Triton on a GPU and torch elsewhere; `launch.way` says
which. `builds`: what to compile ahead of time. `FACTS`: by operator, what search and cost model
know of it (`ir.graph.op_facts`). `ANCHORS` and `find(flow, op)`, of kernels that stand for a run of
operators: at which operators to look; a Match, a Miss that says why not, or None where there is
nothing to fuse. With `AFTER` it comes after the patterns of those names, and is compared with what
they leave. `look(laid)`, of a kernel that takes over an op with the collective beside it: its
places in a block (`ir.placed.spots`). Then `price(place)` is what it takes (`costmodel.ops.joint`),
`add(builder, spot, strategies)` puts the call in (`codegen.lower.joint`), and `run(comm, ...)` is
what emitted code calls. Ours have these three in the layers that they are of, as a file of `ir` may
import none of them.

The file's name is the kernel's in plans. MESHWRIGHT_KERNELS names folders with more.
"""

import difflib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.graph.op_facts import OpFacts, joined_facts

add_folders("MESHWRIGHT_KERNELS", __path__)
_FILES = Files(sys.modules[__name__], "kernel")
KERNELS = tuple(sorted(_FILES.names))
"""Names that plans and searches know."""
_FOLDER = Path(__file__).parents[1] / "placed"
_SHARED = {"found", "peers", "spots"}
PLACED = tuple(sorted({m.name for m in pkgutil.iter_modules([str(_FOLDER)])} - _SHARED))
"""Those of ours whose places a plan's layout decides (`ir.placed`)."""
_OURS = frozenset(module.name for module in pkgutil.iter_modules(__path__[:1]))


def check_kernels(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once, in order; PlanError for one that is none."""
    for name in names:
        if name not in KERNELS:
            near = difflib.get_close_matches(name, KERNELS, 1, 0.0)[0]
            known = ", ".join(KERNELS)
            raise PlanError(f"kernel {name!r} is not known: there are {known}; nearest: {near}")
    return tuple(name for name in KERNELS if name in names)


def load(name: str) -> ModuleType:
    """Import a kernel's file, by which torch knows its operators; PlanError if there is none."""
    module: ModuleType = _FILES.load(name)
    return module


@cache
def joint_of_users() -> Mapping[str, ModuleType]:
    """Files of users' folders with kernels that take over an op with the collective beside it."""
    files = {name: load(name) for name in KERNELS if name not in _OURS}
    return {name: file for name, file in files.items() if hasattr(file, "look")}


def is_placed(name: str) -> bool:
    """Whether a plan's layout decides a kernel's places; the others are put in by the trace."""
    return name in PLACED or name in joint_of_users()


def load_all() -> tuple[ModuleType, ...]:
    """Import all kernels' files."""
    return tuple(map(load, KERNELS))


def compiled() -> tuple[ModuleType, ...]:
    """All files with kernels that can be compiled ahead, also those that no plan chooses."""
    drawn = ("dropout", "attention_tiles")
    found = (*load_all(), *(import_module(f"meshwright.ir.random.{name}") for name in drawn))
    return tuple(module for module in found if hasattr(module, "builds"))


@cache
def operator_facts() -> Mapping[str, OpFacts]:
    """What all files say of their operators, by namespace and name (`meshwright.rotary`)."""
    return joined_facts({f"kernel {m.__name__}": getattr(m, "FACTS", {}) for m in load_all()})
