"""Collectives over a network whose bus bandwidth the job itself measured before it ran.

Gathers and scatters run as rings over all ranks, of which every step waits besides passing its
bytes; what it waits follows from the job's own test and holds for all groups of the job.
All-reduces take the curves of the network's preset, so many times as long as the job's test did.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import log

from meshwright.costmodel.comm import Level, Levels, collective_time
from meshwright.costmodel.curves import curve
from meshwright.ir.conversions import Primitive
from meshwright.ir.device import Curve
from meshwright.ir.preset_links import LINKS

MEASURED = "as measured"
"""Name of a network that stands for the measured one."""

_PER_NODE = 8
_MESSAGE = 2**30
"""Bytes of nanotron's start-up test: its name says 256 MB, its source makes 256 Mi values in fp32.
With so many, the wait per step is the same over 2 and over 64 nodes."""
_CHECKED_GB_S = 440.0
"""All-reduces inside a node, by the same test. Jobs come in two kinds, of 422 to 430 and of 454 to
462 GB/s: torch compares fingerprints of collectives before it starts them, or does not."""
_BROKEN_GB_S = 100.0
"""A node whose collectives are slower than this has a device that does not work as it should."""
_UNCHECKED_GB_S: Mapping[str, Mapping[int, float]] = {
    "ar": {2: 436.1, 4: 219.1, 8: 192.7, 16: 188.4, 32: 194.2, 64: 177.4},
    "ag": {2: 226.3, 4: 229.4, 8: 178.5, 16: 126.7, 32: 77.0, 64: 44.4},
    "rs": {2: 226.4, 4: 215.5, 8: 177.5, 16: 126.5, 32: 77.3, 64: 45.1},
    "intra": {1: 264.9},
}
"""Bus bandwidth by nodes, 95th percentile over many jobs on the cluster of the sweeps (Ultra-Scale
Playbook, pp_comm_bandwidth; the calibration part of the published tables): jobs without the check,
for those whose own test timed the check instead."""
_LEAST_HOP_S = 5e-6


def checked(rates: Mapping[str, float]) -> bool | None:
    """Whether torch compared collectives' fingerprints in the job; None if its test does not say."""
    return rates["ar_intra"] < _CHECKED_GB_S if "ar_intra" in rates else None


def broken(rates: Mapping[str, float]) -> bool:
    """A device of the job did not work as it should."""
    return rates.get("ar_intra", _CHECKED_GB_S) < _BROKEN_GB_S


def as_measured(levels: Levels, rates: Mapping[str, float], nodes: int) -> Levels:
    """Levels whose outer tier has the curves that the measured rates, in GB/s, stand for."""
    if not levels or not rates or levels[-1].link.name != MEASURED:
        return levels
    inside = levels[0].size if len(levels) > 1 else 1
    outer = levels[-1]
    if checked(rates):
        usual = {key: _at(_UNCHECKED_GB_S[key], nodes) for key in ("ar", "ag", "rs")}
        rates = {**usual, "ag_intra": _UNCHECKED_GB_S["intra"][1]}
    curves = (
        _tree(outer.size, rates["ar"], nodes),
        *(
            _ring(operation, outer.size, inside, rates[key], rates["ag_intra"], nodes)
            for operation, key in (("all_gather", "ag"), ("reduce_scatter", "rs"))
        ),
    )
    return (*levels[:-1], Level(outer.size, replace(outer.link, curves=curves)))


def _tree(size: int, measured: float, nodes: int) -> Curve:
    ranks = nodes * _PER_NODE
    took_s = 2 * (ranks - 1) / ranks * _MESSAGE / (measured * 1e9)
    slower = took_s / _preset_s(nodes)
    bent = curve(LINKS["efa-p5"], "all_reduce", size)
    # A knot beyond the last one keeps the last slope.
    knots = (*bent.nbytes[1:], 2 * bent.nbytes[-1] + 1e9)
    points = ((0.0, bent.latency_s), *((n, bent(n)) for n in knots))
    return Curve(operation="all_reduce", size=size,
                 points=tuple((n, slower * s) for n, s in points))  # fmt: skip


@lru_cache(maxsize=16)
def _preset_s(nodes: int) -> float:
    levels = (Level(_PER_NODE, LINKS["nvlink4"]), Level(nodes, LINKS["efa-p5"]))
    return collective_time(Primitive.ALL_REDUCE, _MESSAGE, levels)


def _ring(
    operation: str, size: int, inside: int, measured: float, within: float, nodes: int
) -> Curve:
    """Of `size` devices, one per node, that stand for `inside` times as many."""
    waits_s = (size * inside - 1) * _hop_s(measured, within, nodes)
    slope = (size - 1) / size / (within / _PER_NODE * 1e9)
    return Curve(operation=operation, size=size,
                 points=((0.0, waits_s), (1e9, waits_s + 1e9 * slope)))  # fmt: skip


def _hop_s(busbw: float, within: float, nodes: int) -> float:
    """What a step of the ring waits beyond passing its bytes."""
    ranks = nodes * _PER_NODE
    moved = _MESSAGE * (ranks - 1) / ranks / 1e9
    return max(_LEAST_HOP_S, (moved / busbw - moved / within) / (ranks - 1))


def _at(rates: Mapping[int, float], nodes: int) -> float:
    low = max(n for n in rates if n <= min(nodes, 64))
    high = min(n for n in rates if n >= min(nodes, 64))
    if low == high:
        return rates[low]
    part = log(nodes / low) / log(high / low)
    found: float = rates[low] ** (1 - part) * rates[high] ** part
    return found
