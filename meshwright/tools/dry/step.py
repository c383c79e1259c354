"""One step of one rank on fake tensors: the runtime's own loop, with no peer and no memory."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from meshwright.ir.graph.bags import given_bags
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.measured import TensorMemory
from meshwright.ir.torch_fake import fake_world
from meshwright.ir.torch_private import fake_mode
from meshwright.ir.trace.loss_module import nested_batch
from meshwright.runtime.job.build import RankParts, build_rank
from meshwright.runtime.messages.mailbox import Mailbox
from meshwright.runtime.messages.messages import plan_messages
from meshwright.runtime.record.tracking import tracking
from meshwright.runtime.step.batch import BatchCutter
from meshwright.runtime.step.executor import Executor, RankProgress
from meshwright.runtime.step.optimizer import make_optimizer
from meshwright.runtime.step.planned_updates import planned_choice
from meshwright.runtime.step.step_end import StepEnd
from meshwright.tools.dry.classes import RankClass

CPU = torch.device("cpu")


def step_rank(plan: Plan, short: Plan, graph: Graph, group: RankClass) -> TensorMemory:
    """The most that the rank's tensors hold in a step. `short` has fewer micro-batches."""
    with fake_world(plan.world_size, group.rank), fake_mode():
        parts = build_rank(
            plan, graph, group.programs, _weights(graph), group.rank, CPU, 0, shared=False
        )
        optimizer = make_optimizer(planned_choice(plan), parts.held, None, torch.nn.Module())
        batch = _batch(plan, short, graph)
        end = StepEnd(parts, optimizer, CPU, plan.world_size)
        memory = _tracked(plan, short, graph, parts, batch, end)
        if optimizer.state or not parts.is_settled:
            # The optimizer now has its state, and a step begins with what the one before has left.
            memory = _tracked(plan, short, graph, parts, batch, end)
    left_out = sum(_nbytes(x) for x in _batch_specs(plan)) - sum(x.nbytes for x in batch.values())
    return replace(
        memory,
        peak_bytes=memory.peak_bytes + left_out,
        inputs_bytes=memory.inputs_bytes + left_out,
    )


def _tracked(
    plan: Plan, short: Plan, graph: Graph, parts: RankParts, batch: Mapping[str, Tensor],
    end: StepEnd,
) -> TensorMemory:  # fmt: skip
    with tracking(parts, end.optimizer, batch.values()) as found:
        _step(plan, short, graph, parts, batch, end)
    return found[0]


def _weights(graph: Graph) -> dict[str, Tensor]:
    """The user's model, by module path, without memory."""
    return {
        tensor.fqn: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        for tensor in graph.tensors.values()
        if tensor.kind in (Kind.PARAMETER, Kind.BUFFER)
    }


def _batch_specs(plan: Plan) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(i.shape, getattr(torch, i.dtype)) for i in plan.model.inputs]


def _nbytes(spec: tuple[tuple[int, ...], torch.dtype]) -> int:
    return prod(spec[0]) * spec[1].itemsize


def _batch(plan: Plan, short: Plan, graph: Graph) -> dict[str, Tensor]:
    """A batch of the fewer micro-batches; what is not per sample stays as it is."""
    found = {}
    ends = {bags.offsets for bags in given_bags(graph).values() if bags.last}
    for spec, (shape, dtype) in zip(plan.model.inputs, _batch_specs(plan), strict=True):
        if shape and shape[0] % plan.global_batch_size == 0:
            per_sample = shape[0] // plan.global_batch_size
            shape = (per_sample * short.global_batch_size, *shape[1:])
        elif spec.name in ends:
            shape = (short.global_batch_size + 1,)
        found[spec.name] = torch.empty(shape, dtype=dtype)
    return found


def _step(
    plan: Plan, short: Plan, graph: Graph, parts: RankParts, batch: Mapping[str, Tensor],
    end: StepEnd,
) -> None:  # fmt: skip
    _schedule(short, graph, parts, batch)
    end.sum_gradients()
    end.scale_gradients(1.0, plan.max_grad_norm)
    end.update()


def _schedule(short: Plan, graph: Graph, parts: RankParts, batch: Mapping[str, Tensor]) -> None:
    programs, schedule = parts.programs, short.schedule.parse()
    cutter = BatchCutter(graph, short, programs, parts.rank, CPU)
    mailbox = Mailbox(
        parts.rank, plan_messages(short, schedule, programs, parts.rank), programs,
        cutter.samples, parts.groups, CPU, parts.recorder,
    )  # fmt: skip
    executor = Executor(
        schedule.ranks[schedule.rank_of(programs[0].index)], parts.stages, mailbox,
        cutter.offsets, short.samples_per_microbatch, RankProgress(), parts.recorder,
    )  # fmt: skip
    for stage in parts.stages.values():
        stage.sync.begin()
    cut = cutter.cut(nested_batch(batch), sharded=False)
    totals = {
        index: stage.totals(cut[index, 0]) if stage.program.totals else {}
        for index, stage in parts.stages.items()
    }
    executor.run(lambda stage, microbatch: cut[stage, microbatch] | totals[stage])
