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
from meshwright.ir.text.plain_text import SHOWN

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
    BLOCK = "its block of elements"
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
    copies: float
    """Values of state per value of a parameter, in its dtype."""
    passes: float
    """Reads and writes of a value (parameter, gradient, state) in one step."""
    launches: int = 1
    """Kernels, one after the other, that step a list of tensors; 1: torch's fused one."""
    one_by_one: bool = False
    """Its kernels take a tensor, and no list of them."""
    made: float = 0
    """Values per value of a parameter that a step makes and lets go again."""
    reach: Reach = Reach.ELEMENT
    block: int = 0
    """Elements of a block, row-major, if its reach is that."""
    least: int = 0
    """Then: parameters of fewer elements are stepped element by element."""
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
    told: str = ""
    """The name of one that has no file: what a search found of it by trying, as a plan tells it."""
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
        if self.told:
            raise PlanError(
                f"the plan is for the optimizer {self.told}, which no file of forms/updates has: "
                "pass yours, as you gave it to the search: compile(model, plan, optimizer=...)"
            )
        settings = dict(self.settings) | ({} if lr is None else {"lr": lr})
        has_kernel = "fused" in inspect.signature(self.kind).parameters
        if fused and tensors and has_kernel and is_right(self.kind, tensors):
            settings["fused"] = True
        return self.kind([{"params": list(tensors)}], **settings)


@cache
def update(name: str) -> Update:
    """Loads the form of an optimizer by its key, or reads it from what a plan tells of one that has
    no file (`told_text`). PlanError names the nearest if there is none."""
    if name.startswith(_TOLD):
        return _told(name)
    found = _FILES.load(name).UPDATE
    if not isinstance(found, Update):
        raise PlanError(f"UPDATE in the file of optimizer {name!r} is no Update: {found!r}")
    return found


def is_known(name: str) -> bool:
    """Tells whether `update` may be asked for it."""
    return name in UPDATES or name.startswith(_TOLD)


def spoken(name: str) -> str:
    """Returns a key as it stands in a sentence: of one that was tried its class."""
    return name.removeprefix(_TOLD).partition(" ")[0]


_TOLD = "tried "
_FIGURES = ("state", "passes", "launches", "made", "block", "least")
_MOST = 1e6
"""Of each figure: none of a real optimizer comes near."""


def told_text(name: str, reach: Reach, **figures: float) -> str:
    """Returns what a plan says of an optimizer without a file: `tried Lion reach=element state=1
    passes=9 launches=5 made=1`. Figures are those of `Update`, `state` its `copies`."""
    said = [f"{key}={figures[key]:.6g}" for key in _FIGURES if figures.get(key)]
    return " ".join([f"{_TOLD}{name}", f"reach={reach.name.lower()}", *said])


def _told(text: str) -> Update:
    """What `told_text` says; PlanError names the word that is none of its."""
    name, *words = text.removeprefix(_TOLD).split(" ")
    known = {reach.name.lower(): reach for reach in Reach}
    found: dict[str, float] = dict.fromkeys(_FIGURES, 0.0)
    reach = None
    for key, _, value in (word.partition("=") for word in words):
        if key == "reach" and value in known:
            reach = known[value]
        elif key in found and _is_figure(value):
            found[key] = float(value)
        else:
            raise _untold(text, f"{key}={value}")
    if not name.isidentifier() or reach is None or (reach is Reach.BLOCK) != (found["block"] > 0):
        raise _untold(text, name)
    return Update(
        kind=torch.optim.Optimizer, told=name, reach=reach, copies=found["state"],
        passes=found["passes"], launches=max(1, int(found["launches"])), one_by_one=True,
        made=found["made"], block=int(found["block"]), least=int(found["least"]),
    )  # fmt: skip


def _is_figure(text: str) -> bool:
    plain = text.replace(".", "", 1).replace("e+", "", 1).replace("e-", "", 1)
    return plain.isascii() and plain.isdigit() and float(text) <= _MOST


def _untold(text: str, word: str) -> PlanError:
    example = told_text("Lion", Reach.ELEMENT, state=1, passes=9, launches=5, made=1)
    return PlanError(
        f"optimizer {text[:SHOWN]!r}: {word[:SHOWN]!r} is not what a plan tells of an optimizer "
        f"that was tried; such a text is {example!r}, with the words "
        f"reach={'|'.join(reach.name.lower() for reach in Reach)} and {', '.join(_FIGURES)}"
    )


def kind_of(name: str) -> type[torch.optim.Optimizer]:
    """Returns the class of an optimizer by its key."""
    return update(name).kind


def fuse(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer of torch's that has a file step in one kernel, where nobody has said how it
    computes: op by op it makes tensors as large as parameters, and what files say is of the
    kernel."""
    if type(optimizer) not in {kind_of(name) for name in UPDATES}:
        return
    for group in optimizer.param_groups:
        said = [group.get(how) for how in ("foreach", "capturable", "differentiable")]
        if group.get("fused", False) is not None or said[0] is not None or any(said):
            continue
        if not is_right(type(optimizer), group["params"]):
            continue
        group["fused"] = True
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if isinstance(step := state.get("step"), Tensor):  # it lies with the parameter then
                state["step"] = step.to(p.device, torch.float32)


def is_right(kind: type[torch.optim.Optimizer], tensors: Sequence[Tensor]) -> bool:
    """Tells whether torch's kernel of a class steps tensors, and rightly: there is none for complex
    numbers, and SGD's on a CPU gets narrow numbers wrong (torch 2.13: by as much as a step)."""
    wrong = kind is torch.optim.SGD and any(
        x.device.type == "cpu" and x.element_size() < 4 for x in tensors
    )
    return not wrong and all(map(torch.is_floating_point, tensors))


def is_fused(group: Group) -> bool:
    """Tells whether one kernel steps a group, of an optimizer that `fuse` has seen; True of one
    whose class has none."""
    return bool(group.get("fused", True))


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
