"""A job in a `transformers.Trainer`: `JobTrainer(model, args, ..., plan=plan).train()`.

The extra `hf` brings what it needs. Callbacks, schedules, logs, evaluation and checkpoints are the
Trainer's; a step is the job's. The plan says how large a global batch is.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from transformers import Trainer

from meshwright.integrations.job_optimizer import JobOptimizer
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import Plan
from meshwright.runtime.job import Job
from meshwright.runtime.job import compile as compile_job

_CHECKPOINT = "job"
"""Folder of a Trainer checkpoint that holds the job's."""


class _Wrapped(nn.Module):
    """Keeps the Trainer from wrapping the model for some other parallelism."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class JobTrainer(Trainer):
    """Trains as a plan says; every rank runs it, under plain torchrun.

    Every rank reads the whole global batch. With `gradient_accumulation_steps` each batch counts
    the same. Evaluation gives the loss only.
    """

    def __init__(self, *args: Any, plan: Plan, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plan = plan
        self._check_arguments()
        assert isinstance(self.model, nn.Module)
        optimizer = super().create_optimizer()
        self.job: Job = compile_job(
            self.model, plan, optimizer=optimizer, device=self.args.device,
            max_grad_norm=self.args.max_grad_norm or None, seed=self.args.seed,
        )  # fmt: skip
        self.optimizer = self._job_optimizer = JobOptimizer(self.job)

    def _check_arguments(self) -> None:
        args = self.args
        asked = args.per_device_train_batch_size * max(1, args.world_size)
        if args.per_device_train_batch_size != 8 and asked != self.plan.global_batch_size:
            raise PlanError(
                f"per_device_train_batch_size {args.per_device_train_batch_size} x "
                f"{args.world_size} ranks is {asked}, the plan's global batch is "
                f"{self.plan.global_batch_size}: leave it out, the plan decides"
            )
        if args.train_sampling_strategy not in ("random", "sequential"):
            raise PlanError(
                f"train_sampling_strategy {args.train_sampling_strategy!r}: a job's batches are "
                "random or sequential"
            )
        for name in ("load_best_model_at_end", "auto_find_batch_size", "fp16", "bf16"):
            if getattr(args, name):
                raise PlanError(f"{name}: a job cannot; it computes in the plan's precision")

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The job's, which was made with it."""
        if not hasattr(self, "_job_optimizer"):
            return super().create_optimizer(model)
        self.optimizer = self._job_optimizer
        return self._job_optimizer

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model if isinstance(model, _Wrapped) else _Wrapped(model)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of a global batch, whose gradients the job keeps until the optimizer steps."""
        loss = self._job_optimizer.accumulate(_tensors(inputs))
        return (loss / self.current_gradient_accumulation_steps).to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of a global batch; a job gives no logits."""
        return self.job.eval(_tensors(inputs)).to(self.args.device), None, None

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The same global batches on every rank."""
        dataset: Any = self.train_dataset
        if dataset is None:
            raise PlanError("a Trainer that trains needs a train_dataset")
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        generator = torch.Generator().manual_seed(seed)
        shuffled = self.args.train_sampling_strategy != "sequential"
        sampler = RandomSampler(dataset, generator=generator) if shuffled else None
        return self._loader(dataset, sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The same global batches on every rank; what is left over is dropped."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._loader(dataset, SequentialSampler(dataset))

    def _loader(self, dataset: Any, sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset, self.plan.global_batch_size, sampler=sampler, drop_last=True,
            collate_fn=self.data_collator, num_workers=self.args.dataloader_num_workers,
        )  # fmt: skip

    def get_total_train_batch_size(self, args: Any) -> int:
        return self.plan.global_batch_size * int(args.gradient_accumulation_steps)

    def _clip_grad_norm(self, model: Any) -> None:
        """The job clips when it applies gradients."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Known once they are applied."""

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        super()._maybe_log_save_evaluate(tr_loss, self.job.grad_norm, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model as safetensors with its configuration, as `from_pretrained` reads it."""
        folder = output_dir or self.args.output_dir
        assert folder is not None
        self.job.export(folder)
        config: Any = getattr(self.model, "config", None)
        if self.args.should_save and config is not None:
            config.save_pretrained(folder)
        if dist.is_initialized():
            dist.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.job.save(os.path.join(output_dir, _CHECKPOINT), self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come with the optimizer's state, from the job's checkpoint."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.job.load(os.path.join(checkpoint, _CHECKPOINT), self.lr_scheduler)


def _tensors(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
