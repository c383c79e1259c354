"""A LightningModule's own step around a job: its model is called, and the job answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.errors import PlanError
from meshwright.ir.torch_private import PLAIN_RESULTS


class NoOutput(PlanError, AttributeError):
    """A step asks for what a job does not give."""


class JobLoss(torch.Tensor):
    """The loss of a global batch, in the place of what the model returns."""

    __torch_function__ = PLAIN_RESULTS

    @property
    def loss(self) -> Tensor:
        return self

    def __getitem__(self, key: Any) -> Any:
        if key not in ("loss", 0):
            raise _only_loss(key)
        return self

    def __iter__(self) -> Iterator[Any]:
        yield self
        raise _only_loss("more")

    def __getattr__(self, name: str) -> Any:
        raise _only_loss(name)


def _only_loss(asked: object) -> NoOutput:
    return NoOutput(
        f"the step asks for {asked!r} of what the model returns, and a job gives the loss only"
    )


class StandIn(nn.Module):
    """In the model's place while a step of the LightningModule runs."""

    def __init__(self, model: nn.Module, act: Callable[[Any], Tensor], own_loss: bool) -> None:
        super().__init__()
        vars(self)["real"], vars(self)["act"], vars(self)["own_loss"] = model, act, own_loss

    def forward(self, *args: Any, **kwargs: Any) -> JobLoss:
        if not self.own_loss:
            raise PlanError(
                "with JobStrategy(loss_fn=...) the job computes the loss: write "
                "`loss = job_step(self, batch)` where the step calls the model and the loss"
            )
        if args and kwargs:
            raise PlanError("the step calls the model with both positions and names: use one")
        batch: Any = kwargs or (args[0] if len(args) == 1 else args)
        loss: JobLoss = self.act(batch).as_subclass(JobLoss)
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["real"], name)


@contextmanager
def standing_in(module: nn.Module, attribute: str, other: nn.Module) -> Iterator[None]:
    """Inside, the module's attribute is the other one."""
    real = module._modules[attribute]
    module._modules[attribute] = other
    try:
        yield
    finally:
        module._modules[attribute] = real


def check_result(result: Any, losses: list[Tensor], kind: str) -> None:
    """PlanError unless a training step took one step of the job and returns its loss."""
    if len(losses) != 1:
        raise PlanError(
            f"{kind}.training_step calls its model {len(losses)} times, and a step of a job is one "
            "call with a global batch"
        )
    given = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(given, Tensor) or not (
        given.data_ptr() == losses[0].data_ptr() or torch.equal(given.detach().view(()), losses[0])
    ):
        raise PlanError(
            f"{kind}.training_step returns {_shown(given)}, and the loss of the model is "
            f"{float(losses[0]):g}: gradients are those of the model's own loss, so make what it "
            "adds part of the model's forward, and a plan for that model"
        )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() == 1:
        return f"{float(value):g}"
    return type(value).__name__
