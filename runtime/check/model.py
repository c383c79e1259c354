"""The model check: the emitted program of one rank beside the module, on a few samples."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.lower import lower
from meshwright.codegen.one_process import run_local
from meshwright.ir.errors import MeshwrightError
from meshwright.ir.graph.bags import given_bags
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.plan.plan import InputSpec, Plan, ScheduleTable, Stage
from meshwright.ir.trace.loss_module import LossFn, nested_batch
from meshwright.ir.trace.trace import trace
from meshwright.runtime.check.amplified import amplified
from meshwright.runtime.check.data import first_samples
from meshwright.runtime.check.difference import (
    StepOutcome,
    TensorDifference,
    first_difference,
    rounding,
)
from meshwright.runtime.check.plain import Uncheckable, copied, plain_step
from meshwright.runtime.check.short import cut, with_values
from meshwright.runtime.job.weights import model_tensors

SAMPLES = 2


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """What it found."""

    difference: TensorDifference | None
    how: str
    """`2 samples, float64, 10 equal blocks left out`."""
    own: TensorDifference | None = None
    """Where something differs: what plain PyTorch makes of one unit of rounding, if that is as
    much."""


def check_model(
    model: nn.Module, loss_fn: LossFn | None, plan: Plan, graph: Graph,
    batch: Mapping[str, Tensor], *, short: bool,
) -> ModelCheck:  # fmt: skip
    """Compares losses, gradients and buffers; in float64 where the model can.

    `short`: of blocks that repeat, two of each kind. Uncheckable says why there is nothing to
    compare.
    """
    if short:
        with cut(model) as left_out:
            twin = with_values(copied(model))
    else:
        left_out, twin = 0, with_values(copied(model))
    twin = twin.cpu()
    problems = []
    for samples in dict.fromkeys((min(SAMPLES, plan.global_batch_size), plan.global_batch_size)):
        few = first_samples(batch, samples, plan.global_batch_size, given_bags(graph))
        for dtype in (torch.float64, None):
            try:
                found = _compared(twin, loss_fn, plan, few, samples, dtype)
            except MeshwrightError as problem:
                problems.append(str(problem))
                continue
            how = [f"{samples} samples", "float64" if dtype else "its own precision"]
            how += [f"{left_out} equal blocks left out"] if left_out else []
            return ModelCheck(found[0], ", ".join(how), found[1])
    raise Uncheckable(problems[-1])


def _compared(
    twin: nn.Module, loss_fn: LossFn | None, plan: Plan, batch: Mapping[str, Tensor], samples: int,
    dtype: torch.dtype | None,
) -> tuple[TensorDifference | None, TensorDifference | None]:  # fmt: skip
    """What differs, and if something does, what plain PyTorch makes of rounding."""
    if dtype is not None:
        twin = copied(twin).to(dtype)
        batch = {n: x.to(dtype) if x.is_floating_point() else x for n, x in batch.items()}
    source = {name: x.detach().clone() for name, x in model_tensors(twin).items()}
    wanted = plain_step(copied(twin), loss_fn, batch)
    if not wanted.is_finite:
        raise Uncheckable("the loss of plain PyTorch is not finite on the data of the check")
    graph = trace(
        twin, nested_batch(batch), loss_fn, global_batch_size=samples, kernels=plan.kernels
    )
    allowed = rounding(graph)
    differs = first_difference(_emitted(graph, plan, source, batch), wanted, allowed)
    if differs is None:
        return None, None
    return differs, amplified(twin, lambda: plain_step(copied(twin), loss_fn, batch), allowed)


def _emitted(
    graph: Graph, plan: Plan, source: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> StepOutcome:
    """A step of the program for one rank, by torch's autograd."""
    programs = lower(graph, one_rank(plan, graph), 0)
    params: dict[str, Tensor] = {}
    for param in programs[0].params:
        known = graph.tensors[param.name]
        if known.kind is Kind.CONSTANT and known.fqn not in source:
            dtype = getattr(torch, known.dtype)
            params[param.name] = torch.tensor(known.value, dtype=dtype).view(known.shape)
        else:
            # Buffers are written to.
            params[param.name] = source[known.fqn].clone().requires_grad_(param.requires_grad)
    comm = Comm({}, {"dp": 1}, {"dp": 0})
    comm.still = True
    named = dict(zip(graph.input_names, graph.inputs, strict=True))
    try:
        loss = run_local(programs, params, [{named[n]: x for n, x in batch.items()}], comm)
        torch.autograd.backward(loss)
    except RuntimeError as error:
        raise Uncheckable(f"the emitted program of one rank fails ({error})") from error
    return StepOutcome(
        float(loss.detach()),
        {graph.tensors[n].fqn: x.grad for n, x in params.items() if x.requires_grad},
        {
            graph.tensors[n].fqn: x
            for n, x in params.items()
            if graph.tensors[n].kind is Kind.BUFFER
        },
    )


def one_rank(plan: Plan, graph: Graph) -> Plan:
    """All blocks on one rank, in one micro-batch, nothing split."""
    size = graph.batch_size
    stage = Stage(
        first=graph.blocks[0].name, last=graph.blocks[-1].name, mesh={"dp_shard": 1}, devices=(0,),
        batch_shares=(size,),
    )  # fmt: skip
    inputs = tuple(
        InputSpec(name=name, shape=graph.tensors[tensor].shape, dtype=graph.tensors[tensor].dtype)
        for name, tensor in zip(graph.input_names, graph.inputs, strict=True)
    )
    model = replace(plan.model, inputs=inputs, num_blocks=len(graph.blocks))
    return replace(
        plan, model=model, global_batch_size=size, num_microbatches=1, stages=(stage,), layouts=(),
        schedule=ScheduleTable(name="one", rows=("0F0 0B0",)),
    )  # fmt: skip


def repeats(
    model: nn.Module, loss_fn: LossFn | None, batch: Mapping[str, Tensor], graph: Graph
) -> TensorDifference | None:
    """Two steps of plain PyTorch on equal data and buffers: they differ if the module keeps state
    elsewhere, or draws numbers that are not torch's."""
    twin = copied(model)
    before = {name: b.detach().clone() for name, b in twin.named_buffers()}
    found: list[StepOutcome] = []
    for _ in range(2):
        with torch.no_grad():
            for name, b in twin.named_buffers():
                b.copy_(before[name])
        found.append(plain_step(twin, loss_fn, batch))
    first, second = found
    return first_difference(second, first, rounding(graph)) if first.is_finite else None
