"""Torch's Adam, AdamW and SGD with a step that is one kernel, for all tensors of a dtype."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.ir.kernels import bucket_update as kernel
from meshwright.runtime.gradsync.base import GradientSync

Group = dict[str, Any]
_Key = tuple[object, ...]


class Stepped:
    """What the optimizers share: how gradients are scaled, and the tables of tensors' pieces."""

    factor: Tensor | None = None
    """Gradients are scaled by it as they are read: what clipping left."""
    over: frozenset[int] = frozenset()
    """Parameters, by id, whose new values also go where their gradients lie."""

    def write_over(self: Any, syncs: Iterable[GradientSync]) -> None:
        """New values that ranks gather are to lie packed for that, where their gradients lay."""
        stepped = {id(p) for group in self.param_groups for p in group["params"]}
        self.over = frozenset(id(p) for sync in syncs for p in sync.over_gradients(stepped))

    def _tables(self, like: Sequence[Tensor]) -> Tensor:
        known: dict[_Key, Tensor] = self.__dict__.setdefault("_known_tables", {})
        key = like[0].device, *(x.numel() for x in like)
        if key not in known:
            known[key] = kernel.table([x.numel() for x in like]).to(like[0].device)
        return known[key]

    def _scale(self, like: Tensor) -> Tensor:
        if self.factor is None:
            return torch.ones((), device=like.device)
        return self.factor.to(like.device)


def _together(params: Sequence[Tensor], more: Callable[[Tensor], object]) -> list[list[Tensor]]:
    """Tensors with gradients, those of equal types that `more` says the same of at a time."""
    found: dict[_Key, list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            found.setdefault((p.dtype, p.grad.dtype, p.device, more(p)), []).append(p)
    return list(found.values())


def _gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad.contiguous() for p in params if p.grad is not None]


class _AdamStep(Stepped):
    @torch.no_grad()
    def step(self: Any, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    self.state[p] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.zeros_like(p, memory_format=torch.contiguous_format),
                        "exp_avg_sq": torch.zeros_like(p, memory_format=torch.contiguous_format),
                    }
            # Those that had no gradient in a step are behind the others.
            for params in _together(
                group["params"], lambda p: (float(self.state[p]["step"]), id(p) in self.over)
            ):
                self._step_together(params, group, id(params[0]) in self.over)

    def _step_together(self: Any, params: list[Tensor], group: Group, over: bool) -> None:
        states = [self.state[p] for p in params]
        for state in states:
            state["step"] += 1
        numbers = kernel.adam_numbers(
            int(states[0]["step"]), float(group["lr"]), group["betas"], group["eps"],
            group["weight_decay"], bool(group.get("decoupled_weight_decay")),
            -1.0 if group["maximize"] else 1.0,
        )  # fmt: skip
        means, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
        rows, scale = self._tables(params), self._scale(params[0])
        kernel.adam_update(params, _gradients(params), means, squares, rows, numbers, scale, over)


class Adam(_AdamStep, torch.optim.Adam):  # type: ignore[misc]
    """Torch's Adam by our kernel."""


class AdamW(_AdamStep, torch.optim.AdamW):  # type: ignore[misc]
    """Torch's AdamW by our kernel."""


class SGD(Stepped, torch.optim.SGD):
    """Torch's SGD by our kernel."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for params in _together(
                group["params"], lambda p: (self._is_first(p), id(p) in self.over)
            ):
                self._step_together(params, group, id(params[0]) in self.over)

    def _is_first(self, p: Tensor) -> bool:
        return self.state[p].get("momentum_buffer") is None

    def _step_together(self, params: list[Tensor], group: Group, over: bool) -> None:
        first, buffers = self._is_first(params[0]), []
        if group["momentum"]:
            for p in params if first else ():
                zeros = torch.zeros_like(p, memory_format=torch.contiguous_format)
                self.state[p]["momentum_buffer"] = zeros
            buffers = [self.state[p]["momentum_buffer"] for p in params]
        numbers = kernel.sgd_numbers(
            first, float(group["lr"]), group["momentum"], group["dampening"],
            group["weight_decay"], group["nesterov"], -1.0 if group["maximize"] else 1.0,
        )  # fmt: skip
        rows, scale = self._tables(params), self._scale(params[0])
        kernel.sgd_update(params, _gradients(params), buffers, rows, numbers, scale, over)


OURS: dict[type[torch.optim.Optimizer], Callable[[Any], torch.optim.Optimizer]] = {
    torch.optim.Adam: Adam, torch.optim.AdamW: AdamW, torch.optim.SGD: SGD,
}  # fmt: skip
_REFUSED = ("amsgrad", "differentiable")


def stepped_by_kernel(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same kind, groups and settings; PlanError if the kernel has none such."""
    without = "; make the plan without the kernel bucket_update, or with another optimizer"
    kind = OURS.get(type(made))
    if kind is None:
        known = ", ".join(torchs.__name__ for torchs in OURS)
        raise PlanError(
            f"the plan has the kernel bucket_update, which steps {known}, not "
            f"{type(made).__name__}{without}"
        )
    for name in _REFUSED:
        if any(group.get(name) for group in made.param_groups):
            raise PlanError(
                f"the plan has the kernel bucket_update, which has no {name}: "
                f"{type(made).__name__} is given {name}=True{without}"
            )
    plain = {"fused": None, "foreach": None, "capturable": False}
    groups = [{k: plain.get(k, v) for k, v in group.items()} for group in made.param_groups]
    found = kind(groups)
    found.defaults.update({k: v for k, v in made.defaults.items() if k not in plain})
    found.state.update(made.state)
    return found
