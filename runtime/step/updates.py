"""Optimizers of torch's with a step that is one kernel, for all tensors of a dtype."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from meshwright.forms.running import SyncRun
from meshwright.forms.updates import KernelStep, update, with_kernel
from meshwright.ir.errors import PlanError
from meshwright.ir.kernels import bucket_update as kernel
from meshwright.ir.pinned import sent

Group = dict[str, Any]
_Key = tuple[object, ...]


class FormOptimizer:
    """An optimizer of torch's whose step is a kernel, as its form says (`forms.updates`)."""

    rule: ClassVar[KernelStep]
    factor: Tensor | None = None
    """Gradients are scaled by it as they are read: what clipping left."""
    over: frozenset[int] = frozenset()
    """Parameters, by id, whose new values also go where their gradients lie."""

    def write_over(self: Any, syncs: Iterable[SyncRun]) -> None:
        """New values that ranks gather are to lie packed for that, where their gradients lay."""
        stepped = {id(p) for group in self.param_groups for p in group["params"]}
        self.over = frozenset(id(p) for sync in syncs for p in sync.over_gradients(stepped))

    def _tables(self, like: Sequence[Tensor]) -> Tensor:
        known: dict[_Key, Tensor] = self.__dict__.setdefault("_known_tables", {})
        key = like[0].device, *(x.numel() for x in like)
        if key not in known:
            known[key] = sent(kernel.table([x.numel() for x in like]), like[0].device)
        return known[key]

    def _scale(self, like: Tensor) -> Tensor:
        if self.factor is None:
            return torch.ones((), device=like.device)
        return self.factor.to(like.device)

    @torch.no_grad()
    def step(self: Any, closure: None = None) -> None:
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            begun = [(self.rule.begin(p, self.state[p], group), id(p) in self.over) for p in given]
            for (said, _), params in _together(given, begun):
                self._step_together(params, group, said)

    def _step_together(self: Any, params: list[Tensor], group: Group, begun: object) -> None:
        states = [self.state[p] for p in params]
        steps = kernel.STEPS[self.rule.kernel]
        numbers = steps.numbers(**self.rule.settings(begun, states, group))
        buffers = [
            [state[name] for state in states if state.get(name) is not None]
            for name in self.rule.buffers
        ]
        rows, scale = self._tables(params), self._scale(params[0])
        steps.update(
            params, _gradients(params), *buffers, rows, numbers, scale, id(params[0]) in self.over
        )


def _together(
    params: Sequence[Tensor], said: Sequence[tuple[object, bool]]
) -> Iterator[tuple[tuple[object, bool], list[Tensor]]]:
    """Tensors with gradients, those of equal types that the same is said of at a time."""
    found: dict[_Key, tuple[tuple[object, bool], list[Tensor]]] = {}
    for p, own in zip(params, said, strict=True):
        assert p.grad is not None
        found.setdefault((p.dtype, p.grad.dtype, p.device, own), (own, []))[1].append(p)
    yield from found.values()


def _gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad.contiguous() for p in params if p.grad is not None]


@cache
def _classes() -> dict[type, Any]:
    """Classes of the same names with the step of a kernel, by those of torch's."""
    forms = {update(name).kind: update(name).step for name in with_kernel()}
    return {kind: type(kind.__name__, (FormOptimizer, kind), {"rule": rule})
            for kind, rule in forms.items()}  # fmt: skip


def stepped_by_kernel(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same kind, groups and settings; PlanError if the kernel has none such."""
    without = "; make the plan without the kernel bucket_update, or with another optimizer"
    kind = _classes().get(type(made))
    if kind is None:
        known = ", ".join(torchs.__name__ for torchs in _classes())
        raise PlanError(
            f"the plan has the kernel bucket_update, which steps {known}, not "
            f"{type(made).__name__}{without}"
        )
    for name in kind.rule.refused:
        if any(group.get(name) for group in made.param_groups):
            raise PlanError(
                f"the plan has the kernel bucket_update, which has no {name}: "
                f"{type(made).__name__} is given {name}=True{without}"
            )
    plain = {"fused": None, "foreach": None, "capturable": False}
    groups = [{k: plain.get(k, v) for k, v in group.items()} for group in made.param_groups]
    found: torch.optim.Optimizer = kind(groups)
    found.defaults.update({k: v for k, v in made.defaults.items() if k not in plain})
    found.state.update(made.state)
    return found
