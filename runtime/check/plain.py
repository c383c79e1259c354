"""A step of the model in plain PyTorch, on a copy of it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.forms.updates import update
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.precision import CopyTypes
from meshwright.ir.torch_private import copy_hooks
from meshwright.ir.trace.loss_module import LossFn, TrainingStep
from meshwright.ir.trace.module_numbers import wide_parameters
from meshwright.ir.trace.still import Still, Unsettled
from meshwright.runtime.check.difference import StepOutcome
from meshwright.runtime.step.optimizer import OptimizerChoice
from meshwright.runtime.step.planned_updates import PlannedUpdates

FAILURES = (
    RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError,
)  # fmt: skip
"""What a user's module raises on data that it does not take, or when it cannot be copied."""


class Uncheckable(MeshwrightError):
    """Plain PyTorch cannot take the step that the job is to be compared with."""


def copied(model: nn.Module) -> nn.Module:
    """A copy that trains, with the hooks of the parameters, which `deepcopy` drops."""
    try:
        made = copy.deepcopy(model)
    except FAILURES as error:
        raise Uncheckable(f"the model cannot be copied ({_first_line(error)})") from error
    pairs = zip(model.parameters(), made.parameters(), strict=True)
    for source, target in pairs:
        copy_hooks(source, target)
        target.grad = None
    return made if made.training else made.train()


def plain_step(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Mapping[str, Tensor],
    parts: int = 1,
    copies: CopyTypes | None = None,
) -> StepOutcome:
    """Forward and backward, random numbers as in `ir.trace.still`. The buffers of the module
    change. `copies`: what its parameters are in place of.

    With `parts`, micro-batch by micro-batch: their mean, as batch-norm has it by contract.
    """
    step = TrainingStep(model, loss_fn, tuple(batch), copies)
    model.zero_grad(set_to_none=True)
    total = 0.0
    with _computing():
        for part in zip(*(x.chunk(parts) if x.ndim else [x] * parts for x in batch.values())):  # noqa: B905
            # A forward may write into its inputs.
            loss = _called(step, [x.clone() for x in part]) / parts
            _check_leaves(loss, model)
            _backward(loss)
            total += float(loss.detach())
    return StepOutcome(
        total,
        {name: _kept(p.grad) for name, p in model.named_parameters() if p.requires_grad},
        {name: b.detach().cpu().clone() for name, b in model.named_buffers()},
    )


def _called(step: TrainingStep, tensors: Sequence[Tensor]) -> Tensor:
    try:
        loss: Tensor = step(*tensors)
    except Unsettled as error:
        raise Uncheckable(str(error)) from error
    except FAILURES as error:
        message = f"plain PyTorch does not take the data of the check ({_first_line(error)})"
        raise Uncheckable(message) from error
    return loss


def _check_leaves(loss: Tensor, model: nn.Module) -> None:
    """Uncheckable if the step trains tensors that the copy does not have: those of the user's own
    module, which a loss function or a hook reads beside the copy."""
    own = {id(p) for p in model.parameters()}
    seen: set[Any] = set()
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            raise Uncheckable(
                "a loss function or a hook reads weights of the user's own module, which a copy of "
                "the module does not follow"
            )
        left.extend(following for following, _ in node.next_functions)


def _backward(loss: Tensor) -> None:
    try:
        torch.autograd.backward(loss)
    except FAILURES as error:
        raise Uncheckable(f"the backward of plain PyTorch fails ({_first_line(error)})") from error


def _kept(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to_dense().cpu().clone()


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextmanager
def _computing() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(Still())
        if torch.cuda.is_available():
            # Kernels of attention draw their own dropout.
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@dataclass(frozen=True, eq=False)
class Reference:
    """A whole copy of the model with the user's optimizer over it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    copies: CopyTypes | None = None
    """What the job's blocks read in place of parameters."""

    @classmethod
    def of(
        cls, model: nn.Module, choice: OptimizerChoice, lr: float | None, device: torch.device,
        copies: CopyTypes | None = None,
    ) -> "Reference":  # fmt: skip
        """Calls `choice` once more, if it is a callable."""
        made = copied(model).to(device)
        return cls(made, _over_copy(choice, lr, model, made), copies)

    def run(
        self, loss_fn: LossFn | None, batch: Mapping[str, Tensor], parts: int = 1
    ) -> StepOutcome:
        """A step's gradients. Buffers are put back."""
        before = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        device = next(self.model.parameters()).device
        given = {n: x.to(device) for n, x in batch.items()}
        if self.copies is None:
            found = plain_step(self.model, loss_fn, given, parts)
        else:
            wide = plain_step(self.model, loss_fn, given, parts)
            self._put_back(before)
            with self._as_read(self.copies) as model:
                found = plain_step(model, loss_fn, given, parts, self.copies)
            found = replace(found, rounded=_apart(found, wide))
        self._put_back(before)
        return found

    def _put_back(self, before: Mapping[str, Tensor]) -> None:
        """Buffers have the values of before."""
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                if name in before and before[name].shape == b.shape:
                    b.copy_(before[name])

    @contextmanager
    def _as_read(self, copies: CopyTypes) -> Iterator[nn.Module]:
        """Inside, the model's parameters are what blocks read of them."""
        wide, known = wide_parameters(self.model, copies), {}
        for p in self.model.parameters():
            if p.is_floating_point() and id(p) not in wide:
                known[p] = p.data
                p.data, p.grad = p.data.to(copies.read), None
        try:
            yield self.model
        finally:
            for p, data in known.items():
                p.grad = None
                p.data = data

    def parameters(self) -> dict[str, Tensor]:
        """As they are, on the CPU."""
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def change(self, change: Callable[[str, Tensor], Tensor]) -> None:
        """Each parameter becomes what `change(path, value)` gives."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(change(name, p.detach()))

    def stepped(
        self, gradients: Mapping[str, Tensor | None], limit: float | None,
        kept: Mapping[str, torch.dtype],
    ) -> dict[str, Tensor]:  # fmt: skip
        """Parameters, on the CPU, after a step of the optimizer with these gradients, clipped to
        the limit. `kept`: dtypes in which the job steps them, which are wider than those of a model
        in two-byte numbers: those that differ so are as before afterwards."""
        before = {}
        for name, p in self.model.named_parameters():
            given, p.grad = gradients.get(name), None
            if p.requires_grad and kept.get(name, p.dtype) != p.dtype:
                before[p], p.data = p.data, p.data.to(kept[name])
                state = self.optimizer.state.get(p, {})
                state.update({k: x.to(p.dtype) for k, x in state.items() if _is_like(x, p)})
            p.grad = None if given is None else given.to(p.device, p.dtype)
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        never_still(self.optimizer)
        self.optimizer.step()
        found = self.parameters()
        for p, data in before.items():
            p.data, p.grad = data, None
        return found


def _is_like(x: Any, p: Tensor) -> bool:
    """Whether it is state of each element of a parameter."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.shape == p.shape


def _apart(narrow: StepOutcome, wide: StepOutcome) -> dict[str, float]:
    """How far the gradients of two steps lie apart, at most."""
    pairs = ((name, g, wide.gradients.get(name)) for name, g in narrow.gradients.items())
    return {
        name: float((a.to(b.dtype) - b).abs().max())
        for name, a, b in pairs if a is not None and b is not None and a.numel()
    }  # fmt: skip


def never_still(optimizer: torch.optim.Optimizer) -> None:
    """A learning rate of zero, as warm-up begins, would show nothing."""
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float | int) and not group["lr"]:
            group["lr"] = 1e-3


def _over_copy(
    choice: OptimizerChoice, lr: float | None, model: nn.Module, made: nn.Module
) -> torch.optim.Optimizer:
    if isinstance(choice, torch.optim.Optimizer):
        memo: dict[int, Any] = {
            id(p): q for p, q in zip(model.parameters(), made.parameters(), strict=True)
        }
        twin: torch.optim.Optimizer = object.__new__(type(choice))
        memo[id(choice)] = twin
        # A scheduler leaves its own `step` on an optimizer.
        own = {k: v for k, v in vars(choice).items() if k != "step"}
        try:
            vars(twin).update(copy.deepcopy(own, memo))
        except FAILURES as error:
            message = f"the optimizer cannot be copied ({_first_line(error)})"
            raise Uncheckable(message) from error
        return twin
    named = [(name, p) for name, p in made.named_parameters() if p.requires_grad]
    if isinstance(choice, PlannedUpdates):
        return choice.make(named, lr, fused=False)
    trained = [p for _, p in named]
    if isinstance(choice, str):
        return update(choice).make(trained, lr, fused=False)
    return choice([{"params": trained}])
