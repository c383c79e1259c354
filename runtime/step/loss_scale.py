"""Losses are scaled before their backward, so that small gradients do not vanish in float16."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshwright.forms.running import Held
from meshwright.runtime.step.updates import FormOptimizer

_FIRST, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""Those of torch.amp.GradScaler."""
LEAST, MOST = 2.0**-10, 2.0**40


class LossScale:
    """Grows while gradients are finite, and shrinks, and the step is left out, where they are not
    (Micikevicius et al. 2018). It lies on the device, so that the host need not wait to know it."""

    def __init__(
        self, device: torch.device, value: float = _FIRST, good: int = 0, skipped: int = 0
    ) -> None:
        """`good`: steps since it last changed; `skipped`: steps that were left out."""
        self.scale = torch.full((), value, dtype=torch.float32, device=device)
        self._good = torch.full((), good, dtype=torch.int64, device=device)
        self._skipped = torch.full((), skipped, dtype=torch.int64, device=device)

    def took(self, overflow: Tensor) -> None:
        """Notes a step that was left out if `overflow`, a float on the device, is not 0."""
        wrong = overflow != 0
        good = torch.where(wrong, 0, self._good + 1)
        grown = good >= _INTERVAL
        factor = torch.where(wrong, _BACKOFF, torch.where(grown, _GROWTH, 1.0))
        self.scale.mul_(factor).clamp_(LEAST, MOST)
        self._good.copy_(torch.where(grown, 0, good))
        self._skipped += wrong

    @property
    def value(self) -> float:
        """Waits for the device."""
        return float(self.scale)

    @value.setter
    def value(self, value: float) -> None:
        self.scale.fill_(value)

    @property
    def skipped(self) -> int:
        """Counts the steps that were left out; waits for the device."""
        return int(self._skipped)

    def state(self) -> dict[str, Any]:
        """Gives what a checkpoint has of it: the keywords to make it again."""
        return {"value": self.value, "good": int(self._good), "skipped": self.skipped}


def overflow_of(held: Iterable[Held], device: torch.device) -> Tensor:
    """1.0 on the device if a gradient of this rank is not finite, else 0.0."""
    found: list[Tensor] = [h.tensor.grad for h in held if h.tensor.grad is not None]
    wrong = torch.zeros((), dtype=torch.float32, device=device)
    if found:
        norms = torch._foreach_norm([x for x in found if x.numel()], float("inf"))
        wrong = (~torch.stack([norm.to(device) for norm in norms]).isfinite()).any().float()
    return wrong


def leaves_out(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step does nothing if the device says so, as those of torch in one kernel do. The
    host must look before it lets others step."""
    told = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(told) and not isinstance(optimizer, FormOptimizer) and not _makes_sums(optimizer)


def _makes_sums(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step makes sums of gradients (momentum), which torch's fused SGD leaves without
    values where the step is left out."""
    return any(
        optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups if group.get("momentum")
        for p in group["params"] if p.grad is not None
    )  # fmt: skip


@contextmanager
def unless(optimizer: Any, overflow: Tensor | None) -> Iterator[None]:
    """Inside, the optimizer's step does nothing if `overflow`, on the device, is not 0: told as
    torch.amp.GradScaler tells it. What is not told so steps: the host has looked."""
    if overflow is None or not leaves_out(optimizer):
        yield
        return
    optimizer.found_inf = overflow
    try:
        yield
    finally:
        del optimizer.found_inf
