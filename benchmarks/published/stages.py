"""Cuts a model into stages and prices each: compute, kept bytes, parameters."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from benchmarks.published.ends import embedding, head
from benchmarks.published.layers import layer
from benchmarks.published.measured import RowError
from benchmarks.published.recipes import Recipe
from benchmarks.published.rows import Row
from benchmarks.published.site import Site, announced
from benchmarks.published.sites import Ground
from benchmarks.published.systems import System
from benchmarks.published.times import Cost, cost, recomputed
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.layout.layout import balanced


@dataclass(frozen=True, slots=True)
class Part:
    """One stage of the pipeline on one rank."""

    layers: range
    cost: Cost
    parameters: int
    """Of this rank, tp already divided out."""
    first: bool
    last: bool
    layer: Cost
    """Of its dearest layer."""


def site_of(row: Row, recipe: Recipe) -> Site:
    """What a rank sees of a micro-batch."""
    p, shape = row.parallel, row.shape
    if shape.heads % p.tp:
        raise RowError(f"{shape.heads} heads cannot be divided by tp {p.tp}")
    sp = recipe.system.sequence_parallel if p.sp is None else bool(p.sp)
    return Site(
        shape=shape, system=recipe.system, mbs=row.mbs, seq=row.seq, tp=p.tp, cp=p.cp, ep=p.ep,
        sp=sp and p.tp > 1, async_tp=p.async_tp and recipe.system.tp_overlap != "nanotron",
        dtype=recipe.dtype, half=recipe.half, rowwise="rowwise" in row.precision,
        exact_weight_gradients="gw_hp" in row.precision,
        current_scaling="current" in row.precision or "-cs" in row.precision.lower(),
    )  # fmt: skip


def stages_of(row: Row, recipe: Recipe, ground: Ground) -> tuple[Part, ...]:
    """All stages, in the order of the layers."""
    site, shape, p = site_of(row, recipe), row.shape, row.parallel
    count = p.pp * p.vpp
    cuts = _cuts(row, recipe.system, count)
    costs = {
        (experts, turn): _layer_cost(site, recipe, ground, experts, turn)
        for experts in {shape.has_experts(i) for i in range(shape.layers)}
        for turn in (False, True)
    }
    vocab = padded_vocab(row, recipe)
    ends = tuple(
        cost(announced(site, pieces), ground) for pieces in (embedding(site), head(site, vocab))
    )
    parts = []
    for index, (layers, with_head) in enumerate(cuts):
        total, worst = Cost(), Cost()
        for i in layers:
            one = costs[shape.has_experts(i), i % recipe.every == recipe.every - 1]
            total, worst = total + one, max(worst, one, key=lambda c: c.backward_s)
        if index == 0:
            total += ends[0]
        if with_head:
            total += ends[1]
        held = _parameters(row, layers, index == 0, with_head, vocab, len(cuts))
        total += _accumulation(recipe, ground, held)
        if recipe.system.blocks_launches:
            total = total.one_by_one()
        parts.append(Part(layers, total, held, index == 0, with_head, worst))
    return tuple(parts)


def _accumulation(recipe: Recipe, ground: Ground, parameters: int) -> Cost:
    """Adding a micro-batch's gradients to the buffer, beyond what the kernels do."""
    rate = ground.device.memory_bandwidth_bytes_per_s
    share = ground.device.efficiency.get(OpClass.ELEMENTWISE, 1.0)
    return Cost(backward_s=recipe.system.accumulate_bytes * parameters / (rate * share))


def padded_vocab(row: Row, recipe: Recipe) -> int:
    multiple = recipe.system.vocab_multiple * row.parallel.tp
    return -(-row.shape.vocab // multiple) * multiple


def _layer_cost(site: Site, recipe: Recipe, ground: Ground, experts: bool, turn: bool) -> Cost:
    pieces = layer(site, experts)
    entry = 2 * site.shared * site.shape.hidden
    mode = recipe.mode if turn or recipe.every == 1 else "none"
    forward, backward = recipe.system.layer_dispatch_s
    if site.tp > 1:
        more = recipe.system.tp_dispatch_s
        forward, backward = forward + more[0], backward + more[1]
    calls = Cost(forward_dispatch_s=forward, backward_dispatch_s=backward)
    compiled = recipe.system.pointwise == "compiled"
    early = recipe.system.stops_early
    cost = recomputed(pieces, mode, entry, ground, compiled=compiled, stops_early=early)
    return cost + calls


def _cuts(row: Row, system: System, count: int) -> list[tuple[range, bool]]:
    if system.cost_partition:
        return _cost_cuts(row, count)
    if row.parallel.ends_are_layers:
        return _with_ends(row, count)
    return _full_cuts(row, count) if system.full_stages else _equal_cuts(row, count)


def _with_ends(row: Row, count: int) -> list[tuple[range, bool]]:
    """Equal stages, of which the first has the embedding and the last the head for a layer, or
    nothing else."""
    layers = row.shape.layers
    ends = [0, *(end - 1 for end in accumulate(balanced(layers + 2, count)))]
    ends[-1] = layers
    spans = [range(a, b) for a, b in pairwise(ends)]
    return [(span, index == count - 1) for index, span in enumerate(spans)]


def _full_cuts(row: Row, count: int) -> list[tuple[range, bool]]:
    layers = row.shape.layers
    size = ceil(layers / count)
    ends = [min(layers, size * i) for i in range(count + 1)]
    return [(range(a, b), i == count - 1) for i, (a, b) in enumerate(pairwise(ends))]


def _equal_cuts(row: Row, count: int) -> list[tuple[range, bool]]:
    if row.shape.layers + 2 < count:
        raise RowError(
            f"{row.shape.layers} layers, the embedding and the loss cannot fill {count} stages; "
            f"nearest is {row.shape.layers + 2}"
        )
    if row.shape.layers < count:  # embedding and loss are stages of their own
        return _with_ends(row, count)
    sizes = balanced(row.shape.layers, count)
    ends = list(accumulate(sizes))
    spans = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [(span, index == count - 1) for index, span in enumerate(spans)]


def _cost_cuts(row: Row, count: int) -> list[tuple[range, bool]]:
    """nanotron (models/base.py): blocks go to a stage until their cumulative cost passes its
    share (or reaches it, as the static memory of the sweep's runs shows); layers and the head
    count, embedding, norms and loss do not."""
    shape = row.shape
    each = 4 * shape.heads * shape.head_dim * shape.hidden + 3 * shape.ffn * shape.hidden
    costs = [0, *[each] * shape.layers, 0, shape.vocab * shape.hidden]
    total, stage, cumulative = sum(costs), 0, 0
    placed = []
    for block in costs:
        placed.append(min(stage, count - 1))
        cumulative += block
        if cumulative >= total * (stage + 1) / count:
            stage += 1
    of_layers = placed[1 : 1 + shape.layers]
    # By the times of the sweep's deep pipelines the head shares no rank with layers unless they
    # reach to the last; its source would put it behind them.
    of_head = min(max(placed[-1], of_layers[-1] + 1), count - 1)
    cuts, start = [], 0
    for index in range(count):
        size = of_layers.count(index)
        cuts.append((range(start, start + size), index == of_head))
        start += size
    return cuts


def _parameters(row: Row, layers: range, first: bool, last: bool, vocab: int, count: int) -> int:
    shape, p = row.shape, row.parallel
    split = 0
    for i in layers:
        dense = shape.attention_parameters
        dense += shape.expert_parameters // p.ep if shape.has_experts(i) else shape.mlp_parameters
        split += dense // p.tp + 2 * shape.norm_parameters
    table = vocab * shape.hidden // p.tp
    if first:
        split += table + shape.positions * shape.hidden
    if last:
        split += shape.norm_parameters
        # A tied head on another stage has a copy of its own.
        split += 0 if shape.tied and count == 1 else table
    return split
