"""Where the parts of a tensor lie: mesh axes, placements, and the local shapes they give.

A tensor dim of size D is seen as `outer x units x inner`. `Shard(dim, outer, inner)` splits the
`units` over a mesh axis; `outer > 1` splits each of `outer` equal sections (the fused q, k, v of
GPT-2 is `S(1,outer=3)`), `inner > 1` keeps groups of `inner` elements whole (an attention head).
With `zigzag` ranks take the units of every second section in reverse: `S(1,outer=2,zigzag)` gives
each an early and a late part of a sequence, so that causal attention is equally much work for all.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from meshwright.ir.errors import PlanError
from meshwright.ir.text.plain_text import shown


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole value.

    With `partial_grad`, the gradients that the ranks hold of it are summands, not copies.
    """

    partial_grad: bool = False

    def __str__(self) -> str:
        return "R|P" if self.partial_grad else "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The ranks of the axis hold consecutive units of tensor dim `dim` (in each outer section)."""

    dim: int
    outer: int = 1
    inner: int = 1
    zigzag: bool = False
    """Every second section is shared out in reverse; sections are even in number, and all parts
    equal."""

    def __str__(self) -> str:
        extra = f",outer={self.outer}" * (self.outer > 1) + f",inner={self.inner}" * (
            self.inner > 1
        )
        return f"S({self.dim}{extra}{',zigzag' * self.zigzag})"


@dataclass(frozen=True, slots=True)
class Partial:
    """The ranks of the axis hold summands of the value; their gradients are copies."""

    def __str__(self) -> str:
        return "P"


Placement = Replicate | Shard | Partial
R, RP, P = Replicate(), Replicate(True), Partial()

_COUNT = "([1-9][0-9]{0,14})"
_SHARD = re.compile(rf"S\(([0-9]{{1,9}})(?:,outer={_COUNT})?(?:,inner={_COUNT})?(,zigzag)?\)")


@lru_cache(maxsize=4096)
def parse_placement(text: str) -> Placement:
    """The placement that `str` prints as `text`."""
    fixed: dict[str, Placement] = {"R": R, "R|P": RP, "P": P}
    if text in fixed:
        return fixed[text]
    if match := _SHARD.fullmatch(text):
        dim, outer, inner, zigzag = match.groups()
        return Shard(int(dim), int(outer or 1), int(inner or 1), bool(zigzag))
    raise PlanError(
        f"placement {shown(text)} is not one of R, R|P, P, S(dim[,outer=n][,inner=n][,zigzag])"
    )


def balanced(units: int, parts: int) -> tuple[int, ...]:
    """Sizes of `units` split over `parts` as evenly as can be, larger ones first."""
    return tuple(units // parts + (i < units % parts) for i in range(parts))


@dataclass(frozen=True, slots=True)
class Axis:
    """One layout axis of a stage: how many ranks, and what share of a split dim each gets.

    Without `shares`, units are split evenly, the first ranks getting one more. With `shares`, rank
    i gets `units * shares[i] / whole`: the data axis of a stage has `whole` = global batch size and
    shares in samples of one micro-batch, so local shapes are those of one micro-batch.
    """

    size: int
    shares: tuple[int, ...] = ()
    whole: int = 0

    def sizes(self, units: int) -> tuple[int, ...]:
        """Units of each rank."""
        if not self.shares:
            return balanced(units, self.size)
        return tuple(self._per_sample(units) * share for share in self.shares)

    def units(self, units: int, coordinate: int) -> int:
        """Units of one rank, out of so many."""
        if not self.shares:
            return units // self.size + (coordinate < units % self.size)
        return self._per_sample(units) * self.shares[coordinate]

    def _per_sample(self, units: int) -> int:
        if units % self.whole:
            raise PlanError(
                f"{units} units do not hold {self.whole} samples a whole number of times"
            )
        return units // self.whole

    @property
    def parts(self) -> int:
        """How many parts another axis may split inside of: one per rank, or one per sample."""
        return self.whole or self.size

    def span(self, units: int, coordinate: int) -> tuple[int, int]:
        """First unit and one past the last of `coordinate`, within one micro-batch."""
        ends = tuple(accumulate(self.sizes(units)))
        return ends[coordinate] - self.sizes(units)[coordinate], ends[coordinate]


Layout = dict[str, Placement]
"""Placement per layout axis name (`dp`, or a model axis); one that is not named is Replicate."""


def units_of(size: int, shard: Shard) -> int:
    """How many units `shard` splits a dim of `size` into."""
    if size % (shard.outer * shard.inner):
        raise PlanError(f"{shard} does not fit a dim of {size}: not a multiple of outer x inner")
    return size // (shard.outer * shard.inner)


def zigzag_problem(size: int, shard: Shard, ranks: int) -> str:
    """Why so many ranks cannot share a dim of `size` in zigzag, with the nearest size or split that
    they can; nothing if they can, or `shard` is none."""
    if not shard.zigzag:
        return ""
    if shard.outer % 2:
        nearest = replace(shard, outer=shard.outer + 1)
        return f"{shard} has {shard.outer} sections, a zigzag an even number, as {nearest}"
    step = shard.outer * shard.inner * ranks
    if size % step:
        nearest_size = max(step, round(size / step) * step)
        return (
            f"{shard} shares a dim of {size} with {ranks} ranks in equal parts: it must be a "
            f"multiple of {step}, such as {nearest_size}"
        )
    return ""


def local_size(size: int, shard: Shard, axis: Axis, coordinate: int) -> int:
    """Elements of a dim of global `size` on the rank at `coordinate` of `axis`."""
    return shard.outer * axis.units(units_of(size, shard), coordinate) * shard.inner


def local_shape(
    shape: tuple[int, ...],
    layout: Layout,
    axes: Mapping[str, Axis],
    coordinates: Mapping[str, int],
) -> tuple[int, ...]:
    """Shape of the local part of a tensor of global `shape`.

    Axes that split one dim nest (`ir.layout.nesting`; `verify` checks it), so they are independent.
    An axis that `axes` lacks has one rank.
    """
    local = list(shape)
    for name, placement in layout.items():
        if isinstance(placement, Shard) and name in axes and shape[placement.dim]:
            dim, size = placement.dim, shape[placement.dim]
            part = local_size(size, placement, axes[name], coordinates[name])
            local[dim] = local[dim] * part // size
    return tuple(local)


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one op runs on one axis: what it needs of each tensor input, what its outputs are.

    The text form is `R|P S(1) S(0) -> S(1)`: tensor inputs in the order of `Op.inputs`, then the
    outputs in order of `Op.outputs`.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]

    def __str__(self) -> str:
        left = " ".join(map(str, self.inputs))
        return f"{left} -> {' '.join(map(str, self.outputs))}".strip()


@lru_cache(maxsize=4096)
def parse_strategy(text: str) -> Strategy:
    """The strategy that `str` prints as `text`."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise PlanError(f"strategy {shown(text)} has no '->'")
    return Strategy(
        tuple(map(parse_placement, left.split())), tuple(map(parse_placement, right.split()))
    )
