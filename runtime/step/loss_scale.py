"""Losses are scaled before their backward, so that small gradients do not vanish in float16."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.forms.running import Held

_FIRST, _GROWTH, _BACKOFF, _INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""Those of torch.amp.GradScaler."""
LEAST, MOST = 2.0**-10, 2.0**40


@dataclass(slots=True)
class LossScale:
    """Grows while gradients are finite, and shrinks, and the step is left out, where they are not
    (Micikevicius et al. 2018)."""

    value: float = _FIRST
    good: int = 0
    """Steps since it last changed."""
    skipped: int = 0
    """Steps that were left out."""

    def took(self, *, finite: bool) -> None:
        """Notes a step."""
        if not finite:
            self.value, self.good = max(LEAST, self.value * _BACKOFF), 0
            self.skipped += 1
            return
        self.good += 1
        if self.good >= _INTERVAL:
            self.value, self.good = min(MOST, self.value * _GROWTH), 0


def all_finite(held: Iterable[Held], device: torch.device, world_size: int) -> bool:
    """Whether all gradients of the job are finite; the same on every rank, all of which call it."""
    found: list[Tensor] = [h.tensor.grad for h in held if h.tensor.grad is not None]
    wrong = torch.zeros((), dtype=torch.float32, device=device)
    if found:
        norms = torch._foreach_norm([x for x in found if x.numel()], float("inf"))
        wrong = (~torch.stack([norm.to(device) for norm in norms]).isfinite()).any().float()
    if world_size > 1:
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
    return not bool(wrong)
