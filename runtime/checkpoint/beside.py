"""What a checkpoint keeps beside tensors and the optimizer's settings: where the data stands, the
seed of random numbers, the state of a schedule, the scale of losses."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.ir.errors import PlanError
from meshwright.runtime.step.loss_scale import LossScale

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job


def of_job(job: "Job", scheduler: Any = None) -> dict[str, Any]:
    """The entries of a job as it is, by name."""
    found: dict[str, Any] = {
        "precision": job.plan.precision, "samples": job.state.samples, "seed": job.seed,
    }  # fmt: skip
    if job.state.data is not None:
        found["data"] = job.state.data
    if scheduler is not None:
        found["scheduler"] = scheduler.state_dict()
    if job.loss_scale is not None:
        found["loss_scale"] = job.loss_scale.state()
    return found


def give(job: "Job", extra: Mapping[str, Any]) -> None:
    """Gives a job what a checkpoint kept; older ones count samples by steps, and have no seed."""
    counted = job.state.step * job.plan.global_batch_size
    job.state.samples = extra.get("samples", counted)
    job.state.data = extra.get("data")
    for stage in job.parts.stages.values() if "seed" in extra else ():
        stage.comm.seed = extra["seed"]
    if job.loss_scale is not None and "loss_scale" in extra:
        job.loss_scale = LossScale(job.device, **extra["loss_scale"])


def give_scheduler(scheduler: Any, extra: Mapping[str, Any], folder: str | Path) -> None:
    """PlanError if the checkpoint has none."""
    if "scheduler" not in extra:
        raise PlanError(
            f"the checkpoint in {folder} was saved without a scheduler; load it without "
            "one, and set the schedule yourself"
        )
    scheduler.load_state_dict(extra["scheduler"])
