"""Steps of an optimizer that come after its own step: of parameters whose gradients come late, and
of one parameter in two parts."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.runtime.step.updates import FormOptimizer


class LaterUpdate:
    """Steps parameters as the optimizer is set now, whatever it is set to by then."""

    def __init__(self, optimizer: torch.optim.Optimizer, scale: Tensor | float) -> None:
        """`scale`: by which gradients were multiplied before the step."""
        self._optimizer = optimizer
        self._then = [_settings(group) for group in optimizer.param_groups]
        self._own = optimizer.factor if isinstance(optimizer, FormOptimizer) else None
        # Such an optimizer scales what it reads, and is told the factor.
        self._scale = 1.0 if isinstance(optimizer, FormOptimizer) else scale

    def __call__(self, parameters: Sequence[Tensor]) -> None:
        with self._as_then(parameters):
            self._optimizer.step()

    @contextmanager
    def _as_then(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        wanted = {id(p) for p in parameters}
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        for group, then in zip(groups, self._then, strict=True):
            group.update(then, params=[p for p in group["params"] if id(p) in wanted])
        if isinstance(self._optimizer, FormOptimizer):
            self._optimizer.factor = self._own
        try:
            yield
        finally:
            for group, before in zip(groups, now, strict=True):
                group.update(before)

    @torch.no_grad()
    def in_parts(
        self, parameter: Tensor, rows: Tensor, gradient: Tensor
    ) -> Callable[[Tensor], None]:
        """As `forms.running.LaterStep` says. PlanError if the optimizer keeps nothing yet of a
        parameter of which it makes something for these rows."""
        state, whole = self._optimizer.state[parameter], parameter.data
        by_row = {key: x for key, x in state.items() if is_like(x, whole)}
        before = {key: copy.deepcopy(x) for key, x in state.items() if key not in by_row}
        if not len(rows):
            return lambda late: self._others(parameter, rows, late, before)
        parameter.data = whole.index_select(0, rows)
        for key, x in by_row.items():
            state[key] = x.index_select(0, rows)
        try:
            self._step(parameter, gradient)
            if made := [k for k in state.keys() - by_row.keys() if is_like(state[k], whole)]:
                raise PlanError(
                    f"{type(self._optimizer).__name__} has no {made[0]} before its first step: "
                    "step a parameter whole before it is stepped in parts"
                )
            whole.index_copy_(0, rows, parameter.data)
            for key, x in by_row.items():
                x.index_copy_(0, rows, state[key])
        finally:
            parameter.data = whole
            state.update(by_row)
        return lambda late: self._others(parameter, rows, late, before)

    @torch.no_grad()
    def _others(
        self, parameter: Tensor, rows: Tensor, gradient: Tensor, before: dict[str, Any]
    ) -> None:
        """Steps all rows, and takes back what that made of those that were stepped already."""
        state, whole = self._optimizer.state[parameter], parameter.data
        stepped = {key: x.index_select(0, rows) for key, x in state.items() if is_like(x, whole)}
        own = whole.index_select(0, rows)
        state.update(before)
        self._step(parameter, gradient)
        whole.index_copy_(0, rows, own)
        for key, x in stepped.items():
            state[key].index_copy_(0, rows, x)

    def _step(self, parameter: Tensor, gradient: Tensor) -> None:
        parameter.grad = gradient if self._scale == 1.0 else gradient * self._scale
        self([parameter])
        parameter.grad = None


def is_like(x: object, whole: Tensor) -> bool:
    """Tells whether a state has a value for each of the parameter's; a count of steps is one
    number."""
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape[1:] == whole.shape[1:]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Of a group of parameters, as they are now."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in group.items() if key != "params"
    }  # fmt: skip
