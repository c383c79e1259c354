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
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero
from torch import Tensor

from meshwright.integrations.ahead import LoaderAhead, NextInputs, read_ahead
from meshwright.integrations.job_optimizer import JobOptimizer
from meshwright.integrations.lightning_checks import check_lightning, limit_of
from meshwright.integrations.lightning_step import StandIn, check_result, standing_in
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.loss_module import LossFn
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.runtime.world.world import pick_device

_LIGHTNING_FILE = "lightning.ckpt"


def job_step(module: LightningModule, batch: Any) -> Tensor:
    """In a step of a LightningModule: the loss of a global batch, by the job."""
    strategy = module.trainer.strategy
    if not isinstance(strategy, JobStrategy):
        raise PlanError("job_step(self, batch) needs Trainer(strategy=JobStrategy(plan))")
    return strategy.loss(batch)


class JobStrategy(Strategy):
    """Trains as a plan says.

    `model` names the attribute of the LightningModule that holds the model the plan is for. In
    `training_step`, `validation_step` and `test_step` a call of that model is the job's, on global
    batches that every rank reads, and gives its loss: what they log is logged. What a job cannot do
    for the module, its callbacks or the Trainer is a PlanError (`lightning_checks` has the tables).
    With `tune`, the job tries sizes of buckets while it trains (see `compile`).
    """

    strategy_name = "meshwright"
    num_nodes = 1
    """Where Lightning puts its Trainer's argument of this name."""
    _layer_sync: Any = None
    """Where Lightning puts what `sync_batchnorm` asks for."""

    def __init__(
        self,
        plan: Plan,
        *,
        model: str = "model",
        loss_fn: LossFn | None = None,
        seed: int = 0,
        tune: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.seed, self.tune = plan, seed, tune
        self.job: Job | None = None
        self._attribute, self._loss_fn = model, loss_fn
        self._act: Callable[[Any], Tensor] | None = None
        self._losses: list[Tensor] = []
        self._loader: LoaderAhead | None = None
        self._next = NextInputs()
        self._device = pick_device(None, plan.cluster.device_kind)

    def setup(self, trainer: Trainer) -> None:
        """Makes the job of the module's model and optimizer; after training, the same one goes on
        to validate and test."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        assert self.lightning_module is not None
        check_lightning(self.lightning_module, trainer, self.plan)
        trains = trainer.state.fn == TrainerFn.FITTING
        if self.job is not None and self.job.model is self._planned_model() and not trains:
            return
        self.setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise PlanError(f"{len(self.optimizers)} optimizers: a job has one")
        self.job = compile_job(
            self._planned_model(), self.plan, optimizer=self.optimizers[0], loss_fn=self._loss_fn,
            device=self._device, seed=self.seed, max_grad_norm=limit_of(trainer, self.plan),
            tune=self.tune,
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

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, around a step of the job, which keeps its gradients."""
        if self._loader is not None:
            batch = next(iter((*args, *kwargs.values())))
            following = self._loader.after(batch)
            last = self.lightning_module is not None and self.lightning_module.trainer.is_last_batch
            self._next.step(batch, None if last else following)
        result = self._around("training_step", self._accumulate, args, kwargs)
        check_result(result, self._losses, type(self.lightning_module).__name__)
        return result

    def _accumulate(self, batch: Any) -> Tensor:
        return self._optimizer.accumulate(batch, self._next.after(batch))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, around an evaluation by the job."""
        assert self.job is not None
        return self._around("validation_step", self.job.eval, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, around an evaluation by the job."""
        assert self.job is not None
        return self._around("test_step", self.job.eval, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: PlanError."""
        raise PlanError("predict: a job gives the loss only; predict with what job.export() wrote")

    def loss(self, batch: Any) -> Tensor:
        """Within a step of the module: that of a global batch, by the job."""
        if self._act is None:
            raise PlanError("job_step(self, batch) is for the steps of a LightningModule")
        loss = self._act(batch)
        self._losses.append(loss)
        return loss

    def _around(
        self, name: str, act: Callable[[Any], Tensor], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        module = self.lightning_module
        assert module is not None
        self._losses, self._act = [], act
        other = StandIn(self._planned_model(), self.loss, self._loss_fn is None)
        try:
            with standing_in(module, self._attribute, other):
                return getattr(module, name)(*args, **kwargs)
        finally:
            self._act = None

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
        assert self.lightning_module is not None
        self._optimizer.divisor = self.lightning_module.trainer.accumulate_grad_batches
        return self._optimizer.step(closure)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Training batches are read one ahead, where a form of the plan makes use of the next."""
        assert self.job is not None and self.lightning_module is not None
        if not self.lightning_module.trainer.training or not self.job.reads_ahead:
            return dataloader
        self._loader = read_ahead(dataloader)
        return self._loader

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
