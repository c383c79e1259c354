"""What an allocator reserves beside all that is allocated at one time.

Two things of torch: memory that another stream used comes back only once the GPU is past that use,
while the CPU is ahead of it; and a block that is larger than any that is free is reserved anew.
"""

from collections.abc import Sequence

from benchmarks.published.recipes import Recipe
from benchmarks.published.rows import Row
from benchmarks.published.stages import Part, padded_vocab, site_of

_QUEUE = 1024
"""Launches that CUDA takes before the CPU has to wait."""
_LAUNCHES = (31, 45)
"""Of a layer of nanotron forward and backward under tensor parallelism, counted in its source:
kernels of models/llama.py and of its asynchronous linears, collectives among them."""
_RECORDED = 2
"""Whole values that a layer hands to reduce-scatters each way."""


def late_bytes(row: Row, recipe: Recipe, first: Part) -> float:
    """Freed by the CPU while the GPU has yet to send it, on a rank of the first stage."""
    site = site_of(row, recipe)
    if not (recipe.system.frees_late and site.sp):
        # Without sequence parallelism values are all-reduced in place.
        return 0.0
    return _ahead(row, recipe, first) * 2.0 * site.tokens * row.shape.hidden


def _ahead(row: Row, recipe: Recipe, first: Part) -> float:
    """Sent values that the CPU is ahead of the GPU by."""
    layers, most = len(first.layers), _QUEUE / _LAUNCHES[0]
    if row.early or not layers:
        # Sends and receives let the CPU wait for the GPU.
        return 0.0
    behind = max(0.0, 1 - first.cost.forward_dispatch_s / first.cost.forward_s)
    if row.parallel.pp == 1:
        return _ahead_alone(row, recipe, layers, behind)
    # Until the first gradient comes: as many micro-batches as there are stages. The first two run
    # at the CPU's pace where that is the slower one; then sends wait for the next stage.
    batches = min(row.parallel.pp, row.microbatches)
    return _RECORDED * min(most, layers * (batches if behind else max(0, batches - 2)))


def _ahead_alone(row: Row, recipe: Recipe, layers: int, behind: float) -> float:
    """Without a pipeline: a whole forward, and of the backward before it what the queue holds."""
    if recipe.system.check_s and not behind:
        # Checks keep the ranks' CPUs in step, so that no GPU waits for another rank's.
        return 0.0
    forward = min(_QUEUE / _LAUNCHES[0], layers)
    if row.microbatches == 1:
        return _RECORDED * forward * behind
    backward = (_QUEUE - forward * _LAUNCHES[0]) / _LAUNCHES[1]
    return _RECORDED * (forward + min(backward, layers))


def flat_bytes(row: Row, recipe: Recipe, stages: Sequence[Part]) -> float:
    """Updated parameters in one flat tensor, where no block that activations left holds it."""
    p = row.parallel
    if not recipe.system.gather_copies or p.shard == 1:
        return 0.0
    flat = 2.0 * sum(part.parameters for part in stages)
    return flat if flat > _largest(row, recipe, stages) else 0.0


def _largest(row: Row, recipe: Recipe, stages: Sequence[Part]) -> float:
    """The largest tensor of a forward: logits in fp32, both halves of a gated MLP or a gathered
    input."""
    site, shape = site_of(row, recipe), row.shape
    widths = [2 * 2 * shape.ffn / site.tp, 2 * shape.hidden]
    if any(part.last for part in stages):
        widths.append(4 * padded_vocab(row, recipe) / site.tp)
    return site.tokens * max(widths)
