"""Blocks whose times a profile has, or has of other numbers of samples.

A measurement leaves collectives out: those are priced by the model of the links and added.
"""

from collections.abc import Callable
from dataclasses import replace
from math import log2

from meshwright.costmodel.block.block import NOT_EASED, BlockCost
from meshwright.costmodel.block.price_ops import Walk
from meshwright.costmodel.ops.compute import worst_source
from meshwright.ir.cluster.device import Source
from meshwright.ir.profile.profile import BlockRecord, Timing

_LEAST_BAND = {"cpu": 0.10, "cuda": 0.05}
"""From one run to the next on one machine, of which the spread of single calls says nothing: three
of four plans that benchmarks/accuracy/main.py ran were within it; assumption on GPUs."""
_BETWEEN_BAND = 0.03
_BEYOND_BAND = 0.08
"""Per doubling of the distance from the samples that were measured. Assumptions."""
_ALONE_BAND = 0.15
"""Of a block split on model axes that is known by the whole one only; assumption."""
_MOST_OFF = 3.0
"""More than that is no error of the model but another kind of work."""

Known = tuple[BlockRecord, BlockCost]
"""A measurement, and what the model says of the same block."""


def measured_cost(
    cost: BlockCost, walk: Walk, record: BlockRecord, source: Source = "measured", band: float = 0.0
) -> BlockCost:
    """The cost with computation as it was measured; `band` comes on top of that of measuring."""
    accumulate = record.accumulate.median_s if record.accumulate else 0.0
    whole = record.backward.median_s
    share, halves = _input_share(cost, record)
    seconds = record.forward.median_s + whole + accumulate
    alone = record.no_grad_forward
    return replace(
        cost,
        forward_s=record.forward.median_s + cost.comm_forward_s,
        backward_input_s=whole * share + cost.comm_backward_s,
        backward_weight_s=whole * (1.0 - share) + accumulate,
        no_grad_s=alone.median_s + cost.comm_forward_s if alone else None,
        accumulate_s=accumulate,
        split_s=max(0.0, halves - whole - accumulate) if halves else 0.0,
        saved_bytes=max(0, record.saved_bytes - sum(cost.saved_outputs)),
        workspace_bytes=record.workspace_bytes,
        eased_bytes=0,
        late_bytes=0,
        adding_bytes=None,
        leaving=NOT_EASED,
        forward_bytes=0,
        halving_bytes=None,
        second_bytes=None,
        second_adding_bytes=None,
        source=worst_source([source, *_links(cost, walk)]),
        uncertain_s=seconds * (band + _LEAST_BAND[walk.site.device.kind])
        + walk.clock.comm_uncertain_s,
    )


def _input_share(cost: BlockCost, record: BlockRecord) -> tuple[float, float]:
    """(the share of the backward that is for its inputs, seconds of both halves if measured)."""
    if record.backward_input and record.backward_weight:
        inputs, weights = record.backward_input.median_s, record.backward_weight.median_s
        # Halves are timed where gradients are there; a part of the weights' is adding to them.
        adding = record.accumulate.median_s if record.accumulate else 0.0
        bare = max(0.0, weights - adding)
        return inputs / max(inputs + bare, 1e-12), inputs + weights
    inputs = cost.backward_input_s - cost.comm_backward_s
    return inputs / max(inputs + cost.backward_weight_s, 1e-12), 0.0


def _links(cost: BlockCost, walk: Walk) -> list[Source]:
    """How well the links are known, where the block communicates."""
    if not cost.comm_forward_s and not cost.comm_backward_s:
        return []
    site = walk.site
    return [
        level.link.source
        for axis, levels in site.levels.items()
        if site.axes[axis].size > 1
        for level in levels
    ]


def between(low: BlockRecord, high: BlockRecord, samples: int) -> tuple[BlockRecord, float]:
    """(a record on the line between two, the band of that)."""
    part = (samples - low.samples) / (high.samples - low.samples)

    def line(a: float, b: float) -> float:
        return a + part * (b - a)

    found = _mapped(low, lambda name: _combined(getattr(low, name), getattr(high, name), line))
    found = replace(
        found,
        samples=samples,
        saved_bytes=round(line(low.saved_bytes, high.saved_bytes)),
        workspace_bytes=round(line(low.workspace_bytes, high.workspace_bytes)),
    )
    return found, _BETWEEN_BAND * log2(high.samples / low.samples) / 2


def beside(known: Known, cost: BlockCost, samples: int) -> tuple[BlockRecord, float]:
    """(a record in proportion to what the model says of both, the band of that).

    More samples never take less, nor more than as many times as much.
    """
    record, theirs = known
    low, high = sorted((1.0, samples / record.samples))

    def ratio(mine: float, other: float) -> float:
        return min(high, max(low, mine / other)) if other > 0.0 else 1.0

    forward = ratio(cost.forward_s - cost.comm_forward_s, theirs.forward_s - theirs.comm_forward_s)
    scaled = {
        "forward": forward,
        "no_grad_forward": forward,
        "backward": ratio(
            cost.backward_s - cost.comm_backward_s, theirs.backward_s - theirs.comm_backward_s
        ),
        "backward_input": ratio(
            cost.backward_input_s - cost.comm_backward_s,
            theirs.backward_input_s - theirs.comm_backward_s,
        ),
        "backward_weight": ratio(cost.backward_weight_s, theirs.backward_weight_s),
        "accumulate": 1.0,
    }
    saved = ratio(_kept(cost), _kept(theirs))
    found = _mapped(record, lambda name: _times(getattr(record, name), scaled[name]))
    found = replace(
        found,
        samples=samples,
        saved_bytes=round(record.saved_bytes * saved),
        workspace_bytes=round(record.workspace_bytes * saved),
    )
    return found, _BEYOND_BAND * abs(log2(samples / record.samples))


def as_alone(cost: BlockCost, measured: BlockCost, modelled: BlockCost) -> BlockCost:
    """The cost of a block of which nothing was measured, corrected as the model errs on the same
    block where nothing is split: `measured` and `modelled`, with about as much work per rank."""

    def ratio(real: float, said: float) -> float:
        return min(_MOST_OFF, max(1 / _MOST_OFF, real / said)) if said > 0.0 and real > 0.0 else 1.0

    forward = ratio(
        measured.forward_s - measured.comm_forward_s, modelled.forward_s - modelled.comm_forward_s
    )
    backward = ratio(
        measured.backward_s - measured.comm_backward_s,
        modelled.backward_s - modelled.comm_backward_s,
    )
    alone = cost.forward_s - cost.comm_forward_s
    inputs = cost.backward_input_s - cost.comm_backward_s
    seconds = forward * alone + backward * (inputs + cost.backward_weight_s)
    return replace(
        cost,
        forward_s=forward * alone + cost.comm_forward_s,
        backward_input_s=backward * inputs + cost.comm_backward_s,
        backward_weight_s=backward * cost.backward_weight_s,
        uncertain_s=max(cost.uncertain_s, seconds * _ALONE_BAND),
    )


def _kept(cost: BlockCost) -> float:
    return cost.saved_bytes + sum(cost.saved_outputs) + sum(cost.output_bytes)


def _mapped(record: BlockRecord, timing: Callable[[str], Timing | None]) -> BlockRecord:
    forward, backward = timing("forward"), timing("backward")
    assert forward and backward
    return replace(
        record,
        forward=forward,
        backward=backward,
        backward_input=timing("backward_input"),
        backward_weight=timing("backward_weight"),
        no_grad_forward=timing("no_grad_forward"),
        accumulate=timing("accumulate"),
    )


def _combined(
    low: Timing | None, high: Timing | None, line: Callable[[float, float], float]
) -> Timing | None:
    if low is None or high is None:
        return None
    return replace(
        low, median_s=line(low.median_s, high.median_s), spread=max(low.spread, high.spread)
    )


def _times(timing: Timing | None, ratio: float) -> Timing | None:
    return timing and replace(timing, median_s=timing.median_s * ratio)
