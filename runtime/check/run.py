"""What `compile` compares with plain PyTorch before a job trains, and what it says of it."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch
from torch import nn

from meshwright.forms.sync import is_exact
from meshwright.ir.comm.by_store import from_first
from meshwright.ir.errors import CheckFailed, MeshwrightError
from meshwright.ir.graph.bags import given_bags
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.parameters import views_of
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import copies_of
from meshwright.ir.trace.loss_module import Batch, LossFn, flatten_batch, nested_batch
from meshwright.ir.trace.retrace import check_repeats
from meshwright.runtime.check.amplified import told
from meshwright.runtime.check.data import batch_of, first_samples
from meshwright.runtime.check.difference import TensorDifference
from meshwright.runtime.check.model import SAMPLES, ModelCheck, check_model, repeats
from meshwright.runtime.check.plain import Reference, Uncheckable
from meshwright.runtime.check.undisturbed import give_back, own_memory, same_draws
from meshwright.runtime.job.weights import model_tensors
from meshwright.runtime.step.optimizer import OptimizerChoice
from meshwright.runtime.world.world import rank

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job

T = TypeVar("T")
LIMIT_S = 60.0
"""What is predicted to take longer is left out, and said."""
FLOPS_PER_S = {"cpu": 2e10, "cuda": 2e13}
"""A careful guess of what one device does."""
_NOT_SEEN = (
    "The trace has not seen all that the model does (hooks, state in Python): please report it "
    "with the model. To train nevertheless, pass check=False"
)
_SHORT_S, _SHARE = 5.0, 0.6
"""A model whose few samples take longer is cut; of free memory, so much may be taken."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was compared with plain PyTorch, and what could not be."""

    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    """What, and why."""
    seconds: float

    def __str__(self) -> str:
        done = "; ".join(self.checked) or "nothing"
        left = "".join(f"; not checked: {what}" for what in self.unchecked)
        return f"checked in {self.seconds:.1f} s: {done}{left}"


def wanted(check: bool | None) -> bool:
    """Whether to check: as the user says, else as the environment does; by default, yes."""
    return check if check is not None else os.environ.get("MESHWRIGHT_CHECK", "1") != "0"


@dataclass(eq=False)
class Checking:
    """A check that is prepared before the job is made, as the optimizer may be made only once."""

    model: nn.Module
    plan: Plan
    graph: Graph
    loss_fn: LossFn | None
    given: Batch | None
    device: torch.device
    reference: Reference | None = None
    """On rank 0, unless the plan cannot be checked."""
    why_not: str = ""
    """The plan cannot be checked; empty: it can. The same on every rank."""
    seconds: float = 0.0
    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, graph: Graph, loss_fn: LossFn | None,
        given: Batch | None, choice: OptimizerChoice, lr: float | None, device: torch.device,
    ) -> "Checking":  # fmt: skip
        """What needs no job. Every rank calls it, before it makes its optimizer; CheckFailed on
        all of them if something differs."""
        start = time.perf_counter()
        made = cls(model, plan, graph, loss_fn, given, device)
        with same_draws(device), own_memory(device):
            made._repeats()
            made._refer(choice, lr)
            if made.why_not:
                made._model()
        made.seconds = time.perf_counter() - start
        return made

    def run(self, job: "Job") -> SelfCheck:
        """The rest. Every rank calls it; CheckFailed on all of them if something differs."""
        start = time.perf_counter()
        if not self.why_not:
            with same_draws(self.device), own_memory(self.device):
                self._plan(job)
        self.reference = None
        give_back(job)
        self.seconds += time.perf_counter() - start
        if self.why_not:
            self.unchecked.append(f"the plan ({self.why_not})")
        found = SelfCheck(tuple(self.checked), tuple(self.unchecked), self.seconds)
        if rank() == 0:
            print(f"meshwright: {found}", file=sys.stderr, flush=True)
        return found

    def _refer(self, choice: OptimizerChoice, lr: float | None) -> None:
        """Makes the reference, on rank 0."""
        if rank() == 0:
            self.why_not = _why_not(self.model, self.plan, self.graph, self.device)
            if not self.why_not:
                try:
                    self.reference = Reference.of(
                        self.model, choice, lr, self.device, copies_of(self.plan.precision)
                    )
                except Uncheckable as error:
                    self.why_not = str(error)
        self.why_not = from_first(self.why_not)

    def _batch(self, seed: int = 0) -> dict[str, torch.Tensor]:
        given = None if self.given is None else flatten_batch(self.given)
        with torch.device("cpu"):
            return batch_of(self.plan, self.graph, given, seed=seed)

    def _repeats(self) -> None:
        """Whether the module does the same twice: on fake tensors, and on a few samples."""
        inputs = nested_batch(self._batch()) if self.given is None else self.given
        size = self.plan.global_batch_size

        def twice() -> TensorDifference | str | None:
            check_repeats(self.model, inputs, self.loss_fn, self.graph, global_batch_size=size)
            why = self._too_much()
            batch = first_samples(self._batch(), SAMPLES, size, given_bags(self.graph))
            try:
                return why or repeats(self.model, self.loss_fn, batch, self.graph)
            except Uncheckable as error:
                return str(error)

        found = on_first(twice)
        self.checked.append("a second trace")
        if isinstance(found, str):
            self.unchecked.append(f"that a step repeats itself ({found})")
        elif found is not None:
            raise CheckFailed(
                f"a second step of the model on the same data differs from the first: {found}. The "
                "model keeps state in Python (a counter, a list, a tensor that is no buffer), or "
                "draws numbers that are not torch's; a job would repeat the first step for ever. "
                "Keep state in registered buffers, or train without the check: check=False"
            )

    def _too_much(self) -> str:
        """Why a few samples are not run on the whole model; empty if they are."""
        if any(x.is_meta for x in model_tensors(self.model).values()):
            return "the model is on the meta device"
        seconds = 2 * _seconds(self.graph, self.device) * self._few
        if seconds > LIMIT_S:
            return f"it would take about {seconds:.0f} s, the limit is {LIMIT_S:.0f} s"
        return "" if _fits(self.graph, self._few, self.device) else "there is no room for a copy"

    @property
    def _few(self) -> float:
        """The share of a batch that a few samples are."""
        return min(1.0, SAMPLES / self.plan.global_batch_size)

    def _plan(self, job: "Job") -> None:
        from meshwright.runtime.check.plan import check_plan, own_difference

        reference, batch = self.reference, self._batch()
        own: TensorDifference | None = None
        try:
            found = check_plan(job, reference, self.loss_fn, batch, moved=False)
            if found is not None:  # rounding hardly does this twice
                again = self._batch(seed=1)
                found = check_plan(job, reference, self.loss_fn, again, moved=True) and found
            if found is not None:
                own = on_first(
                    lambda: (
                        own_difference(job, reference, self.loss_fn, batch)
                        if reference is not None
                        else None
                    )
                )
        except Uncheckable as error:
            self.why_not = str(error)
            return
        if found is None:
            count = sum(t.requires_grad for t in self.graph.parameters)
            self.checked.append(
                f"one step of the plan (loss, gradients, buffers and update of {count} parameters)"
            )
            return
        raise CheckFailed(
            f"a step of the job differs from plain PyTorch: {found}. "
            f"{told(own) if own else self._blamed()}"
        )

    def _blamed(self) -> str:
        """Which level a difference comes from that the model's own rounding does not explain."""
        out = "To train nevertheless, pass check=False"
        try:
            found = on_first(self._compare_model)
        except Uncheckable as error:
            return f"Where it comes from could not be found out ({error}). {out}"
        if found.difference is not None:
            cause = told(found.own) if found.own else _NOT_SEEN
            return f"One rank alone differs too ({found.difference}). {cause}"
        return (
            "The program of one rank agrees with PyTorch, so the plan is at fault: its layout, its "
            "schedule, or an optimizer that needs whole tensors where the plan has parts (then pin "
            f"zero=0 and tp=1). Please report it with the plan file, or search another. {out}"
        )

    def _model(self) -> None:
        try:
            found = on_first(self._compare_model)
        except Uncheckable as error:
            self.unchecked.append(f"the model ({error})")
            return
        if found.difference is not None:
            raise CheckFailed(
                f"the program of one rank differs from plain PyTorch: {found.difference} "
                f"({found.how}). {told(found.own) if found.own else _NOT_SEEN}"
            )
        self.checked.append(f"the model on one rank ({found.how})")

    def _compare_model(self) -> ModelCheck:
        seconds = _seconds(self.graph, torch.device("cpu")) * self._few
        problems = []
        for short in (False, True):
            if not short and (seconds > _SHORT_S or not _fits(self.graph, self._few)):
                continue
            blocks = max(1, len(self.graph.blocks) // (2 * len(self.graph.pattern_counts)))
            if short and seconds / blocks > LIMIT_S:
                problems.append(f"about {seconds / blocks:.0f} s, the limit is {LIMIT_S:.0f} s")
                continue
            try:
                found = check_model(
                    self.model, self.loss_fn, self.plan, self.graph, self._batch(), short=short
                )
            except Uncheckable as error:
                problems.append(str(error))
                continue
            return found
        raise Uncheckable("; ".join(dict.fromkeys(problems)))


def on_first(work: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; its errors too."""
    found: tuple[T | None, MeshwrightError | None] = (None, None)
    if rank() == 0:
        try:
            with torch.device("cpu"):
                found = work(), None
        except MeshwrightError as error:
            found = None, error
    value, failed = from_first(found)
    if failed is not None:
        raise failed
    result: T = value
    return result


def _why_not(model: nn.Module, plan: Plan, graph: Graph, device: torch.device) -> str:
    """Why a step of the plan cannot be compared; empty if it can."""
    views = [view for stage in plan.stages for view in views_of(stage)]
    if other := [view.sync_form for view in views if not is_exact(view.sync_form)]:
        return f"the form of synchronisation {other[0]} changes what is computed"
    tensors = model_tensors(model)
    if meta := [name for name, x in tensors.items() if x.is_meta]:
        return f"{meta[0]!r} has no values yet: the model is on the meta device"
    if not _fits(graph, 1.0, device):
        return "a second copy of the model and its step do not fit into the memory of one device"
    seconds = 2 * _seconds(graph, device)
    if plan.predicted is not None:
        seconds = max(seconds, plan.predicted.step_s * (1 + plan.world_size))
    if seconds > LIMIT_S:
        return f"it would take about {seconds:.0f} s, the limit is {LIMIT_S:.0f} s"
    return ""


def _seconds(graph: Graph, device: torch.device) -> float:
    """Of a step on one device."""
    return 3 * graph.flops / FLOPS_PER_S.get(device.type, FLOPS_PER_S["cuda"])


def _fits(graph: Graph, share: float, device: torch.device | None = None) -> bool:
    """Whether a copy of the model with its gradients, optimizer and activations has room."""
    kept = {name for op in graph.ops for name in op.saved if name in graph.tensors}
    activations = sum(graph.tensors[name].nbytes for name in kept)
    needed = 8 * graph.parameter_bytes + share * activations
    if device is not None and device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    return needed <= _SHARE * free
