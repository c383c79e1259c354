"""`compile(model, plan)`: a job that trains the model as the plan says."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from meshwright.codegen.lower.lower import lower
from meshwright.forms.methods import refuse_method
from meshwright.ir.garbage import usual_collections
from meshwright.ir.graph.graph import Graph
from meshwright.ir.heap import give_back_freed_memory
from meshwright.ir.placed import used
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.styles import refuse_style
from meshwright.ir.trace.loss_module import Batch, LossFn, nested_batch
from meshwright.ir.trace.trace import trace
from meshwright.runtime.check.run import Checking, wanted
from meshwright.runtime.job.build import RankParts, build_rank
from meshwright.runtime.job.choice import check_choice, check_clipping, check_parts
from meshwright.runtime.job.compiling import check_compiler
from meshwright.runtime.job.handshake import (
    check_identity,
    check_model,
    check_world,
    identity,
    share_plan,
    told_of_another_model,
)
from meshwright.runtime.job.job import Job
from meshwright.runtime.job.stale import check_fresh
from meshwright.runtime.job.weights import model_tensors
from meshwright.runtime.record.resident import Residence, resident_bytes
from meshwright.runtime.record.run_dir import begin
from meshwright.runtime.step.finite import Policy, check_policy
from meshwright.runtime.step.optimizer import OptimizerChoice, make_optimizer
from meshwright.runtime.step.planned_updates import as_one, check_planned, planned_choice
from meshwright.runtime.step.regrouping import Retuning
from meshwright.runtime.step.updates import FormOptimizer
from meshwright.runtime.step.user_groups import UserGroups
from meshwright.runtime.world.patience import HANG_S
from meshwright.runtime.world.world import join, pick_device, rank, take


def compile(
    model: nn.Module,
    plan: Plan | None,
    *,
    optimizer: OptimizerChoice | Sequence[torch.optim.Optimizer] | None = None,
    lr: float | None = None,
    loss_fn: LossFn | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    max_grad_norm: float | None = None,
    example_inputs: Batch | None = None,
    graph: Graph | None = None,
    hang_s: float = HANG_S,
    run_dir: str | Path | None = None,
    check: bool | None = None,
    on_nonfinite: Policy = "stop",
    tune: bool = False,
    rows: str | Path | RowCounts | None = None,
) -> Job:
    """Called by every rank, under torchrun; alone if the plan is for one.

    `optimizer` is a name (default: the plan's), a callable that makes one from parameters, or an
    optimizer over `model.parameters()`, whose groups the job then follows, or a list of such over
    different parameters; `max_grad_norm` is the plan's too if not given. Ranks other than 0 may
    pass no plan; all build the module with the same values. A job that makes no progress for
    `hang_s` seconds is ended, from its eleventh step on maybe earlier, by what it has seen
    (`Patience`). `close` leaves in `run_dir` what the steps took.

    Before it comes back, the job is compared with plain PyTorch on a step that is undone
    (`Job.checked`), unless `check` is False; CheckFailed names the first tensor that differs. A
    loss that is not finite ends the job, or as `on_nonfinite` says. With `tune`, sizes of buckets
    are tried while the job trains, at a small cost, and the fastest is kept (`Job.retuning`).
    `rows` is how often rows of embedding tables occur (`mw.count_rows`, or its file), which caches
    of tables begin with.
    """
    usual_collections()
    check_policy(on_nonfinite)
    counts = RowCounts.load(rows)
    if isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        optimizer = as_one(optimizer)
    check_fresh(model)
    residence = Residence(resident_bytes())
    joined, plan, chosen = _join(plan, device, hang_s)
    if run_dir is not None:
        begin(Path(run_dir), plan, rank())
    if graph is None:
        inputs = example_inputs if example_inputs is not None else inputs_of(plan)
        with told_of_another_model(plan, model):
            graph = trace(
                model, inputs, loss_fn, global_batch_size=plan.global_batch_size,
                kernels=plan.kernels, precision=plan.precision,
            )  # fmt: skip
    check_model(plan, graph)
    check_identity(identity(plan, graph, model, tune))
    check_compiler(plan, chosen.type)
    programs = lower(graph, plan, rank(), chosen.type)
    chosen_optimizer = optimizer or planned_choice(plan)
    check_planned(plan, optimizer)
    checking = Checking.of(
        model, plan, graph, loss_fn, example_inputs, chosen_optimizer, lr, chosen
    ) if wanted(check) else None  # fmt: skip
    parts = build_rank(plan, graph, programs, model_tensors(model), rank(), chosen, seed,
                       rows=counts)  # fmt: skip
    made = _optimizer_of(chosen_optimizer, parts, lr, plan, graph, model)
    norm = plan.max_grad_norm if max_grad_norm is None else max_grad_norm
    check_clipping(plan, norm)
    if chosen.type == "cpu":
        give_back_freed_memory()
    job = Job(plan, graph, parts, made, model, chosen, norm, hang_s, joined, residence, run_dir)
    job.on_nonfinite = on_nonfinite
    if isinstance(optimizer, torch.optim.Optimizer):
        job.user_groups = UserGroups(optimizer, made)
    retuning = Retuning(job) if tune else None  # what cannot be is said before the check
    if checking is not None:
        job.checked = checking.run(job)
    job.retuning = retuning
    return job


def _join(
    plan: Plan | None, device: torch.device | str | None, hang_s: float
) -> tuple[bool, Plan, torch.device]:
    """Meets the other ranks: whether the process group is ours, the plan of all, and this rank's
    device; errors where the job cannot run the plan."""
    kind = None if plan is None else plan.cluster.device_kind
    joined = join(plan.world_size if plan is not None else 2, device, hang_s, kind)
    shared = share_plan(plan)
    check_world(shared)
    refuse_method(shared)
    refuse_style(shared)
    chosen = pick_device(device, shared.cluster.device_kind)
    take(chosen)
    return joined, shared, chosen


def _optimizer_of(
    choice: OptimizerChoice, parts: RankParts, lr: float | None, plan: Plan, graph: Graph,
    model: nn.Module,
) -> torch.optim.Optimizer:  # fmt: skip
    """What steps a rank's parameters; errors where it cannot step them as they are split."""
    by_kernel = "bucket_update" in used(plan)
    made = make_optimizer(choice, parts.held, lr, model, by_kernel=by_kernel)
    check_choice(choice, made, plan, graph, model)
    check_parts(made, parts.stages.values())
    if isinstance(made, FormOptimizer):
        made.write_over(stage.sync for stage in parts.stages.values())
    return made


def inputs_of(plan: Plan) -> Batch:
    """A batch of zeros of the shapes that the plan was made for."""
    return nested_batch(
        {i.name: torch.zeros(i.shape, dtype=getattr(torch, i.dtype)) for i in plan.model.inputs}
    )
