"""The optimizers of a plan whose parameters are stepped in several ways, as one optimizer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, overload

import torch
from torch import nn

from meshwright.forms.updates import update
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.parameters import choice_of
from meshwright.ir.plan.plan import ParameterChoice, Plan


@dataclass(frozen=True)
class PlannedUpdates:
    """Which form of `forms.updates` steps each parameter."""

    usual: str
    said: tuple[Mapping[str, ParameterChoice], ...]
    """`by_parameter` of each stage."""

    def of(self, path: str) -> str:
        """Returns the form of a parameter by its module path; stages that have it agree."""
        for said in self.said:
            choice = choice_of(said, path)
            if choice is not None and choice.update:
                return choice.update
        return self.usual

    def names(self) -> tuple[str, ...]:
        """Returns all forms, in one order on all ranks."""
        own = {choice.update for said in self.said for choice in said.values()} - {""}
        return tuple(sorted(own | {self.usual}))

    def make(
        self, named: Sequence[tuple[str, nn.Parameter]], lr: float | None, *, fused: bool
    ) -> torch.optim.Optimizer:
        """Makes one optimizer over parameters, given with their paths; each form has a group, which
        may be empty."""
        found: dict[str, list[nn.Parameter]] = {name: [] for name in self.names()}
        for path, parameter in named:
            found[self.of(path)].append(parameter)
        return JoinedOptimizers([update(n).make(own, lr, fused=fused) for n, own in found.items()])


def planned_choice(plan: Plan) -> str | PlannedUpdates:
    """Returns what steps a plan's parameters where the user brings no optimizer."""
    said = tuple(stage.by_parameter for stage in plan.stages)
    if any(choice.update for own in said for choice in own.values()):
        return PlannedUpdates(plan.optimizer, said)
    return plan.optimizer


def check_planned(plan: Plan, given: object | None) -> None:
    """PlanError if the user brings an optimizer, and the plan says how some parameters are
    stepped."""
    if given and isinstance(planned_choice(plan), PlannedUpdates):
        raise PlanError(
            "the plan says how single parameters are stepped (by_parameter ... update): pass no "
            "optimizer, or a plan without that"
        )


class JoinedOptimizers(torch.optim.Optimizer):
    """Optimizers over different parameters. Groups and states are the members' own."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        """`members`: each with one group or more, which may be empty."""
        self.members = tuple(members)
        groups = [group for member in self.members for group in member.param_groups]
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups  # not copies: who sets a rate in one sets the member's
        for member in self.members:
            self.state.update(member.state)
            member.state = self.state

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Steps all; `closure` is for none of them."""
        assert closure is None, "no form asks for a closure"
        for member in self.members:
            member.step()
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes groups and states, and gives the members theirs."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for member in self.members:
            member.param_groups = [next(groups) for _ in member.param_groups]
            member.state = self.state


def as_one(
    optimizers: Sequence[torch.optim.Optimizer],
) -> JoinedOptimizers:
    """Returns a user's optimizers over different parameters as one. PlanError if two step the same
    parameter."""
    seen: set[int] = set()
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise PlanError(f"a list of optimizers has a {type(one).__name__} in it")
        own = {id(p) for group in one.param_groups for p in group["params"]}
        if seen & own:
            raise PlanError(
                f"{type(one).__name__} steps a parameter that an optimizer before it in the list "
                "steps too: give each parameter to one of them"
            )
        seen |= own
    return JoinedOptimizers(optimizers)


def members_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yields the optimizers that step a job's parameters."""
    return (
        chain(optimizer.members) if isinstance(optimizer, JoinedOptimizers) else chain([optimizer])
    )
