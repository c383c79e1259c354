"""What a reader of a plan should know that its numbers do not say."""

from collections.abc import Iterator
from itertools import islice
from math import inf

from meshwright.costmodel.ops.formulas import ROW, curve_of, row_rate
from meshwright.costmodel.ops.kernel_work import forward_gemms
from meshwright.forms.alone import lone_replicas
from meshwright.forms.sync import exchange_of
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.dtypes import is_float
from meshwright.ir.graph.graph import DTYPE_BYTES, Kind
from meshwright.ir.ops import facts
from meshwright.ir.ops.experts import has_narrow_experts
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import PRECISIONS, precision
from meshwright.ir.text.units import size
from meshwright.ir.trace.changing import shared
from meshwright.planner.inside.explain import batch_norms, why_whole
from meshwright.planner.pins.constraints import memory_cap
from meshwright.planner.pins.known import in_order
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.profiles import profile_notes
from meshwright.planner.problem.vocabulary import vocabulary_notes
from meshwright.planner.search.random_notes import random_notes
from meshwright.planner.search.row_notes import row_notes

_FULL = 0.95
"""Who plans to use more of a device's memory should know how far predictions of memory are off."""
_WORTH = 0.005
"""Of all work: products that are less are not worth a note."""
_PADDED = 64
"""What vocabularies are usually padded to: the next multiple costs next to nothing."""
_OFF = "2 to 5% at the median and 5 to 21% in one run of ten"
"""Over the published tables with memory (docs/results/published.md)."""


def notes_of(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Sentences, most important first."""
    measured = profile_notes(problem.tables.profile, problem.cluster)
    return (
        *_decided(problem, plan), *_batch(problem, plan), *_alone(plan), *_buffers(problem, plan),
        *_wider(problem), *_whole(problem, plan),
        *random_notes(problem.graph, plan), *row_notes(problem, plan),
        *_narrow(problem), *_idle(plan), *_untrained(problem), *_rows(problem), *_found(problem),
        *vocabulary_notes(problem.graph, plan), *measured,
    )  # fmt: skip


def _wider(problem: Problem) -> Iterator[str]:
    """Whether a job will compute in wider numbers than those that the plan is priced in: a model in
    float64 stays so, as nothing casts it."""
    priced = precision(problem.precision).all_in
    floats = {tensor.dtype for tensor in problem.graph.parameters if is_float(tensor.dtype)}
    least = min(floats, key=lambda dtype: DTYPE_BYTES[dtype], default=priced)
    if priced and DTYPE_BYTES[least] > DTYPE_BYTES[priced]:
        yield (
            f"all parameters of the model are in {least} and a job leaves them so, but times and "
            f"memory are those of {priced}, in half the bytes: precision {_named_for(least)} says "
            f"what it takes, or make the model {priced} (model.to(torch.{priced}))"
        )


def _named_for(dtype: str) -> str:
    """Returns the precision in which all is in a dtype, as its products are."""
    return next(
        (name for name in PRECISIONS
         if precision(name).all_in == precision(name).products == dtype),
        dtype,
    )  # fmt: skip


def _decided(problem: Problem, plan: Plan) -> Iterator[str]:
    for decision in in_order():
        if decision.notes is not None:
            yield from decision.notes(problem, plan)


def filled(problem: Problem, plan: Plan) -> Iterator[str]:
    """Whether the plan leaves less room than predictions of memory are off; not where the user has
    said how much may be used."""
    assert plan.predicted
    if memory_cap(problem.constraints) is not None or problem.memory_headroom >= 1 - _FULL:
        return
    shares = [
        (predicted.memory.used_bytes / problem.usable_bytes(stage.devices), index)
        for index, (stage, predicted) in enumerate(
            zip(plan.stages, plan.predicted.stages, strict=True)
        )
    ]
    share, index = max(shares)
    if _FULL < share <= 1:
        room = problem.usable_bytes(plan.stages[index].devices)
        yield (
            f"stage {index} fills {share:.1%} of its devices' memory, and predictions of memory "
            f"are off by {_OFF}; the pin 'memory<={size(0.9 * room)}' keeps a tenth free"
        )


def _buffers(problem: Problem, plan: Plan) -> Iterator[str]:
    whole = len(plan.stages) == 1
    for name, blocks in islice(shared(problem.graph).items(), 1 if whole else 0):
        yield (
            f"no pipeline stages are tried: forward changes buffer "
            f"{problem.graph.tensors[name].fqn}, which blocks {blocks[0]} and {blocks[1]} use"
        )


def _batch(problem: Problem, plan: Plan) -> Iterator[str]:
    if not problem.coupling:
        return
    if plan.num_microbatches > 1:
        yield "micro-batches change the result: " + "; ".join(problem.coupling)
    else:
        yield "one micro-batch, because more would change the result: " + problem.coupling[0]
    apart = any(exchange_of(stage).apart for stage in plan.stages)
    if apart and not problem.meeting and len(problem.coupling) > bool(batch_norms(problem.graph)):
        yield "sums over samples are each replica's own, as if all samples were like these"
    if apart and problem.meeting:
        yield f"replicas wait for each other in each micro-batch: {problem.meeting[0]}"
    if batch_norms(problem.graph) and any(stage.dp > 1 for stage in plan.stages):
        if apart:
            yield "statistics of batch norms are each replica's own, averaged for who reads them"
        else:
            yield "the statistics of batch norms are synchronised over dp"


def _whole(problem: Problem, plan: Plan) -> Iterator[str]:
    """Of the layouts that its stages have."""
    used = {name for stage in plan.stages for name in stage.layouts.values()}
    layouts = [layout for layout in plan.layouts if layout.name in used]
    yield from dict.fromkeys(why_whole(problem.graph, layouts))


def _alone(plan: Plan) -> Iterator[str]:
    if not any(exchange_of(stage).apart for stage in plan.stages):
        return
    if (replicas := lone_replicas(plan)) is not None:
        yield (
            f"replicas hear of each other {replicas.lag} steps late: a step returns the loss of a "
            "replica's own samples, and a loss that is no number ends the job so many steps later"
        )
    else:
        yield "replicas meet in each step, for its loss: one that is late holds up the others"


def _idle(plan: Plan) -> Iterator[str]:
    idle = plan.cluster.num_devices - plan.world_size
    if idle > 0:
        yield f"{idle} of {plan.cluster.num_devices} devices are not used"


def _narrow(problem: Problem) -> Iterator[str]:
    """What is rounded to 8 bits."""
    narrow = {t for t in {op.target for op in problem.graph.ops} if facts(t).scaled}
    count = sum(op.target in narrow for op in problem.graph.ops)
    mixed = sum(has_narrow_experts(op) for op in problem.graph.ops)
    if not count and not mixed:
        return
    found = [f"{count} linear layers"] * bool(count) + [f"{mixed} layers of experts"] * bool(mixed)
    yield (
        f"products of {' and '.join(found)} are of 8-bit floats, whose scales are those of a "
        "rank's part of a micro-batch: other splits round otherwise"
    )
    kinds = {device.kind for device in problem.cluster.device_types}
    unknown = [d for d in problem.cluster.device_types if d.kind == "cuda" and not d.capability]
    if mixed and unknown:
        yield (
            "experts' products of 8-bit floats are of torch's grouped kernel with scales by row, "
            "which runs on GPUs of capability 9.0 (H100, H200) only: on others a job of this plan "
            "is refused, and the nearest that runs is bf16 for them, such as *.experts=bf16"
        )
    if "cpu" in kinds:
        yield "CPUs have no fast products of 8-bit floats, and these are priced as others"


def _untrained(problem: Problem) -> Iterator[str]:
    """What is there in narrow numbers only."""
    copies = problem.tables.numbers.copies
    found = [x.fqn for x in problem.graph.parameters if not x.requires_grad and x.dtype == copies]
    if found:
        yield (
            f"{len(found)} parameters that are not trained, such as {found[0]}, are kept in "
            f"{copies} alone, and saved as that"
        )


def _rows(problem: Problem) -> Iterator[str]:
    """Products that are slow because the rows of a weight are not aligned: what a user can change
    by a few more entries."""
    if precision(problem.precision).product_bytes > 2:
        return
    graph, floor = problem.graph, _WORTH * sum(op.flops for op in problem.graph.ops)
    slow: dict[str, str] = {}
    for op in graph.ops:
        if op.flops < floor:
            continue
        operands = [graph.tensors[name] for name in op.inputs]
        weights = [x for x in operands if x.kind is Kind.PARAMETER and len(x.shape) == 2]
        uneven = [(x, n) for x in weights for n in x.shape if n % ROW]
        if not uneven:
            continue
        gemms = forward_gemms(op.target, [x.shape for x in operands], op.flops)
        (weight, values), *_ = uneven
        for device in problem.cluster.device_types:
            curve = curve_of(OpClass.MATMUL, device)
            rate = min((row_rate(gemm, curve) for gemm in gemms), default=inf)
            if rate < inf:
                slow[weight.fqn] = (
                    f"{weight.fqn} has a dim of {values} values, so that rows of its products do "
                    f"not begin at multiples of 16 bytes: they reach {rate / 1e12:.0f} TFLOP/s on "
                    f"{device.name}; {-(-values // _PADDED) * _PADDED} values would be faster"
                )
    yield from slow.values()


def _found(problem: Problem) -> Iterator[str]:
    """Ops whose rules nobody wrote."""
    if targets := problem.tried:
        yield f"how {', '.join(targets)} may be split was found by trying, whole and in parts"
