"""`compile(model, plan)`: a job that trains the model as the plan says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.codegen.lower import lower
from meshwright.ir.errors import PlanError
from meshwright.ir.graph import Graph
from meshwright.ir.plan import Plan
from meshwright.ir.schedule import Schedule, Work
from meshwright.ir.step import Batch, LossFn
from meshwright.ir.trace import trace
from meshwright.runtime.batch import BatchCutter, as_batch
from meshwright.runtime.build import RankParts, build_rank
from meshwright.runtime.executor import Executor, Inputs, Progress
from meshwright.runtime.gradients import clip, scale, sum_over_tp
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
from meshwright.runtime.stats import Stats, StepRecord
from meshwright.runtime.tied import sum_ties
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
    timeout_s: float = 1800.0,
) -> "Job":
    """Called by every rank, under torchrun; alone if the plan is for one.

    `optimizer` is a name (default: the plan's), a callable that makes one from parameters, or an
    optimizer over `model.parameters()`. Ranks other than 0 may pass no plan.
    """
    chosen = pick_device(device)
    joined = join(plan.world_size if plan is not None else 2, chosen, timeout_s)
    plan = share_plan(plan)
    check_world(plan)
    if graph is None:
        inputs = example_inputs if example_inputs is not None else _inputs_of(plan)
        graph = trace(model, inputs, loss_fn, global_batch_size=plan.global_batch_size)
    check_model(plan, graph)
    check_identity(identity(plan, graph))
    programs = lower(graph, plan, rank())
    parts = build_rank(plan, graph, programs, model_tensors(model), rank(), chosen, seed)
    made = make_optimizer(optimizer or plan.optimizer, parts.held, lr, model)
    return Job(plan, graph, parts, made, model, chosen, max_grad_norm, timeout_s, joined)


def _inputs_of(plan: Plan) -> Batch:
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
        timeout_s: float = 1800.0,
        owns_world: bool = False,
    ) -> None:
        self.plan, self.graph, self.parts, self.model = plan, graph, parts, model
        self.optimizer, self.device, self.max_grad_norm = optimizer, device, max_grad_norm
        self.state = State()
        self.stats = Stats()
        self.grad_norm: Tensor | None = None
        """Global norm at the last step; None unless gradients are clipped."""
        self.missing = set(parts.missing)
        self.progress = Progress()
        self._owns_world = owns_world
        self._cutter = BatchCutter(graph, plan, parts.programs, parts.rank, device)
        self._trainer = self._executor(training=True)
        self._evaluator = self._executor(training=False)
        self._accumulated = 0

    def step(self, batch: Batch, *, sharded: bool = False) -> Tensor:
        """Trains on one global batch; the loss, the same on every rank.

        Every rank passes the whole batch, or with `sharded` its own part (see `shard`).
        """
        start, record = time.perf_counter(), StepRecord(self.device)
        loss = self._accumulate(batch, record, sharded=sharded, last=True)
        self._apply(record, 1.0)
        self._finish_record(record, start)
        return loss
