"""Collectives over a network whose bus bandwidth the job itself measured before it ran.

Gathers and scatters run as rings over all ranks, of which every step waits besides passing its
bytes; what it waits follows from the job's own test and holds for all groups of the job.
All-reduces take the curves of the network's preset, so many times as long as the job's test did.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import log
from statistics import median

from meshwright.costmodel.comm.comm import Level, Levels, collective_time
from meshwright.costmodel.comm.curves import curve
from meshwright.ir.cluster.device import Curve
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.presets import LINKS

MEASURED = "as measured"
"""Name of a network that stands for the measured one."""

_PER_NODE = 8
_MESSAGE = 2**30
"""Bytes of nanotron's start-up test: its name says 256 MB, its source makes 256 Mi values in fp32.
With so many, the wait per step is the same over 4 and over 64 nodes."""
_RING_GB_S = 334.0
"""What rings of p5.48xlarge reach over 2 and 4 nodes with 2 GiB (benchmarks/tables/nccl_p5.csv)."""
_CHECKED_GB_S = 440.0
"""All-reduces inside a node, by the same test. Jobs come in two kinds, of 422 to 430 and of 454 to
462 GB/s: torch compares fingerprints of collectives before it starts them, or does not."""
_BROKEN_GB_S = 100.0
"""A node whose collectives are slower than this has a device that does not work as it should."""
_UNCHECKED_GB_S: Mapping[str, Mapping[int, float]] = {
    "ar": {2: 436.1, 4: 219.1, 8: 192.7, 16: 188.4, 32: 194.2, 64: 177.4},
    "ag": {2: 226.3, 4: 229.4, 8: 178.5, 16: 126.7, 32: 77.0, 64: 44.4},
    "rs": {2: 226.4, 4: 215.5, 8: 177.5, 16: 126.5, 32: 77.3, 64: 45.1},
}
"""Bus bandwidth by nodes, 95th percentile over many jobs on the cluster of the sweeps (Ultra-Scale
Playbook, pp_comm_bandwidth; the calibration part of the published tables): jobs without the check,
for those whose own test timed the check instead."""
_LEAST_HOP_S = 5e-6


def usual_rates(nodes: int) -> dict[str, float]:
    """GB/s of jobs that do not check their collectives, by operation."""
    return {key: _at(lines, nodes) for key, lines in _UNCHECKED_GB_S.items()}


def checked(rates: Mapping[str, float]) -> bool | None:
    """Whether torch compared fingerprints of the job's collectives; None without a test."""
    found = rates.get("ar_intra")
    return found < _CHECKED_GB_S if found else None


def broken(rates: Mapping[str, float]) -> bool:
    """A device of the job did not work as it should."""
    return (rates.get("ar_intra") or _CHECKED_GB_S) < _BROKEN_GB_S


def as_measured(levels: Levels, rates: Mapping[str, float], nodes: int) -> Levels:
    """Levels whose outer tier has the curves that the measured rates, in GB/s, stand for."""
    if not levels or not rates or levels[-1].link.name != MEASURED:
        return levels
    inside = levels[0].size if len(levels) > 1 else 1
    outer = levels[-1]
    known = {} if checked(rates) else {key: rate for key, rate in rates.items() if rate}
    rates = usual_rates(nodes) | known
    curves = (
        _tree(outer.size, rates["ar"], nodes),
        *(
            _ring(operation, key, outer.size, inside, rates[key], nodes)
            for operation, key in (("all_gather", "ag"), ("reduce_scatter", "rs"))
        ),
    )
    return (*levels[:-1], Level(outer.size, replace(outer.link, curves=curves)))


def _tree(size: int, measured: float, nodes: int) -> Curve:
    """The preset's, as much slower as the job's test; beyond the test's bytes at its rate."""
    ranks = nodes * _PER_NODE
    rate = measured * 1e9
    slower = 2 * (ranks - 1) / ranks * _MESSAGE / rate / _preset_s(nodes)
    bent = curve(LINKS["efa-p5"], "all_reduce", size)
    last = float(_MESSAGE // _PER_NODE)
    knots = (0.0, *(n for n in bent.nbytes[1:] if n < last), last)
    points = [(n, slower * bent(n)) for n in knots]
    points.append((2 * last, points[-1][1] + 2 * (size - 1) / size * last / (rate / _PER_NODE)))
    return Curve(operation="all_reduce", size=size, points=tuple(points))


@lru_cache(maxsize=16)
def _preset_s(nodes: int) -> float:
    levels = (Level(_PER_NODE, LINKS["nvlink4"]), Level(nodes, LINKS["efa-p5"]))
    return collective_time(Primitive.ALL_REDUCE, _MESSAGE, levels)


def _ring(operation: str, key: str, size: int, inside: int, measured: float, nodes: int) -> Curve:
    """Of `size` devices, one per node, that stand for `inside` times as many."""
    usual = _UNCHECKED_GB_S[key]
    slower = _hop_s(measured, nodes) / _hop_s(_at(usual, nodes), nodes)
    hop_s = slower * median(_hop_s(rate, n) for n, rate in usual.items())
    waits_s = (size * inside - 1) * hop_s
    slope = (size - 1) / size / (_RING_GB_S / _PER_NODE * 1e9)
    return Curve(operation=operation, size=size,
                 points=((0.0, waits_s), (1e9, waits_s + 1e9 * slope)))  # fmt: skip


def _hop_s(busbw: float, nodes: int) -> float:
    """What a step of the ring waits beyond passing its bytes."""
    ranks = nodes * _PER_NODE
    moved = _MESSAGE * (ranks - 1) / ranks / 1e9
    return max(_LEAST_HOP_S, (moved / busbw - moved / _RING_GB_S) / (ranks - 1))


def _at(rates: Mapping[int, float], nodes: int) -> float:
    low = max(n for n in rates if n <= min(nodes, 64))
    high = min(n for n in rates if n >= min(nodes, 64))
    if low == high:
        return rates[low]
    part = log(nodes / low) / log(high / low)
    found: float = rates[low] ** (1 - part) * rates[high] ** part
    return found
