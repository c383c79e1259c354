"""Runs a traced model under a plan on simulated ranks, and compares it with the model itself."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.lower import lower
from meshwright.codegen.one_process import run_local
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.graph.param import Param
from meshwright.ir.plan.plan import (
    BlockLayout,
    ClusterId,
    InputSpec,
    ModelId,
    Plan,
    ScheduleTable,
    Stage,
)
from meshwright.testing.simulated import simulate
from meshwright.testing.whole_values import held


def plan_of(
    graph: Graph,
    layouts: Sequence[BlockLayout],
    shares: tuple[int, ...],
    count: int = 1,
    cuts: Sequence[int] = (),
) -> Plan:
    """All ranks run all stages; `cuts` are the block numbers at which new stages start."""
    model = layouts[0].model
    size = prod(size for _, size in model)
    borders = [0, *cuts, len(graph.blocks)]
    stages = tuple(
        Stage(
            first=graph.blocks[start].name, last=graph.blocks[stop - 1].name,
            mesh={"dp_replicate": 1, "dp_shard": len(shares), **dict(model)},
            devices=tuple(range(size * len(shares))), batch_shares=shares,
            layouts={layout.pattern: layout.name for layout in layouts},
        )
        for start, stop in pairwise(borders)
    )  # fmt: skip
    inputs = tuple(
        InputSpec(name=n, shape=graph.tensors[n].shape, dtype=graph.tensors[n].dtype)
        for n in graph.inputs
    )
    return Plan(
        model=ModelId(name="", fingerprint="", num_parameters=0, num_blocks=len(graph.blocks),
                      inputs=inputs),
        cluster=ClusterId(name="", fingerprint="", num_devices=size * len(shares)),
        global_batch_size=graph.batch_size, num_microbatches=count, optimizer="sgd",
        precision="fp64", stages=stages, schedule=ScheduleTable(name="", rows=("0F0 0B0",)),
        layouts=tuple(layouts),
    )  # fmt: skip


def whole_tensor(model: nn.Module, graph: Graph, name: str) -> Tensor:
    """A parameter, buffer or constant of the model."""
    tensor = graph.tensors[name]
    dtype = getattr(torch, tensor.dtype)
    if tensor.kind is Kind.CONSTANT and not tensor.fqn:
        return torch.tensor(tensor.value, dtype=dtype).reshape(tensor.shape)
    path, _, last = tensor.fqn.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), last)
    return found.detach().to(dtype)


def run_plan(
    model: nn.Module, graph: Graph, plan: Plan, batch: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the whole gradient of each parameter by its path."""
    stage, count = plan.stages[0], plan.num_microbatches
    shares = stage.batch_shares

    def body(comm: Comm) -> tuple[Tensor, dict[str, tuple[Param, Tensor]]]:
        dp = comm.coordinates["dp"]
        programs = lower(graph, plan, rank_of(stage, comm))
        starts = [m * sum(shares) + sum(shares[:dp]) for m in range(count)]
        batches = [samples_of(graph, batch, start, shares[dp]) for start in starts]
        grads: dict[str, tuple[Param, Tensor]] = {}
        params = {p.name: p for program in programs for p in program.params}
        stored = {
            name: held(whole_tensor(model, graph, name), p.runs).clone()
            for name, p in params.items()
        }
        for name, p in params.items():
            stored[name].requires_grad_(p.requires_grad)
        loss = run_local(programs, stored, batches, comm, starts)
        loss.backward()
        for name, p in params.items():
            if p.requires_grad:
                grad = stored[name].grad
                total = torch.zeros_like(stored[name]) if grad is None else grad
                same = (q for g in programs for q in g.params if q.name == name)
                for axis in dict.fromkeys(("dp", *(a for q in same for a in q.sum_over))):
                    total = comm.sum_over(total, axis)
                grads[p.fqn] = (p, total)
        return comm.sum_over(loss.detach(), "dp"), grads

    results = simulate({"dp": stage.dp, **dict(stage.model)}, body)
    return results[0][0], {
        fqn: together([grads[fqn] for _, grads in results]) for fqn in results[0][1]
    }


def rank_of(stage: Stage, comm: Comm) -> int:
    """The global rank of a simulated one."""
    position = 0
    for axis, size in (("dp", stage.dp), *stage.model):
        position = position * size + comm.coordinates[axis]
    return stage.devices[position]


def samples_of(
    graph: Graph, batch: Mapping[str, Tensor], start: int, size: int
) -> dict[str, Tensor]:
    named = zip(graph.inputs, graph.input_names, strict=True)
    return {
        name: batch[key][start : start + size] if name in graph.batch_inputs else batch[key]
        for name, key in named
    }


def together(parts: Sequence[tuple[Param, Tensor]]) -> Tensor:
    """The whole gradient; every rank's part of it must be what it holds."""
    param = parts[0][0]
    shape = param.global_shape
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    whole = torch.full(shape, torch.nan, dtype=parts[0][1].dtype).flatten()
    for p, grad in parts:
        whole[held(index, p.runs).flatten()] = grad.flatten()
    for p, grad in parts:
        mine = held(whole.reshape(shape), p.runs)
        torch.testing.assert_close(grad, mine, rtol=1e-9, atol=1e-12, msg=param.fqn)
    return whole.reshape(shape)
