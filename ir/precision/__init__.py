"""Numbers that a plan computes with, one file each; the file name is its key, with dashes.

A file has `PRECISION`, a `Precision`. MESHWRIGHT_PRECISIONS names folders with more. What a plan
asks for is a key, or a key and what modules have in its place: `bf16, lm_head=fp32`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders, nearest
from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Tensor
from meshwright.ir.text.plain_text import SHOWN

if TYPE_CHECKING:
    import torch

    from meshwright.ir.cluster.cluster import Cluster

add_folders("MESHWRIGHT_PRECISIONS", __path__)
_FILES = Files(sys.modules[__name__], "precision", dashed=True)
PRECISIONS = _FILES.names
USUAL = "bf16"
"""Taken for a model where nobody asks for one."""
AS_TRACED = "bf16-autocast"
"""The same for a graph of a model as it is."""


Scaling = Literal["", "tensor", "row"]
"""What has a scale of its own; empty: products are of values as they are."""
_ONLY_PRODUCTS = {"tf32": 4}
"""Bytes of what no tensor is in."""


def product_bytes(dtype: str) -> int:
    """Return the bytes of a value that products of a dtype multiply."""
    return (DTYPE_BYTES | _ONLY_PRODUCTS)[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What parameters, products and gradients are held, computed and sent in; names of dtypes."""

    products: str
    """Of products of matrices: which of a device's peaks holds."""
    autocast: str = ""
    """What torch.autocast casts to; empty: values have the dtypes that the model gives them."""
    copies: str = ""
    """Blocks read copies of parameters in it, which are cast after each step from what the
    optimizer steps; gathers send it. Empty: they read what the optimizer steps."""
    stepped: str = "float32"
    """With copies: the dtype of what the optimizer steps and of its state, and that in which
    gradients are summed over micro-batches and replicas."""
    sums: str = ""
    """With copies: the dtype in which gradients are summed over micro-batches and replicas, where a
    form sends and keeps copies itself; empty: that of what the optimizer steps, as of other forms.
    """
    linears: Scaling = ""
    """With 8-bit products: what of an operand of a linear layer has a scale of its own; these are
    then the products, and all others of values as they are."""
    narrow_tokens: bool = False
    """With 8-bit products: whether tokens on their way to experts, and gradients of what these
    make of them, are in 8-bit floats, too."""
    scales_loss: bool = False
    """Whether losses are scaled before their backward, and steps left out whose gradients overflow;
    no form of synchronisation but those that `Stage.zero` names knows of that."""
    all_in: str = ""
    """What the model's numbers are taken to be all in; empty: what they are traced in."""
    measured_as: str
    """What profiles call it."""
    within: "tuple[tuple[str, Precision], ...]" = ()
    """Patterns of module paths, and the numbers of what is inside such modules; the first, with an
    empty pattern, are those of all others. Empty: they are the same everywhere."""

    def __post_init__(self) -> None:
        for name in filter(None, (self.products, self.autocast, self.copies, self.all_in)):
            if name not in DTYPE_BYTES and name not in _ONLY_PRODUCTS:
                raise PlanError(f"a precision names the dtype {name!r}, which is not known")

    @property
    def product_bytes(self) -> int:
        """Of an operand of a product."""
        return product_bytes(self.products)

    @property
    def summed(self) -> float:
        """Bytes of a gradient's sum per byte of what the optimizer steps."""
        return DTYPE_BYTES[self.sums] / DTYPE_BYTES[self.stepped] if self.sums else 1.0

    def at(self, module_path: str) -> "Precision":
        """Returns the numbers of a module: those said of it, else those of the module around it; a
        path outranks patterns. PlanError where two patterns say different things of one module."""
        if not self.within:
            return self
        (_, found), *said = self.within
        parts = module_path.split(".")
        inside = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        depths = {name: _depth(name, inside) for name, _ in said}
        if deepest := max(depths.values(), default=0):
            own = {name: x for name, x in said if depths[name] == deepest}
            module = inside[deepest - 1]
            if module not in own and len(set(own.values())) > 1:
                raise PlanError(
                    f"patterns of the precision say different things of module {module!r}: "
                    f"{', '.join(own)}; nearest is to say it of {module!r} itself"
                )
            found = own.get(module, next(iter(own.values())))
        return found

    @property
    def copied(self) -> float:
        """Bytes of a copy that blocks read of a parameter, per byte of what the optimizer steps; 0
        where they read that."""
        return DTYPE_BYTES[self.copies] / DTYPE_BYTES[self.stepped] if self.copies else 0.0


def _depth(pattern: str, modules: Sequence[str]) -> int:
    """The outermost of modules inside each other that a pattern names, from 1; 0: none."""
    found = (i for i, x in enumerate(modules, 1) if x == pattern or fnmatchcase(x, pattern))
    return next(found, 0)


class CopyTypes(NamedTuple):
    """Dtypes of a parameter where blocks read a copy."""

    read: "torch.dtype"
    stepped: "torch.dtype"
    """Of what the optimizer steps, and of what a loss function gets."""
    summed: "torch.dtype"
    """Of gradients' sums."""
    numbers: Precision | None = None
    """Where not all modules read copies: it says which do."""

    def read_by(self, module_path: str) -> "torch.dtype":
        """Returns the dtype in which a module reads its parameters."""
        wide = self.numbers is not None and not self.numbers.at(module_path).copies
        return self.stepped if wide else self.read


def copies_of(name: str) -> CopyTypes | None:
    """Returns the dtypes of parameters and of their copies under a precision; None where blocks
    read the parameters, or no precision is named."""
    found = precision(name) if name else None
    if not found or not found.copies:
        return None
    return CopyTypes(
        _torch_dtype(found.copies), _torch_dtype(found.stepped),
        _torch_dtype(found.sums or found.stepped), found if found.within else None,
    )  # fmt: skip


def autocast_of(name: str) -> "torch.dtype | None":
    """Returns what torch.autocast casts to under a precision, if it does."""
    cast = precision(name).autocast
    return _torch_dtype(cast) if cast else None


def rounds_products(name: str) -> bool:
    """Tells whether products of float32 are of operands that are rounded to TF32."""
    return precision(name).products == "tf32"


def check_products(name: str, cluster: "Cluster") -> None:
    """PlanError for a GPU without kernels for the products of 8-bit floats."""
    numbers = precision(name)
    for device in cluster.device_types:
        known = device.kind == "cpu" or numbers.products in device.peak_flops
        if numbers.linears and not known:
            raise PlanError(
                f"precision is {name!r}, and {device.name} has no peak for {numbers.products}: "
                "nearest is bf16, or peak_flops of it in the cluster file if the device has it"
            )


def scaling_of(name: str) -> Scaling:
    """Returns what has a scale of its own in linear layers of 8-bit products; empty: there are
    none, or no precision is named."""
    return precision(name).linears if name else ""


def not_a_precision(asked: str) -> str:
    """Returns why no plan has such a precision; empty if it may."""
    usual = asked.partition(",")[0].strip()
    if usual not in PRECISIONS:
        near = nearest(usual[:SHOWN], PRECISIONS)
        return f"precision {usual[:SHOWN]!r} is none; nearest is {near!r}"
    try:
        return "" if canonical(asked) == asked else f"precision must be {canonical(asked)!r}"
    except PlanError as error:
        return str(error)


def precision_for(graph: Graph, asked: str) -> str:
    """Returns the precision of plans for a graph: the one that is asked for, else its own.
    PlanError if the graph is of another one."""
    found = canonical(asked) or graph.precision or AS_TRACED
    if in_which_traced(found) != graph.precision:
        has = repr(graph.precision) if graph.precision else "the dtypes of the model's parameters"
        raise PlanError(
            f"precision is {found!r}, and the graph was traced in {has}: give the module, or trace "
            f"it with precision={found!r}; the nearest for this graph is "
            f"{graph.precision or AS_TRACED!r}"
        )
    if problem := autocast_problem(graph, found):
        raise PlanError(f"{problem}; nearest is {WITHOUT_AUTOCAST}")
    return found


WITHOUT_AUTOCAST = "'bf16', for which the module is traced anew, or 'fp32'"
"""What is asked for where a model rules autocast out."""


def autocast_problem(graph: Graph, name: str) -> str:
    """Returns why a precision cannot be that of a graph: the model turns off what it casts by."""
    if not graph.no_autocast or not precision(name).autocast:
        return ""
    return (
        f"precision is {name!r}, which casts by torch.autocast, and {graph.no_autocast} turns that "
        "off"
    )


def stepped_in(name: str, tensor: Tensor) -> str:
    """Returns the dtype of what the optimizer steps of a parameter of a graph that is traced in a
    precision, and in which it is saved; that of the graph where blocks read it itself."""
    found = precision(name)
    copied = found.copies and tensor.requires_grad and tensor.dtype == found.copies
    return found.stepped if copied else tensor.dtype


def in_which_traced(name: str) -> str:
    """Returns the precision that a graph's dtypes depend on: none where there are no copies."""
    return canonical(name) if copies_of(name) else ""


def canonical(asked: str) -> str:
    """Returns what is asked for as plans write it: patterns in their order, one blank after each
    comma. PlanError as of `precision`."""
    if "," not in asked:
        if asked:
            precision(asked)
        return asked
    precision(asked)
    usual, said = _parsed(asked)
    return ", ".join((usual, *(f"{pattern}={key}" for pattern, key in said)))


@cache
def precision(asked: str) -> Precision:
    """Loads one by its key, or makes one of a key and what is said of modules by pattern:
    `bf16, lm_head=fp32`. PlanError names the nearest key if there is none of a name, and what
    cannot be in one plan."""
    if "," in asked:
        return _mixed(*_parsed(asked))
    found = _FILES.load(asked).PRECISION
    if not isinstance(found, Precision):
        raise PlanError(f"PRECISION in the file of {asked!r} is no Precision: {found!r}")
    return found


def _parsed(asked: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The usual key, and pairs of a pattern and a key, sorted."""
    usual, *more = (part.strip() for part in asked.split(","))
    said: dict[str, str] = {}
    for part in more:
        pattern, is_said, key = (x.strip() for x in part.partition("="))
        if not (pattern and is_said and key):
            raise PlanError(
                f"precision {asked[:SHOWN]!r}: {part[:SHOWN]!r} must be a pattern of module paths "
                "and a precision, such as lm_head=fp32"
            )
        if said.setdefault(pattern, key) != key:
            raise PlanError(f"precision {asked[:SHOWN]!r} says two things of {pattern!r}")
    return usual, tuple(sorted(said.items()))


def _mixed(usual: str, said: tuple[tuple[str, str], ...]) -> Precision:
    """What modules that differ have together: one kind of copies, and what is stepped."""
    within = (("", precision(usual)), *((pattern, precision(key)) for pattern, key in said))
    keys = (usual, *(key for _, key in said))
    found = dict(zip(keys, (numbers for _, numbers in within), strict=True))
    copied = {key: x for key, x in found.items() if x.copies}
    if not copied:
        raise PlanError(
            f"precisions {' and '.join(found)} have no copies of parameters, so that one plan has "
            f"one of them; nearest is {usual}"
        )
    first, numbers = next(iter(copied.items()))
    for key, x in copied.items():
        one = ("copies", "stepped", "sums", "scales_loss")
        if unlike := [name for name in one if getattr(x, name) != getattr(numbers, name)]:
            raise PlanError(
                f"precisions {first} and {key} cannot be in one plan, as all modules that read "
                f"copies have the same {unlike[0]}; nearest is {first} in the place of {key}"
            )
        if x.linears and numbers.linears not in ("", x.linears):
            raise PlanError(
                f"precisions {first} and {key} cannot be in one plan, as products of 8-bit floats "
                f"are all scaled by {numbers.linears} or all by {x.linears}; nearest is {first}"
            )
        numbers = x if x.linears else numbers
    for key, x in found.items():
        if not x.copies and (x.autocast or x.all_in != numbers.stepped or x.products != x.all_in):
            near = {"float32": "fp32", "float64": "fp64"}.get(numbers.stepped, first)
            raise PlanError(
                f"precisions {first} and {key} cannot be in one plan: modules without copies "
                f"compute in {numbers.stepped}, which {first} steps; nearest is {near}"
            )
    return replace(numbers, within=within)


def _torch_dtype(name: str) -> "torch.dtype":
    import torch  # commands that need none of it do not wait for it

    found: torch.dtype = getattr(torch, name)
    return found
