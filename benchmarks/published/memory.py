"""Peak memory of a rank: states, activations in flight, the loss, buffers and fragmentation."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published.apart import flat_bytes, late_bytes
from benchmarks.published.recipes import Recipe
from benchmarks.published.rows import Row
from benchmarks.published.sites import Ground
from benchmarks.published.stages import Part, padded_vocab, site_of
from meshwright.costmodel.simulate.timeline import Timeline

_FRAGMENTATION = 0.03
"""Reserved beyond what is allocated at the peak; assumption for torch's caching allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the rank that is compared."""

    states_bytes: float
    activations_bytes: float
    transient_bytes: float
    limit_bytes: float
    """What the device has left for torch."""
    context_bytes: int = 0
    """What the device holds beside it: CUDA's context and libraries, as nvidia-smi counts."""
    apart_bytes: float = 0.0
    """Reserved beside it as long as the device has it; the allocator gives it back when short."""

    @property
    def allocated_bytes(self) -> float:
        return self.states_bytes + self.activations_bytes + self.transient_bytes

    @property
    def reserved_bytes(self) -> float:
        return self.allocated_bytes * (1 + _FRAGMENTATION)

    def peak(self, kind: str) -> float:
        if kind == "allocated":
            return self.allocated_bytes
        if kind == "device":
            return self.peak("reserved") + self.context_bytes
        reserved = self.reserved_bytes
        return max(reserved, min(reserved + self.apart_bytes, self.limit_bytes))

    @property
    def fits(self) -> bool:
        return self.reserved_bytes <= self.limit_bytes


def memory_of(
    row: Row, recipe: Recipe, ground: Ground, parts: Sequence[Part], timeline: Timeline
) -> Memory:
    """Of the first stage's rank where the stack logs that one, otherwise of the fullest."""
    ranks = row.parallel.pp
    held = [[part for i, part in enumerate(parts) if i % ranks == rank] for rank in range(ranks)]
    found = [
        _rank(row, recipe, ground, stages, timeline.peak_bytes[rank])
        for rank, stages in enumerate(held)
    ]
    fullest = max(found, key=lambda memory: memory.allocated_bytes)
    if recipe.system.first_stage_memory and row.fits is not False:
        return found[0]
    return fullest


def _rank(
    row: Row, recipe: Recipe, ground: Ground, stages: Sequence[Part], in_flight: int
) -> Memory:
    parameters = sum(part.parameters for part in stages)
    entries = site_of(row, recipe).tokens * padded_vocab(row, recipe) // row.parallel.tp
    system = recipe.system
    loss_bytes = (system.logits_bytes - system.saved_logits_bytes) * entries
    loss = max(part.last * loss_bytes for part in stages)
    inside = max(part.layer.peak_bytes for part in stages)
    transient = max(loss, inside) + _buffers(row, recipe, stages)
    activations = float(in_flight)
    if system.half_gradients:
        # At the end of a backward all its gradients are there in half precision.
        left = in_flight - min(part.cost.saved_bytes for part in stages)
        if left + 2 * parameters > activations + transient:
            activations, transient = float(left), 2.0 * parameters
    step = _step_bytes(row, recipe, parameters)
    if system.step_apart:
        transient += step
    elif step > activations + transient:
        # The optimizer's own peak, when no activations are left.
        activations, transient = 0.0, step
    return Memory(
        states_bytes=_states(row, recipe, parameters),
        activations_bytes=activations,
        transient_bytes=transient,
        limit_bytes=ground.device.usable_bytes,
        context_bytes=ground.device.reserved_bytes,
        apart_bytes=flat_bytes(row, recipe, stages) + late_bytes(row, recipe, stages[0]),
    )


def _wrapped(row: Row, recipe: Recipe) -> bool:
    """Torch DDP wraps the model and keeps buckets."""
    return bool(recipe.system.bucket_bytes) and row.parallel.dp > 1 and row.parallel.zero == 0


def _states(row: Row, recipe: Recipe, parameters: int) -> float:
    system, p = recipe.system, row.parallel
    shard = p.shard if p.zero else 1
    optimizer = system.optimizer_bytes * parameters / shard
    whole = p.zero < 2 or system.reduces_at_once
    gradients = system.gradient_bytes * parameters / (1 if whole else shard)
    values = system.parameter_bytes * parameters / (shard if p.zero == 3 else 1)
    buckets = float(system.bucket_bytes * parameters) if _wrapped(row, recipe) else 0
    return values + gradients + optimizer + buckets


def _step_bytes(row: Row, recipe: Recipe, parameters: int) -> float:
    """While the optimizer runs and what it updated is gathered."""
    system, p = recipe.system, row.parallel
    each = system.step_bytes + (system.flat_bytes if p.zero < 3 else 0)
    step = each * parameters / (p.shard if p.zero else 1)
    if system.gather_copies and p.zero in (1, 2) and p.shard > 1:
        step += parameters * (4 + 2 / p.shard)
    table = min(row.shape.vocab * row.shape.hidden / p.tp, parameters / (p.shard if p.zero else 1))
    return step + system.step_table_bytes * table + system.step_buffer_bytes


def _buffers(row: Row, recipe: Recipe, stages: Sequence[Part]) -> float:
    """Gathered values: sequence parallelism's inputs, FSDP's parameters and their gradients."""
    site = site_of(row, recipe)
    gathered = 2 * 2 * site.tokens * row.shape.hidden if site.sp else 0
    if row.parallel.zero != 3:
        return gathered
    layer = max(part.parameters // max(1, len(part.layers)) for part in stages)
    table = row.shape.vocab * row.shape.hidden // row.parallel.tp
    tables = table * sum(p.first + (p.last and not row.shape.tied) for p in stages)
    if row.parallel.pp > 1:
        # Parameters stay gathered over micro-batches, and gradients are summed in fp32 before they
        # are reduced (torch.distributed.pipelining; FSDP2's to_accumulated_grad_if_needed).
        return gathered + (2 + 4) * sum(part.parameters for part in stages)
    if recipe.system.reduces_at_once:
        # What one layer, or a table, gathers; its gradients are counted among all.
        return gathered + 2 * max(table, layer)
    # The root's tables stay gathered in half precision. Gathers write buffers of another stream,
    # whose memory is its own, and are copied out of them: the tables, or two layers. Gradients of
    # one layer are in half precision and cast to fp32.
    return gathered + 2 * tables + 2 * max(tables, 2 * layer) + 2 * 2 * layer + (2 + 4) * layer
