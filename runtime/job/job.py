"""A job: what every rank of it calls to train."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.forms.running import Samples
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import precision
from meshwright.ir.profile.measured import Measured, StepKind, TensorMemory
from meshwright.ir.trace.loss_module import Batch, flatten_batch, nested_batch
from meshwright.runtime.check.run import SelfCheck
from meshwright.runtime.checkpoint import beside, checkpoint
from meshwright.runtime.checkpoint.export import check_writable, export, sync_to
from meshwright.runtime.checkpoint.remembered import Remembered
from meshwright.runtime.job.build import RankParts
from meshwright.runtime.job.executors import executor_of
from meshwright.runtime.job.stale import Guard
from meshwright.runtime.job.unread import Unread
from meshwright.runtime.record.closing import StepRecords
from meshwright.runtime.record.late import LateNumber
from meshwright.runtime.record.record import StepRecord
from meshwright.runtime.record.report import report
from meshwright.runtime.record.resident import Residence, resident_bytes
from meshwright.runtime.record.run_dir import prepare, profiling, write
from meshwright.runtime.record.stats import Stats
from meshwright.runtime.record.tracking import tracking, tracking_cuda
from meshwright.runtime.step.batch import BatchCutter
from meshwright.runtime.step.executor import Executor, RankProgress
from meshwright.runtime.step.finite import (
    Policy,
    check_heard,
    check_loss,
    check_norm,
    check_record,
    skips,
)
from meshwright.runtime.step.loss_scale import LossScale, leaves_out, overflow_of, unless
from meshwright.runtime.step.meetings import HeardLoss, LoneReplica, largest
from meshwright.runtime.step.regrouping import Retuning
from meshwright.runtime.step.same_batches import check_same_batches
from meshwright.runtime.step.step_end import StepEnd
from meshwright.runtime.step.sums import whole_loss, whole_totals
from meshwright.runtime.step.user_groups import UserGroups
from meshwright.runtime.world.failure import Failures
from meshwright.runtime.world.pairs import open_pairs
from meshwright.runtime.world.patience import HANG_S


@dataclass(slots=True)
class TrainState:
    """Where training stands; part of every checkpoint."""

    step: int = 0
    """Optimizer steps taken."""
    samples: int = 0
    """Samples trained on: where the data stands, under any plan."""
    data: Any = None
    """What a loader that keeps its own place says of it."""


class Job:
    """One rank of a training job; all ranks call the same methods in the same order."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        parts: RankParts,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        device: torch.device,
        max_grad_norm: float | None = None,
        hang_s: float = HANG_S,
        owns_world: bool = False,
        residence: Residence | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self.plan, self.graph, self.parts, self.model = plan, graph, parts, model
        self.optimizer, self.device, self.max_grad_norm = optimizer, device, max_grad_norm
        if not all(stage.sync.whole_updates for stage in parts.stages.values()):
            optimizer.register_state_dict_pre_hook(lambda _: self.settle())
        self.end = StepEnd(parts, optimizer, device, plan.world_size)
        if max_grad_norm is not None or parts.ties:
            for stage in parts.stages.values():
                stage.sync.hold_nothing_back()
        for stage in parts.stages.values():
            stage.sync.stay_until_summed({tie.name for tie in parts.ties})
        self.state = TrainState()
        scales = precision(plan.precision).scales_loss
        self.loss_scale = LossScale(device) if scales else None
        """Of a precision whose gradients vanish otherwise."""
        self.records = StepRecords(late=device.type == "cuda")
        self.grad_norm: Tensor | None = None
        """Global norm at the last step; None unless gradients are clipped."""
        self.missing = set(parts.missing)
        self.unread = Unread.of(model, graph, parts.owners)
        """Of the module, what no stage has."""
        self.user_groups: UserGroups | None = None
        """Of the optimizer that the user passed, if it was one."""
        self.replica = LoneReplica.of(plan, parts.rank, parts.groups)
        """Of a plan whose replicas hear late of each other; None: they meet in each step."""
        self.mean_loss: HeardLoss | None = None
        """The newest mean of all replicas' losses, where a step returns that of this one."""
        self.on_nonfinite: Policy = "stop"
        self.checked: SelfCheck | None = None
        """What was compared with plain PyTorch; None: nothing."""
        self.retuning: Retuning | None = None
        """Tries sizes of buckets from step to step."""
        self._guard = Guard(model)
        self.progress = RankProgress()
        self.failures = Failures(parts.rank, plan.world_size, self.progress, hang_s)
        self._owns_world = owns_world
        self._run_dir = run_dir
        self.recorder = parts.recorder
        self.tensor_memory: TensorMemory | None = None
        """Of the last step that was tracked."""
        self._cutter = BatchCutter(graph, plan, parts.programs, parts.rank, device)
        self._trainer, self._evaluator = (
            executor_of(
                plan, parts, self._cutter, device, self.progress, self.recorder, training=training
            )
            for training in (True, False)
        )
        self._compared: set[Executor] = set()
        """Those whose first batch all ranks have compared."""
        self._open_pairs()
        self.accumulated = 0
        """Batches whose gradients wait for the optimizer."""
        self.residence = residence or Residence(resident_bytes())
        self.residence.started()

    def step(
        self, batch: Batch, *, sharded: bool = False, next_batch: Batch | None = None,
        later: Sequence[Batch] = (),
    ) -> Tensor:  # fmt: skip
        """Trains on one global batch; the loss, the same on every rank. Under a plan whose replicas
        hear of each other `delay` steps late (`dasgd`) it is that of this replica's own samples:
        the mean of all comes so many steps later (`mean_loss`, the same on every rank).

        Every rank passes the whole batch, or with `sharded` its own part (see `shard`); so with
        `next_batch`, that of the next call, which is sent to a GPU ahead and which some forms of
        synchronisation work ahead with, and with `later`, those that follow it, for stores that
        bring rows from farther ahead.
        """
        return self._step(batch, self._kind, sharded, next_batch, later)

    def track_memory(
        self, batch: Batch, *, sharded: bool = False, next_batch: Batch | None = None,
        later: Sequence[Batch] = (),
    ) -> Tensor:  # fmt: skip
        """Takes a step that counts the bytes of all live tensors; `tensor_memory` is their peak.

        It trains as any step does, but on CPU more slowly, so its time counts nowhere.
        """
        self.residence.note()
        parts, optimizer = self.parts, self.optimizer
        with (
            tracking_cuda(parts, optimizer, self.device)
            if self.device.type == "cuda"
            else tracking(parts, optimizer, flatten_batch(batch).values())
        ) as found:
            loss = self._step(batch, "tracked", sharded, next_batch, later)
        self.tensor_memory = found[0]
        self.residence.skip()
        return loss

    def trace_step(
        self,
        batch: Batch,
        path: str | Path,
        *,
        sharded: bool = False,
        next_batch: Batch | None = None,
    ) -> Tensor:
        """Takes a step under torch's profiler and writes its trace, for Perfetto or Chrome.

        It trains as any step does, but more slowly, so its time counts nowhere.
        """
        self.residence.note()
        with profiling(self.recorder, self.device, Path(path)):
            loss = self._step(batch, "traced", sharded, next_batch)
        self.residence.skip()
        return loss

    def _compare(self, batch: Batch, sharded: bool, executor: Executor) -> None:
        """The first batch of a kind, with what other ranks read."""
        if self.plan.world_size == 1 or executor in self._compared:
            return
        own = self._cutter.own_samples if sharded else None
        with self.failures.guard():
            check_same_batches(self._cutter.checked(batch, sharded=sharded), own)
        self._compared.add(executor)

    def _step(
        self, batch: Batch, kind: StepKind, sharded: bool, next_batch: Batch | None,
        later: Sequence[Batch] = (),
    ) -> Tensor:  # fmt: skip
        self._compare(batch, sharded, self._trainer)
        with self._recording(kind) as record:
            loss = self.backward(
                batch, sharded=sharded, last=True, next_batch=next_batch, later=later
            )
            record.heard(loss)
            self._apply(1.0)
        return loss

    def accumulate(
        self, batch: Batch, *, sharded: bool = False, next_batch: Batch | None = None,
        later: Sequence[Batch] = (),
    ) -> Tensor:  # fmt: skip
        """Adds a batch's gradients without an optimizer step; `apply` takes it."""
        self._compare(batch, sharded, self._trainer)
        with self._recording(self._kind) as record:
            loss = self.backward(
                batch, sharded=sharded, last=False, next_batch=next_batch, later=later
            )
            record.heard(loss)
        return loss

    def apply(self, gradient_scale: float = 1.0) -> None:
        """The optimizer step for what `accumulate` has gathered, scaled (1/n gives the mean)."""
        if not self.accumulated:
            raise PlanError("apply() needs at least one accumulate(batch) before it")
        with self._recording("timed"):
            self._apply(gradient_scale)

    @property
    def _kind(self) -> StepKind:
        """Of a usual step."""
        if not self.records.any_taken:
            return "warm-up"
        return "timed" if self.retuning is None else self.retuning.kind

    @contextmanager
    def _recording(self, kind: StepKind) -> Iterator[StepRecord]:
        """A step, or a part of one that accumulates batches; what the user does between is not."""
        self._guard.started()
        record = self.recorder.record
        if record is None or not self.accumulated:
            record = self.recorder.begin(kind, self.state.step)
        start = self.recorder.mark()
        yield record
        record.spans.append((start, self.recorder.mark()))
        if self.accumulated:
            return
        if self.records.late and self.grad_norm is not None:
            record.norm = LateNumber(self.grad_norm)
        self.recorder.record = None
        self.records.add(record)
        # A size of buckets is tried on steps that the next one does not touch.
        self._look_back(all_of_them=self.retuning is not None and not self.retuning.over)

    def _look_back(self, *, all_of_them: bool) -> None:
        """At steps that are over; every rank calls it. `all_of_them`: the last one, too, which the
        device may still be at."""
        for record in self.records.over(all_of_them=all_of_them):
            self.progress.busy_s = record.busy_s
            if self.records.late:
                check_record(self, record)
            if self.retuning is not None:
                self.retuning.took(record)

    @property
    def seed(self) -> int:
        """Of all random numbers that forwards draw."""
        return next(iter(self.parts.stages.values())).comm.seed

    @property
    def stats(self) -> Stats:
        """What the steps so far took; waits for the last one."""
        return self.records.stats

    def eval(self, batch: Batch, *, sharded: bool = False) -> Tensor:
        """The loss of a global batch: no dropout, running batch statistics, nothing changes."""
        self._compare(batch, sharded, self._evaluator)
        self.settle()
        for stage in self.parts.stages.values():
            stage.comm.training = False
        try:
            with self.failures.guard(), self.recorder.paused():
                if (reads := self._samples(batch, sharded)) is not None:
                    for stage in self.parts.stages.values():
                        if stage.sync.reads_batches:
                            stage.sync.look_up(reads)
                return self._run(self._evaluator, batch, sharded)
        finally:
            for stage in self.parts.stages.values():
                stage.comm.training = True

    def shard(self, batch: Batch) -> Batch:
        """This rank's samples of a global batch, for `step(..., sharded=True)`."""
        return nested_batch(self._cutter.shard(batch))

    def save(self, folder: str | Path, scheduler: Any = None, *, keep: int = 1) -> Path:
        """Writes a checkpoint that any plan for this model can load; every rank calls it.

        The `keep` newest of the folder stay.
        """
        self._settle_to_save()
        with self.failures.guard():
            return checkpoint.save(self, Path(folder), beside.of_job(self, scheduler), keep)

    def snapshot(self, scheduler: Any = None) -> checkpoint.Snapshot:
        """Copies what this rank has of a checkpoint to the host; every rank calls it."""
        self._settle_to_save()
        with self.failures.guard():
            return checkpoint.snapshot(self, beside.of_job(self, scheduler)).on_host()

    def _settle_to_save(self) -> None:
        self.settle()
        check_writable(self, "the checkpoint")
        if self.user_groups is not None:
            self.user_groups.take()

    def load(
        self,
        folder: str | Path,
        scheduler: Any = None,
        *,
        drop_sync_state: bool = False,
        newer: Remembered | None = None,
    ) -> None:
        """Goes on from the newest checkpoint in `folder`, or from what is `newer`, in memory, if
        that is sound, with the random numbers of the job that saved it; every rank calls it.

        `drop_sync_state`: what a form of synchronisation kept between steps may be lost, where the
        plan is another.
        """
        self.settle()
        with self.failures.guard():
            extra = checkpoint.load(
                self, Path(folder), drop_sync_state=drop_sync_state, newer=newer
            )
        if self.state.step:  # so that what fails before the next step is known again
            self.progress.step, self.progress.action = self.state.step - 1, "end"
        beside.give(self, extra)
        if self.user_groups is not None:
            self.user_groups.give()
        if scheduler is not None:
            beside.give_scheduler(scheduler, extra, folder)

    def export(self, folder: str | Path) -> Path | None:
        """Writes the user's module as `model.safetensors`; rank 0 gets its path."""
        self.settle()
        with self.failures.guard():
            return export(self, Path(folder))

    def measured(self) -> Measured:
        """What the steps so far took on this rank."""
        return report(
            self.stats, self.residence, self.tensor_memory, self.plan, self.parts, self.device,
            None if self.retuning is None else self.retuning.tuned,
        )  # fmt: skip

    def write_run(self, folder: str | Path) -> Path:
        """Writes the plan and what the steps took on this rank; every rank calls it."""
        folder = Path(folder)
        prepare(folder, self.plan, self.parts.rank)
        return write(self.measured(), folder)

    def sync_to(self, model: nn.Module | None = None) -> None:
        """Gives a module (default: `job.model`) the weights and buffers as they are; all ranks.

        Until then, from the first step on, `job.model` refuses to run, to be saved or to be
        pickled, as it has the weights from before training.
        """
        self.settle()
        with self.failures.guard():
            sync_to(self, self.model if model is None else model)
        if model is None or model is self.model:
            self._guard.release()

    def settle(self) -> None:
        """Completes the last step where the plan lets a part of it wait for the next one, as with
        the form `dear`, and looks at its loss where that comes late, as on GPUs; every rank calls
        it. All methods that read parameters do: only what looks into the job's own tensors needs
        it."""
        self._look_back(all_of_them=True)
        self._hear(None)
        check_heard(self, all_of_them=True)
        if self.user_groups is not None:
            self.user_groups.check_ranks(all_of_them=True)
        if not self.parts.is_settled:
            with self.failures.guard():
                self.parts.settle()

    def close(self, *, sync: bool = False) -> None:
        """Leaves the job; the last call. With `sync`, `sync_to` comes before."""
        if sync:
            self.sync_to()
        self.settle()
        if self.retuning is not None and not self.retuning.over:
            self.retuning.say()
        if self._run_dir is not None:
            write(self.measured(), Path(self._run_dir))
        self.failures.close()
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()

    def _open_pairs(self) -> None:
        """Those of training, which are also all of evaluation."""
        self.progress.at(0, "connections between stages", "synchronising")
        with self.failures.guard():
            open_pairs(self.parts.groups, self.parts.rank, self.device)
        self.progress.at(0, "start", "idle")

    def backward(
        self,
        batch: Batch,
        *,
        sharded: bool = False,
        last: bool = True,
        next_batch: Batch | None = None,
        later: Sequence[Batch] = (),
    ) -> Tensor:
        """Adds a batch's gradients to those of the step, and nothing else; `last`: none follow."""
        if self.missing:
            raise PlanError(
                f"{len(self.missing)} tensors have no values, such as {min(self.missing)!r}: the "
                "model was on the meta device, or a load failed; call job.load(dir) first"
            )
        with self.failures.guard():
            stages = self.parts.stages.values()
            following = [next_batch] if next_batch is None or not later else [next_batch, *later]
            reads = [self._samples(x, sharded) for x in (batch, *following)]
            for stage in stages:
                if stage.sync.reads_batches:
                    stage.sync.coming([x for x in reads[2:] if x is not None])
                begin = stage.sync.more if self.accumulated else stage.sync.begin
                begin(*(reads[:2] if stage.sync.reads_batches else ()))
                # Accumulated batches of one step draw different dropout masks.
                stage.comm.step = self.state.step + (self.accumulated << 32)
                stage.reduce_early = last and not self.accumulated
                stage.loss_scale = self.loss_scale.scale if self.loss_scale else 1.0
            loss = self._run(self._trainer, batch, sharded, self.replica)
            if next_batch is not None:
                self._cutter.send_ahead(next_batch, sharded=sharded)
        self.accumulated += 1
        self.state.samples += self.plan.global_batch_size
        if not self.records.late:
            check_loss(self, loss)
        return loss

    @property
    def reads_ahead(self) -> bool:
        """Whether this rank makes use of `next_batch`: to send it ahead, or for a form."""
        return self._cutter.sends_ahead or self._forms_read_batches

    @property
    def _forms_read_batches(self) -> bool:
        return any(stage.sync.reads_batches for stage in self.parts.stages.values())

    def _samples(self, batch: Batch | None, sharded: bool) -> Samples | None:
        """What this rank reads of a batch, if a form of it asks."""
        if batch is None or not self._forms_read_batches:
            return None
        return flatten_batch(batch) if sharded else self._cutter.read(batch)

    def _run(
        self, executor: Executor, batch: Batch, sharded: bool, replica: LoneReplica | None = None
    ) -> Tensor:
        """Runs the schedule; the loss of the whole job, or of a lone replica."""
        section = self.recorder.section
        with section("batch"):
            parts = self._cutter.cut(batch, sharded=sharded)
        self.progress.at(self.state.step, "totals", "running")
        with section("totals"):
            totals = whole_totals(
                self.parts, self.plan.num_microbatches, parts, self._trainer.place
            )

        def inputs(stage: int, microbatch: int) -> Mapping[str, Tensor]:
            return parts[stage, microbatch] | totals[stage]

        with section("schedule"):
            local = executor.run(inputs)
        with section("loss"):
            loss = whole_loss(self, local, replica)
        self.progress.at(self.state.step, "end", "idle")
        return loss

    def _apply(self, gradient_scale: float) -> None:
        with self.failures.guard():
            if self.user_groups is not None:
                self.user_groups.take()
            with self.recorder.section("gradients"):
                self.sum_gradients()
                self._hear(self.state.step)
                overflow, factor = self._unscaled(gradient_scale)
                if self._left_out(overflow):
                    return
                self.scale_gradients(factor)
                if overflow is not None and self.grad_norm is not None:
                    # Of a step that is left out on the device it is no number.
                    self.grad_norm = torch.where(overflow != 0, 0.0, self.grad_norm)
        check_heard(self, all_of_them=False)
        if not self.records.late:
            check_norm(self)
        with unless(self.optimizer, overflow):
            self.update()
        if self.user_groups is not None:
            self.user_groups.stepped()

    def _hear(self, step: int | None) -> None:
        """A lone replica waits for what it has to have heard of others before it ends a step; None:
        for all that it has asked."""
        if self.replica is None:
            return
        self.progress.at(self.state.step, "losses of earlier steps", "synchronising")
        with self.failures.guard():
            for asked in self.replica.due(step):
                if self.user_groups is not None:
                    self.user_groups.heard(asked.mark * self.plan.world_size, asked.numbers[1])

    def _unscaled(self, factor: float) -> tuple[Tensor | None, Tensor | float]:
        """1.0, on the device, if scaled gradients are not finite, None where none are scaled; and
        `factor` less the scale of the loss, which is another for the next step."""
        if self.loss_scale is None:
            return None, factor
        own = overflow_of(self.parts.reduced, self.device)
        overflow = largest(own, self.plan.world_size, self.replica)
        less = factor / self.loss_scale.scale
        self.loss_scale.took(overflow)
        return overflow, less

    def _left_out(self, overflow: Tensor | None) -> bool:
        """Whether the step is left out, where the host has to know, and waits for the device: of
        scaled gradients that overflow, or of any that are not finite, as the user wishes."""
        if overflow is None:
            record = self.recorder.record
            left_out = skips(self, () if record is None else record.losses)
        else:
            left_out = not leaves_out(self.optimizer) and bool(overflow)
        if not left_out:
            return False
        for stage in self.parts.stages.values():
            stage.sync.skipped()
        check_heard(self, all_of_them=False)  # which stops no job that leaves steps out
        self.grad_norm = None
        self._stepped()
        return True

    def _stepped(self) -> None:
        self.progress.at(self.state.step, "end", "idle")
        self.state.step += 1
        self.accumulated = 0

    def sum_gradients(self) -> None:
        """After the last batch of a step: each held gradient becomes the sum of all parts."""
        self.progress.at(self.state.step, "gradients", "synchronising")
        self.end.sum_gradients()

    def scale_gradients(self, factor: Tensor | float) -> None:
        """Scales them, and limits their norm if there is a limit."""
        self.grad_norm = self.end.scale_gradients(factor, self.max_grad_norm)

    def update(self) -> None:
        """Steps the optimizer with the gradients as they are."""
        with self.failures.guard():
            self.end.update()
        self._stepped()
