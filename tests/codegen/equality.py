"""Runs a traced model under a plan on simulated ranks, and compares it with the model itself."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from meshwright.codegen.comm import Comm
from meshwright.codegen.lower import lower
from meshwright.codegen.one_process import run_local
from meshwright.codegen.program import Param
from meshwright.codegen.simulated import simulate
from meshwright.codegen.whole import part
from meshwright.ir.graph import Graph, Kind
from meshwright.ir.layout import Axis
from meshwright.ir.plan import (
    BlockLayout,
    ClusterId,
    InputSpec,
    ModelId,
    Plan,
    ScheduleTable,
    Stage,
)


def plan_of(
    graph: Graph,
    layouts: Sequence[BlockLayout],
    shares: tuple[int, ...],
    count: int = 1,
    cuts: Sequence[int] = (),
) -> Plan:
    """All ranks run all stages; `cuts` are the block numbers at which new stages start."""
    tp = layouts[0].tp
    borders = [0, *cuts, len(graph.blocks)]
    stages = tuple(
        Stage(
            first=graph.blocks[start].name, last=graph.blocks[stop - 1].name,
            mesh={"dp_replicate": 1, "dp_shard": len(shares), "tp": tp},
            devices=tuple(range(tp * len(shares))), batch_shares=shares,
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
        cluster=ClusterId(name="", fingerprint="", num_devices=tp * len(shares)),
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
        dp, tp = comm.coordinates["dp"], comm.coordinates["tp"]
        programs = lower(graph, plan, stage.devices[dp * stage.tp + tp])
        starts = [m * sum(shares) + sum(shares[:dp]) for m in range(count)]
        batches = [samples_of(graph, batch, start, shares[dp]) for start in starts]
        grads: dict[str, tuple[Param, Tensor]] = {}
        params = {p.name: p for program in programs for p in program.params}
        held = {
            name: part(whole_tensor(model, graph, name), p.tp, Axis(stage.tp), tp).clone()
            for name, p in params.items()
        }
        for name, p in params.items():
            held[name].requires_grad_(p.requires_grad)
        loss = run_local(programs, held, batches, comm, starts)
        loss.backward()
        for name, p in params.items():
            if p.requires_grad:
                grad = held[name].grad
                total = comm.sum_over(torch.zeros_like(held[name]) if grad is None else grad, "dp")
                summed = any(q.sum_over_tp for g in programs for q in g.params if q.name == name)
                grads[p.fqn] = (p, comm.sum_over(total, "tp") if summed else total)
        return comm.sum_over(loss.detach(), "dp"), grads

    results = simulate({"dp": stage.dp, "tp": stage.tp}, body)
    return results[0][0], {
        fqn: _together([grads[fqn] for _, grads in results[: stage.tp]], stage.tp)
        for fqn in results[0][1]
    }


def samples_of(
    graph: Graph, batch: Mapping[str, Tensor], start: int, size: int
) -> dict[str, Tensor]:
    named = zip(graph.inputs, graph.input_names, strict=True)
    return {
        name: batch[key][start : start + size] if name in graph.batch_inputs else batch[key]
        for name, key in named
    }


def _together(parts: Sequence[tuple[Param, Tensor]], tp: int) -> Tensor:
    """The whole gradient; every rank's share of it must be what its placement says."""
    param = parts[0][0]
    shape = param.global_shape
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    whole = torch.zeros(shape, dtype=parts[0][1].dtype).flatten()
    for rank, (_, grad) in enumerate(parts):
        whole[part(index, param.tp, Axis(tp), rank).flatten()] = grad.flatten()
    for rank, (_, grad) in enumerate(parts):
        mine = part(whole.reshape(shape), param.tp, Axis(tp), rank)
        torch.testing.assert_close(grad, mine, rtol=1e-9, atol=1e-12, msg=param.fqn)
    return whole.reshape(shape)
