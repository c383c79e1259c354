"""One file per optimizer; the file name is its key. MESHWRIGHT_UPDATES names folders with more.

A file has `UPDATE`, an `Update`: cost model and planner read its figures, the runtime makes the
optimizer and, where it has one, steps it by the kernel that it names.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.graph.gemm import Gemm

add_folders("MESHWRIGHT_UPDATES", __path__)
_FILES = Files(sys.modules[__name__], "optimizer")
UPDATES = _FILES.names
"""Keys of the optimizers: the file names."""
USUAL = "adamw"
"""The optimizer that is taken where nobody asks for one."""
State = dict[str, Any]
Group = dict[str, Any]


class Reach(Enum):
    """What a step of one element depends on."""

    ELEMENT = "the element alone"
    PARAMETER = "the whole parameter"
    GROUP = "other parameters too"
    CHANCE = "random numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """How a kernel of `ir.kernels.bucket_update` steps many tensors at once."""

    kernel: str
    """Its name there."""
    buffers: tuple[str, ...]
    """Names of the state tensors that it reads and writes, in its order."""
    begin: Callable[[Tensor, State, Group], object]
    """Makes the state of a parameter where there is none yet; what only tensors that it says the
    same of may be stepped with."""
    settings: Callable[[Any, Sequence[State], Group], Mapping[str, Any]]
    """Counts a step in the states of tensors that `begin` said the first argument of; what the
    kernel's numbers are made of."""
    refused: tuple[str, ...] = ("amsgrad", "differentiable")
    """Settings of torch's that the kernel has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """How parameters are stepped: what it costs and how it runs."""

    kind: type[torch.optim.Optimizer]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `kind`, where they are not its defaults."""
    copies: int
    """Values of state per value of a parameter, in its dtype."""
    passes: int
    """Reads and writes of a value (parameter, gradient, state) in one step."""
    launches: int = 1
    """Kernels, one after the other, that step a list of tensors; 1: torch's fused one."""
    one_by_one: bool = False
    """Its kernels take a tensor, and no list of them."""
    made: int = 0
    """Values per value of a parameter that a step makes and lets go again."""
    reach: Reach = Reach.ELEMENT
    dims: tuple[int, ...] = ()
    """Numbers of dims of the parameters that it takes; empty: of any."""
    products: Callable[[tuple[int, ...]], Sequence[Gemm]] | None = None
    """Products of matrices in the step of a parameter of some shape."""
    room: Callable[[tuple[int, ...], int], float] | None = None
    """Of one that steps parameters one by one: bytes that it makes and lets go again for one of
    some shape and bytes of a value; in place of `made`."""
    products_in: str = ""
    """Their dtype; empty: that of the parameter."""
    rests: Callable[[Group], bool] | None = None
    """Tells of a group's settings whether an element whose gradient is zero stays as it is, and its
    state, so that it need not be stepped; None: never."""
    step: KernelStep | None = None
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Exporter -> what the framework that it writes for calls this optimizer."""

    @property
    def exact(self) -> bool:
        """Whether training equals that of one process: ranks that hold parts step alike."""
        return self.reach is not Reach.CHANCE

    def takes(self, shape: Sequence[int]) -> bool:
        """Tells whether it steps parameters of a shape."""
        return not self.dims or len(shape) in self.dims

    @property
    def rests_by_default(self) -> bool:
        """Whether what has a gradient of zero stays as it is if nobody sets anything."""
        if self.rests is None:
            return False
        known = inspect.signature(self.kind).parameters
        return self.rests({name: p.default for name, p in known.items()} | dict(self.settings))

    def make(
        self, tensors: Sequence[nn.Parameter], lr: float | None, *, fused: bool
    ) -> torch.optim.Optimizer:
        """Makes the optimizer over tensors in one group, which may be empty: a stage may have
        nothing to train. `lr`: the class's own if None. `fused`: in one kernel where torch has
        one."""
        settings = dict(self.settings) | ({} if lr is None else {"lr": lr})
        if fused and tensors and "fused" in inspect.signature(self.kind).parameters:
            settings["fused"] = True
        return self.kind([{"params": list(tensors)}], **settings)


@cache
def update(name: str) -> Update:
    """Loads the form of an optimizer by its key. PlanError names the nearest if there is none."""
    found = _FILES.load(name).UPDATE
    if not isinstance(found, Update):
        raise PlanError(f"UPDATE in the file of optimizer {name!r} is no Update: {found!r}")
    return found


def kind_of(name: str) -> type[torch.optim.Optimizer]:
    """Returns the class of an optimizer by its key."""
    return update(name).kind


@cache
def _of_kinds() -> Mapping[type[torch.optim.Optimizer], Update]:
    return {update(name).kind: update(name) for name in UPDATES if update(name).rests}


def resting(optimizer: torch.optim.Optimizer, group: Group) -> Update | None:
    """Returns the form of an optimizer by which what has a gradient of zero stays as it is, under
    the settings of a group; None if it does not, or nobody knows."""
    found = _of_kinds().get(type(optimizer))
    return found if found and found.rests and found.rests(group) else None


@cache
def with_kernel() -> tuple[str, ...]:
    """Lists the keys of those that a kernel steps."""
    return tuple(name for name in UPDATES if update(name).step)


@cache
def names_elsewhere(exporter: str) -> Mapping[str, str]:
    """Maps the optimizers that a framework has too to their names there."""
    found = {name: update(name).elsewhere.get(exporter, "") for name in UPDATES}
    return {name: other for name, other in found.items() if other}
