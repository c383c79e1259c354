"""What a step adds to the passes: gradient reduction, parameter gathering and the optimizer."""

from dataclasses import dataclass
from math import ceil, prod

from benchmarks.published.recipes import Recipe
from benchmarks.published.rows import Row
from benchmarks.published.sites import Ground
from benchmarks.published.stages import Part
from meshwright.costmodel.comm.comm import Levels, broadcast_time, collective_time
from meshwright.costmodel.memory.memory import optimizer_traffic
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.layout.conversions import Primitive

_PYTHON_STEP_S = 5e-3
"""Data loading, logging and bookkeeping once per step; assumption."""
_BUCKET_BYTES = 25 * 2**20
"""Of torch DDP."""
_TENSORS_PER_LAYER = 9


@dataclass(frozen=True, slots=True)
class Extra:
    """Seconds of one stage beyond its passes."""

    first_forward_s: float = 0.0
    """Before the first forward."""
    per_forward_s: float = 0.0
    per_backward_s: float = 0.0
    after_s: float = 0.0
    """After the last backward."""


def extra_of(row: Row, recipe: Recipe, ground: Ground, part: Part) -> Extra:
    """Of one stage."""
    zero, system = row.parallel.zero, recipe.system
    update = _update_s(row, recipe, ground, part)
    if system.gradient_sync == "fsdp" or zero == 3:
        return _fsdp(row, recipe, ground, part, update)
    after = update + _exposed_reduction(row, recipe, ground, part)
    if zero in (1, 2) and system.gather_parameters:
        gathered = system.parameter_bytes * part.parameters
        if system.broadcasts:
            after += _broadcasts_s(gathered, ground.shard)
        else:
            after += collective_time(Primitive.ALL_GATHER, gathered, ground.shard)
        after += 2 * _relaid_s(row, recipe, ground, part)
    return Extra(after_s=after)


def _broadcasts_s(nbytes: float, levels: Levels) -> float:
    """Each rank's part to all others. NCCL broadcasts along a chain of all ranks."""
    ranks = prod(level.size for level in levels)
    chain, inner = 0.0, 1
    for level in levels:
        chain += level.link.step_s * (level.size - 1) * ranks / (inner * level.size)
        inner *= level.size
    return ranks * (broadcast_time(nbytes / ranks, levels) + chain)


def _reduction_s(row: Row, nbytes: float, ground: Ground, split: bool) -> float:
    if not split:
        return collective_time(Primitive.ALL_REDUCE, nbytes, ground.dp)
    seconds = collective_time(Primitive.REDUCE_SCATTER, nbytes, ground.shard)
    part = nbytes / max(1, row.parallel.shard)
    return seconds + collective_time(Primitive.ALL_REDUCE, part, ground.replicate)


def _exposed_reduction(row: Row, recipe: Recipe, ground: Ground, part: Part) -> float:
    """Beside the last backward where buckets overlap it; the embedding's bucket comes last."""
    system, zero = recipe.system, row.parallel.zero
    nbytes = float(system.sync_bytes * part.parameters)
    plain = zero == 0 or system.reduces_all
    # nanotron all-reduces the whole buffer under ZeRO-1, without DDP.
    overlaps = system.gradient_sync == "ddp" and not (system.name == "nanotron" and zero)
    count = _buckets(row, part, system.bucket) if overlaps and system.bucket else 1
    seconds = count * _reduction_s(row, nbytes / count, ground, split=not plain)
    if not overlaps:
        return seconds
    table = row.shape.vocab * row.shape.hidden // row.parallel.tp if part.first else 0
    last = max(float(system.sync_bytes * table), float(_BUCKET_BYTES))
    tail = _reduction_s(row, min(last, nbytes), ground, split=not plain)
    checks = count * system.check_s * (row.parallel.dp - 1)
    waits = max(0.0, part.cost.backward_dispatch_s + checks - part.cost.backward) if checks else 0.0
    return (
        max(tail, seconds - system.hidden * part.cost.backward)
        + waits
        + _slowed_s(seconds, system.hidden * part.cost.backward, ground.dp)
    )


def _slowed_s(seconds: float, work_s: float, levels: Levels) -> float:
    """Collectives take processors and memory bandwidth from the work that hides them."""
    slower = max((level.link.overlap_compute_slowdown for level in levels), default=1.0)
    return (slower - 1) * min(seconds, work_s)


def _buckets(row: Row, part: Part, most: int) -> int:
    """A bucket is full once it has so many bytes, in half precision here."""
    shape, count, held = row.shape, 0, 0
    q, kv, mlp = shape.hidden**2, 2 * shape.hidden * shape.kv_width, shape.mlp_parameters
    layer = [mlp // 3, 2 * mlp // 3, q, q + kv] if shape.gated else [mlp // 2, mlp // 2, q, q + kv]
    table = [shape.vocab * shape.hidden]
    for values in table * part.last + layer * len(part.layers) + table * part.first:
        held += 2 * values // row.parallel.tp
        if held >= most:
            count, held = count + 1, 0
    return max(1, count + (held > 0))


def _update_s(row: Row, recipe: Recipe, ground: Ground, part: Part) -> float:
    """Clipping, Adam in fp32, the copy to half precision and clearing of gradients."""
    system, p, device = recipe.system, row.parallel, ground.device
    own = part.parameters / (p.shard if p.zero else 1)
    if system.whole_parameters and p.zero in (1, 2) and part.first:
        own = max(own, row.shape.vocab * row.shape.hidden / p.tp)
    traffic = optimizer_traffic(ceil(4 * own), "adamw")
    traffic += system.update_bytes * own + system.bucket_copy_bytes * part.parameters
    traffic += system.clip_bytes * (own if p.zero == 3 else part.parameters)
    traffic += (4 + system.parameter_bytes) * own
    traffic += system.gradient_bytes * (own if p.zero >= 2 else part.parameters)
    rate = device.memory_bandwidth_bytes_per_s * device.efficiency.get(OpClass.ELEMENTWISE, 1.0)
    tensors = _TENSORS_PER_LAYER * len(part.layers) + 3
    return max(traffic / rate, 3 * tensors * device.overhead_s) + _PYTHON_STEP_S


def _fsdp(row: Row, recipe: Recipe, ground: Ground, part: Part, update: float) -> Extra:
    """Gathers are prefetched by one layer, reductions follow by one; the ends are exposed."""
    count = max(1, len(part.layers))
    table = row.shape.vocab * row.shape.hidden // row.parallel.tp
    ends = part.first * table + part.last * (0 if row.shape.tied and part.first else table)
    each = (part.parameters - ends) / count
    width = 1 if "all-gather" in row.precision and "float8 all-gather" in row.precision else 2
    gather = collective_time(Primitive.ALL_GATHER, width * each, ground.shard)
    reduce = _reduction_s(row, recipe.system.sync_bytes * each, ground, split=True)
    first = collective_time(Primitive.ALL_GATHER, 2 * table, ground.shard) if part.first else 0.0
    forward, backward = part.layer.forward, part.layer.backward
    if recipe.system.gradient_sync == "end":
        # Compiled programs of that time run one thing after the other.
        again = _relaid_s(row, recipe, ground, part)
        gathers, reductions = count * gather + again, count * reduce + again
        return Extra(0.0, first + gathers, gathers + reductions, update)
    tail = _reduction_s(row, 4 * (each + part.first * table), ground, split=True)
    if row.parallel.pp > 1:
        # With a pipeline parameters stay gathered; gradients are reduced once.
        hidden = max(0.0, count * (gather - forward))
        hidden += _slowed_s(count * gather, count * forward, ground.shard)
        left = max(0.0, count * reduce - part.cost.backward)
        left += _slowed_s(count * reduce, part.cost.backward, ground.shard)
        return Extra(first + gather + hidden, 0.0, 0.0, update + left + tail)
    both = gather + reduce
    ahead = max(0.0, gather - forward) + _slowed_s(gather, forward, ground.shard)
    behind = max(0.0, both - backward) + _slowed_s(both, backward, ground.shard)
    return Extra(0.0, first + gather + count * ahead, count * behind, update + tail)


def _relaid_s(row: Row, recipe: Recipe, ground: Ground, part: Part) -> float:
    """Copying experts' weights between the layouts of products and of collectives."""
    shape, device = row.shape, ground.device
    if not recipe.system.relays_experts or row.parallel.shard == 1:
        return 0.0
    layers = sum(shape.has_experts(i) for i in part.layers)
    nbytes = 2 * layers * shape.expert_parameters // row.parallel.ep
    rate = device.memory_bandwidth_bytes_per_s * device.efficiency.get(OpClass.COPY, 1.0)
    return 2 * nbytes / rate


def tied_s(row: Row, parts: int, ground: Ground, levels: Levels) -> float:
    """Summing the gradients of a table that first and last stage share."""
    if not row.shape.tied or parts == 1:
        return 0.0
    table = 4 * row.shape.vocab * row.shape.hidden // row.parallel.tp
    return collective_time(Primitive.ALL_REDUCE, table, levels)
