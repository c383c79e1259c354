"""A job in a Lightning `Trainer`: `Trainer(strategy=JobStrategy(plan), devices=1).fit(module)`.

The extra `lightning` brings what it needs. Start every rank with torchrun: each trains with one
device. Loops, callbacks, schedules and logs are Lightning's; a step is the job's. A checkpoint is a
folder: the job's state, and what Lightning keeps.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero
from torch import Tensor

from meshwright.integrations.job_optimizer import JobOptimizer
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import Plan
from meshwright.ir.step import LossFn
from meshwright.runtime.job import Job
from meshwright.runtime.job import compile as compile_job
from meshwright.runtime.world import pick_device

_LIGHTNING_FILE = "lightning.ckpt"


class JobStrategy(Strategy):
    """Trains as a plan says.

    `model` names the attribute of the LightningModule that holds the model the plan is for. Its
    `configure_optimizers` is asked as always; its `training_step` is the job's step, on global
    batches that every rank reads, and logs `train_loss`; `validation_step` logs `val_loss`.
    """

    strategy_name = "meshwright"

    def __init__(
        self, plan: Plan, *, model: str = "model", loss_fn: LossFn | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.plan, self.seed = plan, seed
        self.job: Job | None = None
        self._attribute, self._loss_fn = model, loss_fn
        self._device = pick_device(None, plan.cluster.device_kind)

    def setup(self, trainer: Trainer) -> None:
        """Makes the job of the module's model and optimizer."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm == "value":
            raise PlanError("gradient_clip_algorithm 'value': a job clips by the global norm")
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise PlanError(f"{len(self.optimizers)} optimizers: a job has one")
        clip = trainer.gradient_clip_val
        limit = None if clip is None else float(clip)
        self.job = compile_job(
            self._planned_model(), self.plan, optimizer=self.optimizers[0], loss_fn=self._loss_fn,
            device=self._device, seed=self.seed, max_grad_norm=limit,
        )  # fmt: skip
        only: Any = rank_zero
        only.rank_zero_only.rank = self.global_rank
        optimizer = JobOptimizer(self.job)
        self.optimizers = [optimizer]
        for config in self.lr_scheduler_configs:
            config.scheduler.optimizer = optimizer

    def _planned_model(self) -> torch.nn.Module:
        module = self.lightning_module
        model = getattr(module, self._attribute, None)
        if not isinstance(model, torch.nn.Module):
            raise PlanError(
                f"{type(module).__name__} has no module {self._attribute!r}; name the one that the "
                "plan is for: JobStrategy(plan, model=...)"
            )
        return model

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a global batch; the job keeps its gradients until the optimizer steps."""
        loss = self._optimizer.accumulate(batch)
        self._log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a global batch."""
        assert self.job is not None
        loss = self.job.eval(batch)
        self._log("val_loss", loss)
        return loss

    def _log(self, name: str, loss: Tensor) -> None:
        assert self.lightning_module is not None
        self.lightning_module.log(name, loss, batch_size=self.plan.global_batch_size, prog_bar=True)

    @property
    def _optimizer(self) -> JobOptimizer:
        optimizer = self.optimizers[0]
        assert isinstance(optimizer, JobOptimizer)
        return optimizer

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The job has done it."""
        return closure_loss

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: LightningModule | Any = None,
        **kwargs: Any,
    ) -> Any:
        """Without Lightning's clipping: it would see this rank's part only."""
        return self._optimizer.step(closure)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """As it is: the job takes to the device what this rank needs of it."""
        return batch

    def model_to_device(self) -> None:
        """The job has its own parameters."""

    @property
    def root_device(self) -> torch.device:
        return self._device

    @property
    def global_rank(self) -> int:
        if dist.is_initialized():
            return dist.get_rank()
        return int(os.environ.get("RANK", "0"))

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Losses are those of the whole batch on every rank already."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if not dist.is_initialized():
            return tensor.unsqueeze(0)
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor)
        return torch.stack(everyone)

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        shared = [obj]
        dist.broadcast_object_list(shared, src=src)
        return shared[0]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: weights are in the job's checkpoint."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Tensor]:
        """Nothing: it is in the job's checkpoint."""
        return {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """`load_checkpoint` has done it."""

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_checkpoint` has done it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Every rank calls it."""
        assert self.job is not None
        self.job.save(Path(filepath))
        super().save_checkpoint(checkpoint, Path(filepath) / _LIGHTNING_FILE, storage_options)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Reads what Lightning keeps without running code, unless `fit(weights_only=False)`."""
        assert self.job is not None
        self.job.load(Path(checkpoint_path))
        path = Path(checkpoint_path) / _LIGHTNING_FILE
        try:
            return super().load_checkpoint(path, True if weights_only is None else weights_only)
        except pickle.UnpicklingError as error:
            raise PlanError(
                f"{path} needs code to be read, of a callback or of hyperparameters, and it was "
                "not run. If you trust the file: trainer.fit(..., weights_only=False)"
            ) from error
