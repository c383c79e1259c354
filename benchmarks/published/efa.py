"""Collectives over a network whose bus bandwidth the job itself measured before it ran.

Gathers and scatters run as rings, whose steps each wait for the slowest hop: over many nodes the
bandwidth falls because the steps do not get shorter with the message, and small messages take what
so many messages between nodes take. All-reduces run as trees and are taken at their bandwidth.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, log, log2

from meshwright.costmodel.comm import Level, Levels
from meshwright.ir.device import Curve

MEASURED = "as measured"
"""Name of a network that stands for the measured one."""

_GB_S: Mapping[str, Mapping[int, float]] = {
    "all_reduce": {2: 361.7, 4: 160.1, 8: 99.6, 16: 84.7, 32: 64.9, 64: 32.9},
    "all_gather": {2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0, 64: 11.0},
    "reduce_scatter": {2: 181.6, 4: 115.8, 8: 68.6, 16: 54.5, 32: 27.9, 64: 11.1},
}
"""Bus bandwidth by nodes of 8 H100 at 256 MiB, centre lines over many jobs on the cluster of the
sweeps (Ultra-Scale Playbook, pp_comm_bandwidth; the calibration part of the published tables)."""
_BEST_GB_S = 229.0
"""The best ring over several nodes there: 4 nodes, 95th percentile."""
_KEYS = {"all_reduce": "ar", "all_gather": "ag", "reduce_scatter": "rs"}
_MESSAGE = 256 * 2**20
_PER_NODE = 8
_MESSAGE_S = 8e-5
"""One message between GPUs over EFA: all-reduces of 256 KiB to 1 MiB over 4 nodes of AWS P6 (the
calibration part) take 0.36 to 0.38 ms, of which two levels of a tree up and down are four."""
_LEAST_HOP_S = 5e-6


def as_measured(levels: Levels, rates: Mapping[str, float], nodes: int) -> Levels:
    """Levels whose outer tier has the curves that the measured rates, in GB/s, stand for.

    A group of m of the job's n nodes behaves as usual for m nodes, but for the log m / log n'th
    power of the job's departure from the usual: few nodes seldom include the slowest.
    """
    if not levels or not rates or levels[-1].link.name != MEASURED:
        return levels
    inside = levels[0].size if len(levels) > 1 else 1
    outer = levels[-1]
    curves = tuple(
        _curve(name, outer.size, inside, rates[key], nodes)
        for name, key in _KEYS.items()
        if key in rates
    )
    return (*levels[:-1], Level(outer.size, replace(outer.link, curves=curves)))


def _curve(operation: str, size: int, inside: int, measured: float, nodes: int) -> Curve:
    """Of `size` devices, one per node, that stand for `inside` times as many."""
    usual, weight = _GB_S[operation], log(size) / log(nodes)
    here, job = _between(usual, size), _between(usual, nodes)
    if operation == "all_reduce":
        latency = least = 2 * ceil(log2(size)) * _MESSAGE_S
        rate, rounds = here * (measured / job) ** weight, 2
    else:
        hop = _hop_s(here, size) * (_hop_s(measured, nodes) / _hop_s(job, nodes)) ** weight
        steps = size * inside - 1
        latency, least, rate, rounds = steps * hop, steps * _MESSAGE_S, _BEST_GB_S, 1
    slope = rounds * (size - 1) / size / (rate / _PER_NODE * 1e9)
    bend = max(1.0, (least - latency) / slope)
    first = latency + bend * slope
    points = ((1.0, first), (bend, first)) if bend > 1.0 else ((1.0, first),)
    far = 1e9 + bend
    return Curve(operation=operation, size=size, points=(*points, (far, latency + far * slope)))


def _hop_s(busbw: float, nodes: int) -> float:
    """What a step of the ring waits beyond passing its bytes."""
    ranks = nodes * _PER_NODE
    moved = _MESSAGE * (ranks - 1) / ranks / 1e9
    return max(_LEAST_HOP_S, (moved / busbw - moved / _BEST_GB_S) / (ranks - 1))


def _between(usual: Mapping[int, float], nodes: int) -> float:
    low = max(n for n in usual if n <= min(nodes, 64))
    high = min(n for n in usual if n >= min(nodes, 64))
    if low == high:
        return usual[low]
    part = log(nodes / low) / log(high / low)
    found: float = usual[low] ** (1 - part) * usual[high] ** part
    return found
