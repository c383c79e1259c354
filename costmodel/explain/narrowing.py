"""What to measure first: by how much each measurement narrows the bands of predicted steps.

Nothing is priced anew: a plan's band is made of the bands of its parts (`explain.breakdown`), and
one that was measured has that of measurements.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.costmodel.estimate import Estimate, bands_of
from meshwright.costmodel.explain.breakdown import Bands, error_band
from meshwright.costmodel.ops.formulas import SOURCE_BAND
from meshwright.costmodel.simulate.step import by_stage
from meshwright.ir.cluster.device import LINK_BAND
from meshwright.ir.plan.predicted import Breakdown

LINKS = "collectives"
"""The measurement of all that goes between devices."""
OPTIMIZER = "optimizer"
_OPS_BAND, _LINKS_BAND = SOURCE_BAND["measured"], LINK_BAND["measured"]
_LEAST = 1e-3
"""Bands that differ by less are alike."""


@dataclass(frozen=True, slots=True)
class Narrowing:
    """One measurement, when all before it in its list have been made."""

    measured: str
    """A pattern of blocks, `collectives` or `optimizer`."""
    before: float
    """The mean relative error that the plans state."""
    after: float


@dataclass(frozen=True, slots=True)
class _KnownWork:
    """What the band of a plan is made of."""

    parts: Breakdown
    bands: Bands
    computing_s: float
    """Of a micro-batch in the stages of the rank that waits least, collectives inside included."""
    patterns: Mapping[str, tuple[float, float]]
    """Of each pattern of blocks, seconds without collectives, and those times relative error."""
    links: tuple[float, float]
    """The same of collectives inside blocks."""

    def band(self, measured: frozenset[str]) -> float:
        """Relative error of the step once this is known."""
        certain_s = 0.0
        for pattern, (seconds, uncertain_s) in self.patterns.items():
            if pattern in measured:
                certain_s += max(0.0, uncertain_s - _OPS_BAND * seconds)
        bands = self.bands
        if LINKS in measured:
            seconds, uncertain_s = self.links
            certain_s += max(0.0, uncertain_s - _LINKS_BAND * seconds)
            bands = replace(
                bands, gradients=min(bands.gradients, _LINKS_BAND),
                gather=min(bands.gather, _LINKS_BAND),
            )  # fmt: skip
        if OPTIMIZER in measured:
            bands = replace(bands, optimizer=min(bands.optimizer, _OPS_BAND))
        if certain_s:
            less = certain_s / self.computing_s
            bands = replace(bands, compute=max(0.0, bands.compute - less))
        return error_band(self.parts, bands)


def narrowings(estimates: Sequence[Estimate]) -> tuple[Narrowing, ...]:
    """Returns the measurements that narrow the bands of plans, the one that narrows them most
    first, then what does so most once that is known."""
    known = [_known(one) for one in estimates]
    left = {name for one in known for name in (*one.patterns, LINKS, OPTIMIZER)}
    return tuple(_in_turn(known, left))


def _in_turn(known: Sequence[_KnownWork], left: set[str]) -> Iterator[Narrowing]:
    measured = frozenset[str]()
    now = _mean_band(known, measured)
    while left:
        bands = {name: _mean_band(known, measured | {name}) for name in sorted(left)}
        best = min(bands, key=bands.__getitem__)
        if now - bands[best] < _LEAST:
            return
        yield Narrowing(best, now, bands[best])
        measured, now = measured | {best}, bands[best]
        left = left - {best}


def _mean_band(known: Sequence[_KnownWork], measured: frozenset[str]) -> float:
    return sum([one.band(measured) for one in known]) / len(known)


def _known(found: Estimate) -> _KnownWork:
    parts = found.prediction.breakdown
    assert parts
    own = by_stage(found.stepped.timeline.table.owners)[parts.rank]
    patterns, uncertain = defaultdict[str, float](float), defaultdict[str, float](float)
    sent_s = sent_uncertain_s = 0.0
    for costs in [found.costs[i] for i in own]:
        links = [level.link.band for levels in costs.spot.model_levels for level in levels]
        for block, cost in zip(costs.blocks, costs.cost.blocks, strict=True):
            comm_s = cost.comm_forward_s + cost.comm_backward_s
            doubt_s = min(cost.uncertain_s, comm_s * max(links, default=0.0))
            whole_s = cost.forward_s + cost.backward_input_s + cost.backward_weight_s
            patterns[block.pattern] += whole_s - comm_s
            uncertain[block.pattern] += cost.uncertain_s - doubt_s
            sent_s, sent_uncertain_s = sent_s + comm_s, sent_uncertain_s + doubt_s
    return _KnownWork(
        parts=parts,
        bands=bands_of(found.costs, found.models, own),
        computing_s=sum([found.costs[i].cost.forward_s + found.costs[i].cost.backward_s
                         for i in own]),
        patterns={name: (patterns[name], uncertain[name]) for name in patterns},
        links=(sent_s, sent_uncertain_s),
    )  # fmt: skip
