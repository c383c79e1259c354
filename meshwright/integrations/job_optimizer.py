"""A job's optimizer for loops that insist on stepping one themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.runtime.job.job import Job


class JobOptimizer(torch.optim.Optimizer):
    """Stands before the optimizer of a job: a step applies what the job has accumulated.

    Parameter groups are the job's own, so learning-rate schedules act on it.
    """

    def __init__(self, job: Job) -> None:
        # Not the base's: groups and state are those of the job's optimizer.
        self.job = job
        self.defaults = job.optimizer.defaults
        self.accumulated = 0
        """Batches since the last step."""
        self.divisor: int | None = None
        """What the sum of their gradients is divided by; None: how many they are."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.job.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.job.optimizer.state

    def accumulate(self, batch: Any, next_batch: Any | None = None) -> Tensor:
        """Adds a global batch's gradients; its loss. `next_batch`: that of the next call."""
        self.accumulated += 1
        return self.job.accumulate(batch, next_batch=next_batch)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the mean of the batches' gradients, or their sum over `divisor`."""
        result = None if closure is None else closure()
        self.job.apply(1.0 / (self.divisor or max(1, self.accumulated)))
        self.accumulated = 0
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The job clears gradients itself, when the next step begins."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the job's own checkpoint has it."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The job's own checkpoint has it."""

    def __repr__(self) -> str:
        return f"JobOptimizer({self.job.optimizer!r})"
