"""The plan check: a step of the job on all ranks beside plain PyTorch on rank 0."""

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from meshwright.ir.comm.by_store import from_first
from meshwright.ir.trace.changing import changed
from meshwright.ir.trace.loss_module import LossFn, nested_batch
from meshwright.runtime.check.amplified import amplified
from meshwright.runtime.check.difference import (
    StepOutcome,
    TensorDifference,
    first_difference,
    first_update,
    rounding,
)
from meshwright.runtime.check.plain import Reference, Uncheckable, never_still
from meshwright.runtime.check.undisturbed import undisturbed
from meshwright.runtime.job.job import Job
from meshwright.runtime.job.whole import (
    differing_copies,
    whole_buffers,
    whole_gradients,
    whole_parameters,
    without_gradient,
    write_parameters,
)


def check_plan(
    job: Job, reference: Reference | None, loss_fn: LossFn | None, batch: Mapping[str, Tensor],
    *, moved: bool,
) -> TensorDifference | None:  # fmt: skip
    """All ranks call it, rank 0 with a reference; the same comes back everywhere.

    `moved`: with other weights than the model's, for a second opinion: rounding may put a value on
    the other side of a ReLU or a router, but hardly twice.
    """
    wanted, problem = None, ""
    if reference is not None:
        if moved:
            reference.change(_moved)
        try:
            wanted = reference.run(loss_fn, batch, _parts(job))
            problem = "" if wanted.is_finite else "the loss of plain PyTorch is not finite"
        except Uncheckable as error:
            problem = str(error)
    if problem := from_first(problem):
        raise Uncheckable(problem)
    with undisturbed(job):
        if moved:
            write_parameters(job, _moved)
        found, after, apart = _stepped(job, batch)
    differs: TensorDifference | None = None
    if reference is not None and wanted is not None:
        differs = _compared(job, reference, found, wanted, after)
    if differs is None and apart:
        what = f"{apart[0]!r} after the step"
        differs = TensorDifference(what, inf, 0.0, "is not the same on all ranks that have it")
    agreed: TensorDifference | None = from_first(differs)
    return agreed


def own_difference(
    job: Job, reference: Reference, loss_fn: LossFn | None, batch: Mapping[str, Tensor]
) -> TensorDifference | None:
    """Returns what plain PyTorch makes of one unit of rounding, if no job could be told by it."""
    return amplified(
        reference.model, lambda: reference.run(loss_fn, batch, _parts(job)), rounding(job.graph)
    )


def _stepped(
    job: Job, batch: Mapping[str, Tensor]
) -> tuple[StepOutcome, dict[str, Tensor], tuple[str, ...]]:
    """A step of the job; what rank 0 gets of it."""
    if any(stage.capture for stage in job.plan.stages) and not changed(job.graph):
        # Recorded in this pass, replayed in the next one: so it is replays that are compared.
        job.backward(nested_batch(batch))
        job.sum_gradients()
        job.accumulated = 0
    loss = job.backward(nested_batch(batch))
    job.sum_gradients()
    none = without_gradient(job)
    gradients = {fqn: None if fqn in none else whole.cpu() for fqn, whole in whole_gradients(job)}
    job.scale_gradients(1.0)
    never_still(job.optimizer)
    job.update()
    after = {fqn: whole.cpu().clone() for fqn, whole in whole_parameters(job)}
    buffers = {fqn: whole.cpu().clone() for fqn, whole in whole_buffers(job)}
    return (
        StepOutcome(float(loss), gradients, buffers),
        after,
        differing_copies(job, rounding(job.graph)),
    )


def _compared(
    job: Job, reference: Reference, found: StepOutcome, wanted: StepOutcome,
    after: Mapping[str, Tensor],
) -> TensorDifference | None:  # fmt: skip
    allowed = rounding(job.graph)
    if differs := first_difference(_as_summed(job, found, wanted), wanted, allowed):
        return differs
    own = reference.parameters()
    # The same gradients for both optimizers: what differs now is theirs.
    given = {
        n: found.gradients.get(n) if g is not None else None for n, g in wanted.gradients.items()
    }
    stepped = reference.stepped(given, job.max_grad_norm, {n: x.dtype for n, x in after.items()})
    differs = first_update(_as_kept(own, after), after, _as_kept(stepped, after), allowed)
    reference.change(lambda name, _: own[name])
    return differs


def _as_kept(whole: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters in the dtypes that the job has them in: what is not trained it may have in that of
    copies alone."""
    return {n: x.to(after[n].dtype) if n in after else x for n, x in whole.items()}


def _as_summed(job: Job, found: StepOutcome, wanted: StepOutcome) -> StepOutcome:
    """A loss that is a sum over samples, while batch-norm has micro-batches, is `parts` times the
    mean of theirs."""
    parts = _parts(job)
    if parts == 1 or abs(found.loss - wanted.loss) <= abs(found.loss / parts - wanted.loss):
        return found
    gradients = {n: None if g is None else g / parts for n, g in found.gradients.items()}
    return StepOutcome(found.loss / parts, gradients, found.buffers)


def _parts(job: Job) -> int:
    """Micro-batches that the reference takes one by one: statistics are those of each."""
    normed = any("batch_norm" in op.target for op in job.graph.ops)
    return job.plan.num_microbatches if normed else 1


def _moved(name: str, value: Tensor) -> Tensor:
    """The value, a little to one side: the same on every rank."""
    if not value.is_floating_point():
        return value
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    noise = torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    return value * (1 + 0.05 * noise)
