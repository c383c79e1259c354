"""What a cluster is made of: device types and links, and quantities with written-out units."""

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import isfinite, log
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict

from meshwright.ir.cluster.launching import Casting, Launching
from meshwright.ir.errors import PlanError
from meshwright.ir.text.plain_text import shown


class OpClass(StrEnum):
    """Kinds of work that reach different shares of a device's peak."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    RECURRENT = "recurrent"
    NORMALIZATION = "normalization"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    TRANSCENDENTAL = "transcendental"
    """Elementwise with a function that costs arithmetic, or random numbers."""
    GATHER = "gather"
    COPY = "copy"
    VIEW = "view"


COMPUTE = frozenset({OpClass.MATMUL, OpClass.ATTENTION, OpClass.CONVOLUTION, OpClass.RECURRENT})
"""Classes whose efficiency is a share of peak FLOP/s; that of the others is one of bandwidth."""

Source = Literal["measured", "interpolated", "fitted", "datasheet", "assumption"]
"""How a constant or a time is known, most certain first."""

_SCALE = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
          "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}  # fmt: skip
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_UNITS = {
    "bytes": {f"{prefix}B": scale for prefix, scale in _SCALE.items()},
    "rate": {f"{prefix}{unit}/s": scale * factor for prefix, scale in _SCALE.items()
             for unit, factor in (("B", 1.0), ("b", 0.125))},
    "time": _TIME,
    "flops": {f"{prefix}FLOP/s": scale for prefix, scale in _SCALE.items()},
}  # fmt: skip
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z/]+)")
_EXAMPLE = {"bytes": "80GB or 80GiB", "rate": "300GB/s or 100Gb/s", "time": "5us",
            "flops": "312TFLOP/s"}  # fmt: skip


def _near(match: re.Match[str] | None, kind: str) -> str:
    """The same with a unit that differs in capitals alone, if there is one such."""
    meant = [unit for unit in _UNITS[kind] if match and unit.lower() == match[2].lower()]
    return f"nearest is {match[1] + meant[0]!r}, or " if match and len(meant) == 1 else ""


def parse_quantity(value: object, kind: str) -> object:
    """The number of bytes, bytes/s, seconds or FLOP/s that a text such as `100Gb/s` names.

    What is not a text passes unchanged.
    """
    if not isinstance(value, str):
        return value
    match = _QUANTITY.fullmatch(value.strip())
    if not match or match[2] not in _UNITS[kind]:
        raise PlanError(
            f"{shown(value)} is not a {kind} quantity; {_near(match, kind)}write for example "
            f"{_EXAMPLE[kind]}"
        )
    number = float(match[1]) * _UNITS[kind][match[2]]
    if not isfinite(number):
        raise PlanError(f"{shown(value)} is beyond the range of a float")
    return round(number) if kind == "bytes" else number


Bytes = Annotated[int, BeforeValidator(lambda v: parse_quantity(v, "bytes"))]
Rate = Annotated[float, BeforeValidator(lambda v: parse_quantity(v, "rate"))]
Seconds = Annotated[float, BeforeValidator(lambda v: parse_quantity(v, "time"))]
Flops = Annotated[float, BeforeValidator(lambda v: parse_quantity(v, "flops"))]


def _check(what: str, value: float, low: float, high: float, hint: str = "") -> None:
    """Raises PlanError unless `value` is a finite number in [low, high]."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # what is no number or not finite is not between
        raise PlanError(f"{what} is {shown(value)}; it must be between {low:g} and {high:g}{hint}")


OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
"""What a link can carry."""

LINK_BAND: Mapping[Source, float] = {
    "measured": 0.1,
    "interpolated": 0.15,
    "fitted": 0.2,
    "datasheet": 0.35,
    "assumption": 0.6,
}
"""Relative error of a link's times where nothing says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of one operation among `size` devices: alpha-beta between points of (bytes, seconds).

    The points are where algorithms and protocols switch. Below the first its time holds; beyond the
    last the rate of the last two goes on.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    operation: str
    size: int
    points: tuple[tuple[float, float], ...]
    """Bytes of the whole value, as if replicated on the group; of the message for send."""

    def __post_init__(self) -> None:
        what = f"curve of {self.operation!r} for {self.size} devices: "
        if self.operation not in OPERATIONS:
            raise PlanError(f"{what}no such operation; the operations are {', '.join(OPERATIONS)}")
        if self.size < 2:
            raise PlanError(f"{what}a group has 2 devices or more")
        if not self.points:
            raise PlanError(f"{what}it needs at least one point (bytes, seconds)")
        for (nbytes, seconds), (more, longer) in pairwise(((-1.0, 0.0), *self.points)):
            if not (nbytes < more < 1e18 and seconds <= longer < 1e6):
                raise PlanError(
                    f"{what}point ({more!r}, {longer!r}) after ({nbytes!r}, {seconds!r}); bytes "
                    "must ascend and seconds must not fall"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How one tier of a cluster carries bytes: alpha-beta constants per device and direction.

    Where a curve is known for an operation it takes the place of the constants.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    bandwidth_bytes_per_s: Rate
    """What each device gets in one direction when all devices of a node use the tier at once."""
    latency_s: Seconds
    """From the call to the first byte of a point-to-point message."""
    efficiency: float = 1.0
    """Share of the bandwidth that collectives reach with large messages."""
    launch_s: Seconds = 0.0
    """Once per collective."""
    step_s: Seconds = 0.0
    """Per step of a ring or tree collective."""
    shared_by: int = 1
    """Devices of a node that share one port; one that uses it alone gets so many times as much."""
    curves: tuple[Curve, ...] = ()
    """With all groups of their kind at work at once."""
    overlap_compute_slowdown: float = 1.0
    """How many times as long computation takes while the device communicates on this link."""
    overlap_comm_slowdown: float = 1.0
    """How many times as long a collective takes while its members compute."""
    beside: tuple[tuple[float, float, float], ...] = ()
    """(bytes, the two slowdowns) where they were measured, ascending: between these they follow the
    logarithm of the bytes. Long messages slow computing down more than short ones."""
    fit_error: float | None = None
    """Relative error of the curves or constants where it is known."""
    source: Source = "assumption"
    reference: str = ""

    def __post_init__(self) -> None:
        what = f"link {self.name!r}: "
        hint = "; plain numbers are bytes per second, a text has its unit: 300GB/s or 100Gb/s"
        _check(what + "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, 1e5, 1e15, hint)
        _check(what + "efficiency", self.efficiency, 1e-3, 1.0)
        for name in ("latency_s", "launch_s", "step_s"):
            value = getattr(self, name)
            _check(what + name, value, 0.0, 1.0, "; plain numbers are seconds, or write 5us")
        _check(what + "shared_by", self.shared_by, 1, 1024)
        for name in ("overlap_compute_slowdown", "overlap_comm_slowdown"):
            _check(what + name, getattr(self, name), 1.0, 100.0)
        least = 1.0
        for nbytes, *slowdowns in self.beside:
            _check(what + "bytes in beside", nbytes, least, 1e18, ", in ascending order")
            least = nbytes + 1.0
            for value in slowdowns:
                _check(what + "a slowdown in beside", value, 1.0, 100.0)
        if self.fit_error is not None:
            _check(what + "fit_error", self.fit_error, 0.0, 10.0)

    def __hash__(self) -> int:
        # Costs are looked up by link very often, and curves are long.
        return hash((self.name, self.bandwidth_bytes_per_s, self.latency_s))

    @property
    def rate(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bandwidth_bytes_per_s * self.efficiency

    def slowdowns(self, nbytes: float) -> tuple[float, float]:
        """Of computing, and of a collective of so many bytes beside it."""
        if not self.beside:
            return self.overlap_compute_slowdown, self.overlap_comm_slowdown
        place = bisect_right(self.beside, nbytes, key=lambda point: point[0])
        before, after = (
            self.beside[min(max(at, 0), len(self.beside) - 1)] for at in (place - 1, place)
        )
        if before is after:
            return before[1], before[2]
        share = log(nbytes / before[0]) / log(after[0] / before[0])
        compute, comm = (a + share * (b - a) for a, b in zip(before[1:], after[1:], strict=True))
        return compute, comm

    @property
    def band(self) -> float:
        """Relative error to expect of a time on this link."""
        return LINK_BAND[self.source] if self.fit_error is None else self.fit_error


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCurve:
    """How long the ops of one class take on a device, by their size (`costmodel.ops.formulas`)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    share: float
    """Of the peak FLOP/s, or of the memory bandwidth, that large ops reach."""
    wide_share: float | None = None
    """The same for float32 and float64 where it differs."""
    narrow_share: float | None = None
    """The same for 8-bit floats where it differs."""
    floor_s: Seconds = 0.0
    """What the smallest op takes, beyond dispatch."""
    depth: float = 0.0
    """Steps of the inner loop (K of a matmul, keys of attention) that starting and ending cost."""
    split_depth: float = 0.0
    """The same again for each part of a split inner loop."""
    quantum: float = 0.0
    """Share of the work that waits for whole waves of tiles."""
    small_tile: float = 1.0
    """Efficiency of tiles of half the size, relative to whole ones."""
    droop: float = 0.0
    """By how much ops of milliseconds take longer than short ones: the clock falls under power."""
    winograd: float = 1.0
    """By how much fewer multiplications convolutions of 3 x 3 at stride 1 need in float32 where no
    tensor cores are used."""
    turning: float = 0.0
    """What bringing a convolution's images and results from NCHW into the layout of tensor cores
    and back takes, relative to copying them."""
    row_rates: tuple[tuple[int, Flops], ...] = ()
    """(bytes, FLOP/s), ascending: what a product in a format of two bytes reaches at most if its
    rows begin at multiples of no more than so many bytes. Tensor cores are fed 16 at a time."""
    batched_row_rates: tuple[tuple[int, Flops], ...] = ()
    """The same for batches of products, whose matrices begin there too; empty: as single ones."""
    packing: float = 0.0
    """How often a product moves its operands and result beside its arithmetic, where neither hides
    the other: libraries on CPUs pack what they multiply."""
    cache_bytes: Bytes = 0
    """Bytes an op may move before it is memory that limits it."""
    cache_share: float = 0.0
    """`share` within those; 0 if there is no difference."""
    backward: float = 1.0
    """Measured backward over what the formula says."""
    sustained: tuple[tuple[int, float], ...] = ()
    """(year, factor), ascending: in whole training runs ops take so many times as long as timed
    alone, with libraries of that year and later ones; empty: as long."""
    narrow_sustained: tuple[tuple[int, float], ...] = ()
    """The same for products of 8-bit floats; empty: as for others."""
    band: float = 0.3
    """Relative error to expect."""
    source: Source = "assumption"
    reference: str = ""

    def __post_init__(self) -> None:
        # A community measurement may lie above the data sheet's peak: boost clocks.
        _check("op curve: share", self.share, 1e-4, 1.5)
        if self.wide_share is not None:
            _check("op curve: wide_share", self.wide_share, 1e-4, 1.5)
        if self.narrow_share is not None:
            _check("op curve: narrow_share", self.narrow_share, 1e-4, 1.5)
        _check("op curve: floor_s", self.floor_s, 0.0, 1.0)
        for name in ("depth", "split_depth", "cache_bytes"):
            _check(f"op curve: {name}", getattr(self, name), 0.0, 1e15)
        for name in ("quantum", "small_tile", "droop"):
            _check(f"op curve: {name}", getattr(self, name), 0.0, 1.0)
        _check("op curve: cache_share", self.cache_share, 0.0, 1e3)
        _check("op curve: packing", self.packing, 0.0, 10.0)
        _check("op curve: winograd", self.winograd, 1.0, 10.0)
        _check("op curve: turning", self.turning, 0.0, 10.0)
        for name in ("row_rates", "batched_row_rates"):
            least = 1
            for nbytes, rate in getattr(self, name):
                _check(f"op curve: bytes in {name}", nbytes, least, 8, ", in ascending order")
                _check(f"op curve: FLOP/s in {name}", rate, 1e6, 1e18)
                least = nbytes + 1
        _check("op curve: backward", self.backward, 1e-2, 1e2)
        for name in ("sustained", "narrow_sustained"):
            last = 1999
            for year, factor in getattr(self, name):
                _check(f"op curve: year in {name}", year, last + 1, 2100, ", in ascending order")
                _check(f"op curve: factor in {name}", factor, 0.5, 10.0)
                last = year
        _check("op curve: band", self.band, 0.0, 10.0)

    def in_runs(self, year: int) -> float:
        """How many times as long as alone ops take in whole runs, with libraries of a year; with
        older ones than any that is known, as with the first."""
        return _at(self.sustained, year)

    def narrow_in_runs(self, year: int) -> float:
        """The same for products of 8-bit floats."""
        return _at(self.narrow_sustained or self.sustained, year)


def _at(factors: tuple[tuple[int, float], ...], year: int) -> float:
    found = [factor for since, factor in factors if since <= year]
    return found[-1] if found else next((factor for _, factor in factors), 1.0)


_BANDWIDTH_HINT = "; plain numbers are bytes per second, a text has its unit: 2039GB/s"
_MEMORY_HINT = "; plain numbers are bytes, a text has its unit: 80GB (10^9) or 80GiB (2^30)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """What a device has of its host, while the other devices of the node use theirs."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    memory_bytes: Bytes
    link_bytes_per_s: Rate
    """That large copies reach, each way."""
    update_bytes_per_s: Rate
    """Memory that an optimizer's step on the host reads and writes."""
    source: Source = "assumption"
    reference: str = ""

    def __post_init__(self) -> None:
        _check("host: memory_bytes", self.memory_bytes, 2**20, 2**50, _MEMORY_HINT)
        for name in ("link_bytes_per_s", "update_bytes_per_s"):
            _check(f"host: {name}", getattr(self, name), 1e3, 1e15, _BANDWIDTH_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One kind of accelerator, or one CPU process seen as one."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: Bytes
    memory_bandwidth_bytes_per_s: Rate
    peak_flops: Mapping[str, Flops]
    """Dense FLOP/s per dtype name; a dtype that is missing runs at the float32 peak."""
    efficiency: Mapping[OpClass, float] = field(default_factory=dict)
    """Share of peak FLOP/s (matmul, attention, convolution, recurrent) or of memory bandwidth
    (all others) that a class of ops reaches. Where there is no curve."""
    curves: Mapping[OpClass, OpCurve] = field(default_factory=dict)
    processors: int = 0
    """Streaming multiprocessors of a GPU, over which tiles of a matmul go in waves; 0: unknown."""
    overhead_s: Seconds = 0.0
    """Dispatch of one op by the CPU. On a GPU kernels queue ahead: it hides behind their time."""
    reserved_bytes: Bytes = 0
    """What the driver, the libraries and the process itself hold."""
    price_per_hour: float | None = None
    """Of one device, in any currency; none of the presets knows one."""
    launching: Launching | None = None
    """What the CPU takes beyond `overhead_s`; None: nothing is known of it. Not for CPUs, whose
    times have all of it."""
    casting: Casting | None = None
    """Of operands of 8-bit products; None: as torchao casts, each operand before each product."""
    host: HostShare | None = None
    """Without it, GPUs are taken to have what is usual (`ir.cluster.host`). A CPU's memory is
    its host's, unless this says how it is told apart: then a job's link is to be shaped alike
    (`forms.host_link`)."""
    capability: str = ""
    """Of CUDA, such as "9.0", or AMD's name such as "gfx942": some kernels are for one alone.
    Empty: not known."""
    source: Source = "assumption"
    reference: str = ""

    def __post_init__(self) -> None:
        what = f"device type {self.name!r}: "
        _check(what + "memory_bytes", self.memory_bytes, 2**26, 2**50, _MEMORY_HINT)
        rate = self.memory_bandwidth_bytes_per_s
        _check(what + "memory_bandwidth_bytes_per_s", rate, 1e7, 1e15, _BANDWIDTH_HINT)
        if "float32" not in self.peak_flops:
            raise PlanError(f"{what}peak_flops needs at least float32; it has {[*self.peak_flops]}")
        for dtype, peak in self.peak_flops.items():
            hint = "; plain numbers are FLOP/s, or write 312TFLOP/s"
            _check(f"{what}peak_flops[{dtype}]", peak, 1e6, 1e18, hint)
        for op_class, share in self.efficiency.items():
            _check(f"{what}efficiency[{op_class}]", share, 1e-4, 1.0)
        _check(what + "processors", self.processors, 0, 10_000)
        _check(what + "overhead_s", self.overhead_s, 0.0, 1.0)
        _check(what + "reserved_bytes", self.reserved_bytes, 0, self.memory_bytes)
        if self.price_per_hour is not None:
            _check(what + "price_per_hour", self.price_per_hour, 0.0, 1e6)

    @property
    def is_apart(self) -> bool:
        """Whether its memory is another than its host's."""
        return self.kind != "cpu" or self.host is not None

    @property
    def usable_bytes(self) -> int:
        """Memory that is left for training state."""
        return self.memory_bytes - self.reserved_bytes

    def peak(self, dtype: str) -> float:
        return self.peak_flops.get(dtype, self.peak_flops["float32"])
