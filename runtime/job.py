"""`compile(model, plan)`: a job that trains the model as the plan says."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.codegen.lower import lower
from meshwright.ir.errors import PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.heap import give_back_freed_memory
from meshwright.ir.measured import Measured, StepKind, TensorMemory
from meshwright.ir.placed import used
from meshwright.ir.plan import Plan
from meshwright.ir.schedule import FORWARDS
from meshwright.ir.step import Batch, LossFn, flatten_batch
from meshwright.ir.trace import trace
from meshwright.runtime import checkpoint
from meshwright.runtime.batch import BatchCutter, as_batch
from meshwright.runtime.build import RankParts, build_rank
from meshwright.runtime.choice import check_choice
from meshwright.runtime.compiling import check_compiler
from meshwright.runtime.executor import Executor, Progress
from meshwright.runtime.export import export
from meshwright.runtime.failure import Failures
from meshwright.runtime.gradients import scaled, sum_over_model
from meshwright.runtime.handshake import (
    check_identity,
    check_model,
    check_world,
    identity,
    share_plan,
)
from meshwright.runtime.mailbox import Mailbox
from meshwright.runtime.messages import plan_messages
from meshwright.runtime.optimizer import OptimizerChoice, make_optimizer
from meshwright.runtime.record import StepRecord
from meshwright.runtime.report import report
from meshwright.runtime.resident import Residence, resident_bytes
from meshwright.runtime.run_dir import begin, prepare, profiling, write
from meshwright.runtime.stats import Stats
from meshwright.runtime.tied import sum_ties
from meshwright.runtime.tracking import tracking, tracking_cuda
from meshwright.runtime.updates import Stepped
from meshwright.runtime.weights import model_tensors
from meshwright.runtime.world import join, pick_device, rank


@dataclass(slots=True)
class State:
    """Where training stands; part of every checkpoint."""

    step: int = 0
    """Optimizer steps taken."""


def compile(
    model: nn.Module,
    plan: Plan | None,
    *,
    optimizer: OptimizerChoice | None = None,
    lr: float | None = None,
    loss_fn: LossFn | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    example_inputs: Batch | None = None,
    graph: Graph | None = None,
    hang_s: float = 1800.0,
    run_dir: str | Path | None = None,
) -> "Job":
    """Called by every rank, under torchrun; alone if the plan is for one.

    `optimizer` is a name (default: the plan's), a callable that makes one from parameters, or an
    optimizer over `model.parameters()`; `max_grad_norm` is the plan's too if not given. Ranks other
    than 0 may pass no plan. A job that makes no progress for `hang_s` seconds is ended. `close`
    leaves in `run_dir` what the steps took.
    """
    residence = Residence(resident_bytes())
    chosen = pick_device(device)
    joined = join(plan.world_size if plan is not None else 2, chosen, hang_s)
    plan = share_plan(plan)
    check_world(plan)
    if run_dir is not None:
        begin(Path(run_dir), plan, rank())
    if graph is None:
        inputs = example_inputs if example_inputs is not None else inputs_of(plan)
        graph = trace(
            model, inputs, loss_fn, global_batch_size=plan.global_batch_size,
            kernels=plan.kernels,
        )  # fmt: skip
    check_model(plan, graph)
    check_identity(identity(plan, graph))
    check_compiler(plan, chosen.type)
    programs = lower(graph, plan, rank())
    parts = build_rank(plan, graph, programs, model_tensors(model), rank(), chosen, seed)
    made = make_optimizer(
        optimizer or plan.optimizer, parts.held, lr, model, by_kernel="bucket_update" in used(plan)
    )
    check_choice(optimizer or plan.optimizer, made, plan, graph, model)
    if isinstance(made, Stepped):
        made.write_over(stage.sync for stage in parts.stages.values())
    norm = plan.max_grad_norm if max_grad_norm is None else max_grad_norm
    if chosen.type == "cpu":
        give_back_freed_memory()
    return Job(plan, graph, parts, made, model, chosen, norm, hang_s, joined, residence, run_dir)


def inputs_of(plan: Plan) -> Batch:
    """A batch of zeros of the shapes that the plan was made for."""
    return as_batch(
        {i.name: torch.zeros(i.shape, dtype=getattr(torch, i.dtype)) for i in plan.model.inputs}
    )


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
        hang_s: float = 1800.0,
        owns_world: bool = False,
        residence: Residence | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self.plan, self.graph, self.parts, self.model = plan, graph, parts, model
        self.optimizer, self.device, self.max_grad_norm = optimizer, device, max_grad_norm
        self.state = State()
        self.stats = Stats()
        self.grad_norm: Tensor | None = None
        """Global norm at the last step; None unless gradients are clipped."""
        self.missing = set(parts.missing)
        self.progress = Progress()
        self.failures = Failures(parts.rank, plan.world_size, self.progress, hang_s)
        self._owns_world = owns_world
        self._run_dir = run_dir
        self.recorder = parts.recorder
        self.tensor_memory: TensorMemory | None = None
        """Of the last step that was tracked."""
        self._cutter = BatchCutter(graph, plan, parts.programs, parts.rank, device)
        self._trainer = self._executor(training=True)
        self._evaluator = self._executor(training=False)
        self._accumulated = 0
        self._spent_s = 0.0
        self.residence = residence or Residence(resident_bytes())
        self.residence.started()

    def step(self, batch: Batch, *, sharded: bool = False) -> Tensor:
        """Trains on one global batch; the loss, the same on every rank.

        Every rank passes the whole batch, or with `sharded` its own part (see `shard`).
        """
        return self._step(batch, "timed" if self.stats.taken else "warm-up", sharded)

    def track_memory(self, batch: Batch, *, sharded: bool = False) -> Tensor:
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
            loss = self._step(batch, "tracked", sharded)
        self.tensor_memory = found[0]
        self.residence.skip()
        return loss

    def trace_step(self, batch: Batch, path: str | Path, *, sharded: bool = False) -> Tensor:
        """Takes a step under torch's profiler and writes its trace, for Perfetto or Chrome.

        It trains as any step does, but more slowly, so its time counts nowhere.
        """
        self.residence.note()
        with profiling(self.recorder, self.device, Path(path)):
            loss = self._step(batch, "traced", sharded)
        self.residence.skip()
        return loss

    def _step(self, batch: Batch, kind: StepKind, sharded: bool) -> Tensor:
        with self._recording(kind) as record:
            record.loss = loss = self._accumulate(batch, sharded=sharded, last=True)
            self._apply(1.0)
        return loss

    def accumulate(self, batch: Batch, *, sharded: bool = False) -> Tensor:
        """Adds a batch's gradients without an optimizer step; `apply` takes it."""
        with self._recording("timed" if self.stats.taken else "warm-up") as record:
            record.loss = loss = self._accumulate(batch, sharded=sharded, last=False)
        return loss

    def apply(self, gradient_scale: float = 1.0) -> None:
        """The optimizer step for what `accumulate` has gathered, scaled (1/n gives the mean)."""
        if not self._accumulated:
            raise PlanError("apply() needs at least one accumulate(batch) before it")
        with self._recording("timed"):
            self._apply(gradient_scale)

    @contextmanager
    def _recording(self, kind: StepKind) -> Iterator[StepRecord]:
        """A step, or a part of one that accumulates batches; what the user does between is not."""
        record = self.recorder.record
        if record is None or not self._accumulated:
            record, self._spent_s = self.recorder.begin(kind), 0.0
        start = time.perf_counter()
        yield record
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._spent_s += time.perf_counter() - start
        if not self._accumulated:
            record.step_s, self.recorder.record = self._spent_s, None
            record.close()
            self.stats.add(record)

    def eval(self, batch: Batch, *, sharded: bool = False) -> Tensor:
        """The loss of a global batch: no dropout, running batch statistics, nothing changes."""
        for stage in self.parts.stages.values():
            stage.comm.training = False
        try:
            with self.failures.guard(), self.recorder.paused():
                return self._run(self._evaluator, batch, sharded)
        finally:
            for stage in self.parts.stages.values():
                stage.comm.training = True

    def shard(self, batch: Batch) -> Batch:
        """This rank's samples of a global batch, for `step(..., sharded=True)`."""
        return as_batch(self._cutter.shard(batch))

    def save(self, folder: str | Path, scheduler: Any = None) -> Path:
        """Writes a checkpoint that any plan for this model can load; every rank calls it."""
        extra = {} if scheduler is None else {"scheduler": scheduler.state_dict()}
        with self.failures.guard():
            return checkpoint.save(self, Path(folder), extra)

    def load(self, folder: str | Path, scheduler: Any = None) -> None:
        """Goes on from the newest checkpoint in `folder`; every rank calls it."""
        with self.failures.guard():
            extra = checkpoint.load(self, Path(folder))
        if scheduler is not None and "scheduler" in extra:
            scheduler.load_state_dict(extra["scheduler"])

    def export(self, folder: str | Path) -> Path | None:
        """Writes the user's module as `model.safetensors`; rank 0 gets its path."""
        with self.failures.guard():
            return export(self, Path(folder))

    def measured(self) -> Measured:
        """What the steps so far took on this rank."""
        return report(
            self.stats, self.residence, self.tensor_memory, self.plan, self.parts, self.device
        )

    def write_run(self, folder: str | Path) -> Path:
        """Writes the plan and what the steps took on this rank; every rank calls it."""
        folder = Path(folder)
        prepare(folder, self.plan, self.parts.rank)
        return write(self.measured(), folder)

    def close(self) -> None:
        """Leaves the job; the last call."""
        if self._run_dir is not None:
            write(self.measured(), Path(self._run_dir))
        self.failures.close()
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()

    def _executor(self, *, training: bool) -> Executor:
        """The loop over this rank's row; evaluation takes only the forwards of it."""
        plan, programs, rank = self.plan, self.parts.programs, self.parts.rank
        schedule = plan.schedule.parse()
        messages = plan_messages(plan, schedule, programs, rank, backward=training)
        mailbox = Mailbox(
            rank,
            messages,
            programs,
            self._cutter.samples,
            self.parts.groups,
            self.device,
            self.recorder,
        )
        row = schedule.ranks[schedule.rank_of(programs[0].index)]
        return Executor(
            row if training else tuple(a for a in row if a.work in FORWARDS),
            self.parts.stages,
            mailbox,
            self._cutter.offsets,
            plan.samples_per_microbatch,
            self.progress,
            self.recorder,
        )

    def _accumulate(self, batch: Batch, *, sharded: bool, last: bool) -> Tensor:
        if self.missing:
            raise PlanError(
                f"{len(self.missing)} tensors have no values, such as {min(self.missing)!r}: the "
                "model was on the meta device; call job.load(dir) first"
            )
        with self.failures.guard():
            stages = self.parts.stages.values()
            for stage in stages:
                if not self._accumulated:
                    stage.sync.begin()
                # Accumulated batches of one step draw different dropout masks.
                stage.comm.step = self.state.step + (self._accumulated << 32)
                stage.reduce_early = last and not self._accumulated
            loss = self._run(self._trainer, batch, sharded)
        self._accumulated += 1
        return loss

    def _run(self, executor: Executor, batch: Batch, sharded: bool) -> Tensor:
        """Runs the schedule; the loss of the whole job."""
        section = self.recorder.section
        with section("batch"):
            parts = self._cutter.cut(batch, sharded=sharded)
        self.progress.at(self.state.step, "totals", "running")
        with section("totals"):
            totals = self._totals(parts)

        def inputs(stage: int, microbatch: int) -> Mapping[str, Tensor]:
            return parts[stage, microbatch] | totals[stage]

        with section("schedule"):
            local = executor.run(inputs)
        with section("loss"):
            loss = self._sum_loss(local)
        self.progress.at(self.state.step, "end", "idle")
        return loss

    def _totals(
        self, parts: Mapping[tuple[int, int], Mapping[str, Tensor]]
    ) -> dict[int, dict[str, Tensor]]:
        """Per stage, the sums over all micro-batches and dp of what the whole batch decides."""
        found: dict[int, dict[str, Tensor]] = {}
        for index, stage in self.parts.stages.items():
            found[index] = {}
            if stage.program.totals is None:
                continue
            for microbatch in range(self.plan.num_microbatches):
                self._trainer.place(index, microbatch)
                made = stage.totals(parts[index, microbatch])
                for name, value in made.items():
                    known = found[index].get(name)
                    found[index][name] = value.clone() if known is None else known + value
            if self.parts.lines[index].dp is not None:
                for value in found[index].values():
                    dist.all_reduce(value, group=self.parts.lines[index].dp)
        return found

    def _sum_loss(self, local: Tensor | None) -> Tensor:
        """The loss of the global batch on every rank."""
        last = len(self.plan.stages) - 1
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if local is not None and self.parts.lines[last].first_of_replica:
            total += local
        if self.plan.world_size > 1:
            self.progress.at(self.state.step, "loss", "synchronising")
            dist.all_reduce(total)
        double = self.graph.tensors[self.graph.loss].dtype == "float64"
        return total if double else total.float()

    def _apply(self, gradient_scale: float) -> None:
        parts, world = self.parts, self.plan.world_size
        with self.failures.guard():
            with self.recorder.section("gradients"):
                self.progress.at(self.state.step, "gradients", "synchronising")
                for index, stage in parts.stages.items():
                    stage.sync.finish()
                    sum_over_model(stage.sync.held, parts.lines[index])
                sum_ties(parts.ties, parts.held, parts.groups, parts.rank)
                self.grad_norm = scaled(
                    self.optimizer, parts.held, parts.counted, gradient_scale, self.max_grad_norm,
                    self.device, world,
                )  # fmt: skip
            with self.recorder.section("optimizer"):
                self.optimizer.step()
            with self.recorder.section("publish"):
                for stage in parts.stages.values():
                    stage.sync.publish()
        self.progress.at(self.state.step, "end", "idle")
        self.state.step += 1
        self._accumulated = 0
