"""What a job does when its loss, its gradients or its parameters stop being finite numbers."""

import warnings
from collections.abc import Iterable
from math import isfinite
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from meshwright.ir.comm.by_store import of_all
from meshwright.ir.errors import NonFinite, PlanError
from meshwright.runtime.record.late import LateNumber
from meshwright.runtime.record.record import StepRecord
from meshwright.runtime.step.loss_scale import overflow_of
from meshwright.runtime.step.meetings import largest

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job

Policy = Literal["stop", "skip", "back", "warn", "ignore"]
"""`skip` leaves out the step; `back` stops it as `stop` does, and a `Saver` goes back to the newest
checkpoint and on from the next batch."""
_STOPS = frozenset({"stop", "back"})


def check_policy(policy: str) -> Policy:
    """The policy of that name; PlanError unless it is one."""
    for known in get_args(Policy):
        if policy == known:
            found: Policy = known
            return found
    raise PlanError(f"on_nonfinite {policy!r} is none of {', '.join(get_args(Policy))}")


def check_loss(job: "Job", loss: Tensor) -> None:
    """Every rank has the same loss, so all of them stop, or none; lone replicas have their own, and
    wait for what all found (`check_heard`)."""
    if job.replica is not None or _passes(job, loss):
        return
    if job.on_nonfinite in _STOPS and job.accumulated:
        job.sum_gradients()  # to say which are not finite; and nothing is to be under way
    _blame(job, "the loss", float(loss), job.state.step)


def check_norm(job: "Job") -> None:
    """The same for the norm of the gradients, where it is limited."""
    if job.grad_norm is not None and not _passes(job, job.grad_norm):
        _blame(job, _NORM, float(job.grad_norm), job.state.step)


def check_record(job: "Job", record: StepRecord) -> None:
    """Both, of a step that is over: where the host does not wait for the device in a step, that is
    when the next one has been sent off."""
    for loss in record.losses if job.replica is None else ():
        if not _passes(job, loss):
            _blame(job, "the loss", float(loss), record.number)
    if record.norm is not None and not _passes(job, record.norm):
        _blame(job, _NORM, float(record.norm), record.number)


def check_heard(job: "Job", *, all_of_them: bool) -> None:
    """Of the means of losses that lone replicas have heard of: all ranks hear the same in the same
    step, and stop there, or none does."""
    if job.replica is None:
        return
    for heard in job.replica.heard(all_of_them=all_of_them):
        job.mean_loss = heard
        if not _passes(job, heard.loss):
            _blame(job, "the mean of all replicas' losses", heard.loss, heard.step)


_NORM = "the norm of the gradients"


def _passes(job: "Job", value: Tensor | LateNumber | float) -> bool:
    return job.on_nonfinite in ("ignore", "skip") or isfinite(float(value))


def skips(job: "Job", losses: Iterable[Tensor | LateNumber]) -> bool:
    """Whether the step is left out, as its loss or its summed gradients are not finite: then rank 0
    says where, or the first rank of a lone replica, which leaves out steps of its own. Every rank
    calls it; on a GPU each step waits for that."""
    if job.on_nonfinite != "skip":
        return False
    wrong = [float(loss) for loss in losses if not isfinite(float(loss))]
    alone = job.replica
    if not wrong:
        found = overflow_of(job.parts.reduced, job.device)
        if not bool(largest(found, job.plan.world_size, alone)):
            return False
    what = f"the loss is {wrong[0]}" if wrong else "the gradients are not finite"
    where = _where(job) if alone is None else f" in replica {alone.number}"
    if job.parts.rank == 0 if alone is None else alone.is_first_rank:
        warnings.warn(
            f"step {job.state.step}: {what}{where}; it is left out (on_nonfinite='skip')",
            stacklevel=4,
        )
    return True


def _blame(job: "Job", what: str, value: float, step: int) -> None:
    text = f"step {step}: {what} is {value}"
    if job.on_nonfinite == "warn":
        if job.parts.rank == 0:
            warnings.warn(f"{text}; training goes on (on_nonfinite='warn')", stacklevel=4)
        return
    where = _where(job)
    job.accumulated = 0
    # What has come since is of the same fault: who catches this goes on without a look at it.
    for _ in job.records.over(all_of_them=True):
        pass
    if job.replica is not None:
        job.replica.forget()
    raise NonFinite(
        f"{text}{where}: go on from a checkpoint with a lower learning rate or max_grad_norm, or "
        "let it pass with on_nonfinite='warn'"
    )


def check_state(job: "Job", what: str) -> None:
    """Before parameters are written anywhere: every rank calls it, and all stop if one has to."""
    policy = job.on_nonfinite
    if policy == "ignore":
        return
    job.parts.settle()
    found = _all_ranks(job, {h.param.fqn: h.tensor.detach() for h in job.parts.held}.items())
    if not found:
        return
    text = f"step {job.state.step}: parameters are not finite ({found})"
    if policy in (*_STOPS, "skip"):
        text = f"{text}; {what} is not written; on_nonfinite='warn' lets it pass"
        raise NonFinite(text).on_all_ranks()
    if job.parts.rank == 0:
        warnings.warn(f"{text} in {what}", stacklevel=4)


def _where(job: "Job") -> str:
    """Which parameters and gradients are to blame, on which ranks."""
    held = job.parts.held
    parameters = _all_ranks(job, ((h.param.fqn, h.tensor.detach()) for h in held))
    if parameters:
        return f", as parameters are not finite ({parameters})"
    gradients = _all_ranks(
        job,
        ((h.param.fqn, h.tensor.grad) for h in job.parts.reduced if h.tensor.grad is not None),
    )
    return f", gradients are not finite ({gradients})" if gradients else ""


def _all_ranks(job: "Job", tensors: Iterable[tuple[str, Tensor]]) -> str:
    mine = next((name for name, x in tensors if not bool(torch.isfinite(x).all())), "")
    everyone = {rank: name for rank, name in enumerate(of_all(mine)) if name}
    return ", ".join(f"{name!r} first on rank {rank}" for rank, name in everyone.items())
