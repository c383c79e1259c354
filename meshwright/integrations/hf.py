"""A job in a `transformers.Trainer`: `JobTrainer(model, args, ..., plan=plan).train()`.

The extra `hf` brings what it needs. Callbacks, schedules, logs, evaluation and checkpoints are the
Trainer's; a step is the job's. The plan says how large a global batch is.
"""

import math
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, ProcessorMixin, Trainer, trainer_utils

from meshwright.integrations.ahead import BatchGroups
from meshwright.integrations.hf_arguments import check_arguments, check_overrides, check_parts
from meshwright.integrations.hf_data import EpochSampler, batches, check_counts
from meshwright.integrations.hf_saves import SavesInTrainer, newest_whole
from meshwright.integrations.job_optimizer import JobOptimizer
from meshwright.ir.comm.by_store import from_first
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.runtime.job.saver import started_again

_CHECKPOINT = "job"
"""Folder of a Trainer checkpoint that holds the job's."""


class _Wrapped(nn.Module):
    """Keeps the Trainer from wrapping the model for some other parallelism."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class _CallbackModel:
    """The model as callbacks see it: all but its parameters, which are those from before."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name in ("parameters", "named_parameters", "get_parameter", "state_dict"):
            raise PlanError(
                f"a callback asks for {name} of the model, which still has its weights from before "
                "training: call trainer.job.sync_to() on every rank, then read trainer.model"
            )
        return getattr(self._module, name)


class JobTrainer(Trainer):
    """Trains as a plan says; every rank runs it, under plain torchrun.

    Every rank reads the whole global batch. Evaluation gives the loss only. An argument, an
    override or a callback that would be ignored is a PlanError: `hf_arguments` has the tables.
    With `tune`, the job tries sizes of buckets while it trains (see `compile`).

    `save_every` is a number of steps, or a time such as `10m`, beside what the arguments say. When
    the process is asked to end, all ranks finish a step, the Trainer saves, and `train` leaves by
    SystemExit with `exit_codes.RETRY`. Started again by a launcher, it goes on by itself.
    """

    def __init__(
        self, *args: Any, plan: Plan, tune: bool = False, save_every: str | int | None = None,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **kwargs)
        self.plan = plan
        check_parts(self)
        check_arguments(self.args, plan)
        check_overrides(self, JobTrainer)
        if plan.global_batch_size % self.args.world_size == 0:  # what Trainer counts and logs
            self.args.per_device_train_batch_size = plan.global_batch_size // self.args.world_size
            self.args.per_device_eval_batch_size = self.args.per_device_train_batch_size
        assert isinstance(self.model, nn.Module)
        self._align_tokens()
        self.create_optimizer()
        self.job: Job = compile_job(
            self.model, plan, optimizer=self.optimizer, max_grad_norm=self._limit(),
            device="cpu" if plan.cluster.device_kind == "cpu" else self.args.device,
            seed=self.args.seed, tune=tune,
        )  # fmt: skip
        self._saves = SavesInTrainer(self.job, save_every)
        self.add_callback(self._saves)
        self._groups = BatchGroups()
        self.optimizer = self._job_optimizer = JobOptimizer(self.job)
        # Over any override, which made the optimizer that the job has now.
        self.create_optimizer = lambda model=None: self._job_optimizer  # type: ignore[method-assign]

    def _limit(self) -> float | None:
        """The largest norm; 0 asks for no clipping, also where the plan says otherwise."""
        if self.args.max_grad_norm:
            return float(self.args.max_grad_norm)
        return None if self.plan.max_grad_norm is None else math.inf

    def _align_tokens(self) -> None:
        """The model has the tokenizer's special tokens before it is traced, not after."""
        align = getattr(trainer_utils, "align_special_tokens", None)
        known = isinstance(self.processing_class, PreTrainedTokenizerBase | ProcessorMixin)
        if align is not None and known and hasattr(self.model, "config"):
            align(self.model, self.processing_class)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Trains; PlanError if a method was replaced since the job was made."""
        check_overrides(self, JobTrainer)
        if resume_from_checkpoint is None and started_again():
            folder = self.args.output_dir
            resume_from_checkpoint = from_first(newest_whole(folder) if folder else None)
        with self._saves.saver:
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: PlanError."""
        raise PlanError(
            "predict: a job gives the loss only, no logits; predict with what save_model() wrote"
        )

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: PlanError."""
        raise PlanError("hyperparameter_search: each trial needs a plan and a job of its own")

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model if isinstance(model, _Wrapped) else _Wrapped(model)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = super()
        found = trainer._prepare_for_training(*args, **kwargs)
        assert isinstance(self.model, nn.Module)
        self.callback_handler.model = _CallbackModel(self.model)
        return found

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any = None
    ) -> tuple[list[Any], None]:
        """The batches of one optimizer step; PlanError unless they count alike."""
        ahead = self.job.reads_ahead and self.state.global_step + 1 < self.state.max_steps
        found = self._groups.take(epoch_iterator, num_batches, ahead)
        if getattr(self, "model_accepts_loss_kwargs", False):
            check_counts(found, shifted=bool(getattr(self, "_loss_shifts_labels", False)))
        return found, None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of a global batch, whose gradients the job keeps until the optimizer steps."""
        loss = self._job_optimizer.accumulate(inputs, self._groups.after())
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.cuda.empty_cache()
        return (loss / self.current_gradient_accumulation_steps).to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of a global batch; a job gives no logits."""
        return self.job.eval(inputs).to(self.args.device), None, None

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """A rank's part: Trainer adds up those of all ranks, which read the same batch."""
        return int(super().floating_point_ops(inputs) / self.args.world_size)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        trainer: Any = super()
        trainer._track_num_input_tokens(inputs)
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.args.world_size

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The same global batches on every rank, in the order in which one process reads them."""
        dataset: Any = self.train_dataset
        if dataset is None:
            raise PlanError("a Trainer that trains needs a train_dataset")
        sampler = None
        if self.args.train_sampling_strategy != "sequential" and hasattr(dataset, "__len__"):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            sampler = EpochSampler(len(dataset), seed, lambda: self.state.epoch)
        return batches(self, dataset, sampler, "training")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """The same global batches on every rank."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]  # type: ignore[index]
        if dataset is None:
            raise PlanError("evaluation needs an eval_dataset")
        return batches(self, dataset, None, "evaluation")

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

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self.job.load(os.path.join(self.state.best_model_checkpoint, _CHECKPOINT))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.job.load(os.path.join(checkpoint, _CHECKPOINT), self.lr_scheduler)
