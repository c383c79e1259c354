"""How parameters are trained where not by gradients and an optimizer, one file a method; the file
name is its key. MESHWRIGHT_METHODS names folders with more.

A file has `CHANGES`, what it gives up of plain training; `check(plan)`: what is wrong with a plan
that names it, and what would be right; `describe(model, settings)`: what ranks sum in one
iteration; and `build(model, settings, sums)`, which makes what runs on a rank.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from torch import Tensor, nn

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders, nearest
from meshwright.ir.plan.finding import Finding
from meshwright.ir.plan.plan import FormChoice, Plan, Setting
from meshwright.ir.text.plain_text import SHOWN

add_folders("MESHWRIGHT_METHODS", __path__)
_FILES = Files(sys.modules[__name__], "method of training")
METHODS = _FILES.names


@dataclass(frozen=True, slots=True)
class SummedTerms:
    """A tensor that all ranks sum in each iteration."""

    what: str
    values: int
    """Numbers in it."""
    times: int
    """In one iteration."""
    value_bytes: int = 8

    @property
    def nbytes(self) -> int:
        """Of one iteration, on one rank."""
        return self.values * self.value_bytes * self.times


class Summing(Protocol):
    """Sums a tensor over ranks in place."""

    def __call__(self, x: Tensor) -> "Awaited":
        """Starts to; what comes back waits until `x` is the sum."""


class Awaited(Protocol):
    """A sum that is under way."""

    def wait(self) -> object:
        """Returns when it is there."""


class MethodRun(Protocol):
    """A method on one rank."""

    def begin(self, samples: Sequence[Tensor], total: int) -> None:
        """Takes this rank's samples, of so many over all ranks, before the first iteration."""

    def step(self) -> Tensor:
        """Takes one iteration; returns what it makes smaller, the same number on all ranks."""

    @property
    def shared(self) -> Mapping[str, Tensor]:
        """What all ranks have alike, parameters by their paths among it; checkpoints keep it."""

    @property
    def of_samples(self) -> Mapping[str, Tensor]:
        """What a rank keeps of each of its samples, along dim 0; checkpoints keep it too."""

    def load(self, shared: Mapping[str, Tensor]) -> None:
        """Goes on from what `shared` and `of_samples` were; the latter has been filled."""


class MethodFile(Protocol):
    """What a file of the folder has."""

    CHANGES: str

    def check(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Yields what is wrong with a plan that names the method, and what would be right."""

    def describe(
        self, model: nn.Module, settings: Mapping[str, Setting]
    ) -> tuple[SummedTerms, ...]:
        """Returns what ranks sum in one iteration."""

    def build(self, model: nn.Module, settings: Mapping[str, Setting], sums: Summing) -> MethodRun:
        """Returns what runs it. PlanError if it does not train such a model."""


def method(name: str) -> MethodFile:
    """Loads a method by its key. PlanError names the nearest if there is none."""
    return cast(MethodFile, _FILES.load(name))


def with_method(plan: Plan, name: str, **settings: Setting) -> Plan:
    """Returns a plan that trains by a method; PlanError if the method does not go with it. What was
    predicted of plain training is dropped."""
    made = replace(
        plan, method=FormChoice(form=name, settings=settings), predicted=None, evidence=None
    )
    made = replace(made, gives_up=method_gives_up(made))
    for finding in method_findings(made):
        raise PlanError(str(finding))
    return made


def method_findings(plan: Plan) -> Iterator[Finding]:
    """Yields what is wrong with the method that a plan names."""
    if plan.method is None:
        return
    key = plan.method.form[:SHOWN]
    if key not in METHODS:
        near = nearest(key, METHODS)
        yield Finding("method", f"{key!r} is no method of training", f"{near}, or no method")
        return
    for message, near in method(key).check(plan):
        yield Finding("method", message, near)


def method_gives_up(plan: Plan) -> tuple[str, ...]:
    """Returns what of plain training the method of a plan changes, in a sentence."""
    if plan.method is None or plan.method.form not in METHODS:
        return ()
    return (f"{plan.method.form}: {method(plan.method.form).CHANGES}",)


def refuse_method(plan: Plan) -> None:
    """PlanError if a plan is of another training than by gradients."""
    if plan.method is not None:
        raise PlanError(
            f"the plan trains by {plan.method.form[:SHOWN]}, and not by gradients and an "
            "optimizer: run it by `mw.by_method(model, plan, samples)`, or leave out its method"
        )
