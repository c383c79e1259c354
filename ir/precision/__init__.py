"""Numbers that a plan computes with, one file each; the file name is its key, with dashes.

A file has `PRECISION`, a `Precision`. MESHWRIGHT_PRECISIONS names folders with more.
"""

import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Tensor

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
_ONLY_PRODUCTS = {"tf32": 4}
"""Bytes of what no tensor is in."""


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
    scales_loss: bool = False
    """Whether losses are scaled before their backward, and steps left out whose gradients overflow;
    no form of synchronisation but those that `Stage.zero` names knows of that."""
    all_in: str = ""
    """What the model's numbers are taken to be all in; empty: what they are traced in."""
    measured_as: str
    """What profiles call it."""

    def __post_init__(self) -> None:
        for name in filter(None, (self.products, self.autocast, self.copies, self.all_in)):
            if name not in DTYPE_BYTES and name not in _ONLY_PRODUCTS:
                raise PlanError(f"a precision names the dtype {name!r}, which is not known")

    @property
    def product_bytes(self) -> int:
        """Of an operand of a product."""
        return (DTYPE_BYTES | _ONLY_PRODUCTS)[self.products]

    @property
    def summed(self) -> float:
        """Bytes of a gradient's sum per byte of what the optimizer steps."""
        return DTYPE_BYTES[self.sums] / DTYPE_BYTES[self.stepped] if self.sums else 1.0

    @property
    def copied(self) -> float:
        """Bytes of a copy that blocks read of a parameter, per byte of what the optimizer steps; 0
        where they read that."""
        return DTYPE_BYTES[self.copies] / DTYPE_BYTES[self.stepped] if self.copies else 0.0


class CopyTypes(NamedTuple):
    """Dtypes of a parameter where blocks read a copy."""

    read: "torch.dtype"
    stepped: "torch.dtype"
    """Of what the optimizer steps, and of what a loss function gets."""
    summed: "torch.dtype"
    """Of gradients' sums."""


def copies_of(name: str) -> CopyTypes | None:
    """Returns the dtypes of parameters and of their copies under a precision; None where blocks
    read the parameters, or no precision is named."""
    found = precision(name) if name else None
    if not found or not found.copies:
        return None
    return CopyTypes(
        _torch_dtype(found.copies), _torch_dtype(found.stepped),
        _torch_dtype(found.sums or found.stepped),
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


def precision_for(graph: Graph, asked: str) -> str:
    """Returns the precision of plans for a graph: the one that is asked for, else its own.
    PlanError if the graph is of another one."""
    found = asked or graph.precision or AS_TRACED
    if asked:
        precision(asked)
    if in_which_traced(found) != graph.precision:
        has = repr(graph.precision) if graph.precision else "the dtypes of the model's parameters"
        raise PlanError(
            f"precision is {found!r}, and the graph was traced in {has}: give the module, or trace "
            f"it with precision={found!r}; the nearest for this graph is "
            f"{graph.precision or AS_TRACED!r}"
        )
    return found


def stepped_in(name: str, tensor: Tensor) -> str:
    """Returns the dtype of what the optimizer steps of a parameter of a graph that is traced in a
    precision, and in which it is saved; that of the graph where blocks read it itself."""
    found = precision(name)
    copied = found.copies and tensor.requires_grad and tensor.dtype == found.copies
    return found.stepped if copied else tensor.dtype


def in_which_traced(name: str) -> str:
    """Returns the precision that a graph's dtypes depend on: none where there are no copies."""
    return name if copies_of(name) else ""


@cache
def precision(name: str) -> Precision:
    """Loads one by its key. PlanError names the nearest if there is none."""
    found = _FILES.load(name).PRECISION
    if not isinstance(found, Precision):
        raise PlanError(f"PRECISION in the file of {name!r} is no Precision: {found!r}")
    return found


def _torch_dtype(name: str) -> "torch.dtype":
    import torch  # commands that need none of it do not wait for it

    found: torch.dtype = getattr(torch, name)
    return found
