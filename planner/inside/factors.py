"""From a rule to the strategies of an op on one axis.

A `Split` picks units inside one factor of the rule. Each tensor of the op that holds the factor is
then `Shard(dim, outer, inner)`: `outer` counts what is more major in that dim, `inner` what is more
minor, and is 1 where the units divide evenly (then it makes no difference).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from meshwright.ir.graph.graph import Graph, Op, Tensor
from meshwright.ir.graph.rules import Dims, Rule
from meshwright.ir.layout.layout import RP, P, Placement, R, Shard, Strategy


@dataclass(frozen=True, slots=True)
class AxisKind:
    """An axis to lay out: `batch` > 0 splits only what holds that many samples (dp), else `size`
    ranks share the units (tp)."""

    size: int
    batch: int = 0
    outers: tuple[int, ...] = (1,)
    """Into how many parts other axes may have cut a factor that this one splits inside of them."""
    zigzag: bool = False
    """Whether it may take every second section in reverse, where that evens out work."""

    def admits(self, units: int) -> bool:
        """No rank may be left without a unit."""
        return units % self.batch == 0 if self.batch else units >= self.size > 1

    def even(self, units: int) -> bool:
        return bool(self.batch) or units % self.size == 0


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """`outer` x units x `inner` inside one factor, of which the units are split."""

    factor: str
    outer: int = 1
    inner: int = 1
    follow: int = 1
    """Sections of factors that are split together with this one, and only along runs."""
    zigzag: bool = False


Taken = Mapping[str, Mapping[int, int]]
"""Tensor name -> dims that dp splits, and into how many parts: others split inside of these."""


def split_of(rule: Rule, dims: Dims, shard: Shard, axis: AxisKind) -> Split | None:
    """The split that gives a tensor with these dims the placement; None if it cuts factors."""
    factors = dims[shard.dim] if shard.dim < len(dims) else ()
    sizes = [rule.sizes[f] for f in factors]
    size = prod(sizes)
    if size % (shard.outer * shard.inner):
        return None
    units = size // (shard.outer * shard.inner)
    before = 1
    for i, (factor, own) in enumerate(zip(factors, sizes, strict=True)):
        if shard.outer % before:
            return None
        outer = shard.outer // before
        if outer < own or own == 1:
            if shard.zigzag and (outer % 2 or units % axis.size):
                return None
            split = _inside(factor, own, outer, shard.inner, prod(sizes[i + 1 :]), units, axis)
            return replace(split, zigzag=True) if split and shard.zigzag else split
        before *= own
    return None


def _inside(
    factor: str, size: int, outer: int, inner: int, after: int, units: int, axis: AxisKind
) -> Split | None:
    """The split of one factor if the shards' borders are borders of its elements."""
    if size % outer:
        return None
    rest = size // outer
    if axis.even(units):
        aligned = rest % (axis.batch or axis.size) == 0
        return Split(factor, outer) if aligned else None
    if inner % after or rest % (inner // after):
        return None
    return Split(factor, outer, inner // after) if units * (inner // after) == rest else None


def shard_of(rule: Rule, dims: Dims, split: Split, axis: AxisKind) -> Shard | None:
    """The placement that a split gives to a tensor with these dims; None if it lacks the factor."""
    for one in single_splits(rule, split):
        for dim, factors in enumerate(dims):
            if one.factor in factors:
                at = factors.index(one.factor)
                before = prod(rule.sizes[f] for f in factors[:at])
                after = prod(rule.sizes[f] for f in factors[at + 1 :])
                even = axis.even(units(rule, one))
                inner = 1 if even else one.inner * after
                return Shard(dim, before * one.outer, inner, one.zigzag)
    return None


def single_splits(rule: Rule, split: Split) -> tuple[Split, ...]:
    """What a split does to single factors: the first that it stands for is split as it says, those
    that are split together with it in as many sections, or none if they must not have any."""
    if split.factor not in rule.together:
        return (split,)
    lead, *others = rule.together[split.factor]
    followers = (
        Split(f, split.follow) if f in rule.plain else Split(f, split.outer, zigzag=split.zigzag)
        for f in others
    )
    return (replace(split, factor=lead, follow=1), *followers)


def with_together(rule: Rule, split: Split, axis: AxisKind) -> tuple[Split, ...]:
    """The split, and those of several factors together that it leads."""
    if not rule.together:
        return (split,)
    leads = sorted(name for name, factors in rule.together.items() if factors[0] == split.factor)
    return (split, *(both for name in leads for both in _following(rule, split, name, axis)))


def _following(rule: Rule, split: Split, name: str, axis: AxisKind) -> Iterator[Split]:
    """The split of several factors: what is cut along runs may lie inside the parts of others."""
    for follow in axis.outers if name in rule.nested else (1,):
        yield replace(split, factor=name, follow=follow)


def units(rule: Rule, split: Split) -> int:
    """How many units are split."""
    return rule.sizes[split.factor] // (split.outer * split.inner)


def allowed(op: Op, rule: Rule, split: Split, axis: AxisKind, taken: Taken) -> bool:
    """Whether the rule and the other axis leave the factor free, with a unit for each rank."""
    if split.factor not in (rule.split | rule.batch if axis.batch else rule.split):
        return False
    singles = single_splits(rule, split)
    if any(rule.sizes[one.factor] % (one.outer * one.inner) for one in singles):
        return False
    if not all(axis.admits(units(rule, one)) for one in singles):
        return False
    if split.zigzag and not all(units(rule, one) % axis.size == 0 for one in singles):
        return False
    if _tears(rule, split) or (axis.batch and split.factor in rule.together):
        return False
    plain = split.factor in rule.plain
    if plain and split.zigzag:
        return False
    for name, dims in zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True):
        shard = shard_of(rule, dims, split, axis)
        if not shard:
            continue
        parts = taken.get(name, {}).get(shard.dim, 1)
        if shard.outer % parts or (plain and (parts > 1 or shard.outer not in axis.outers)):
            return False
    return True


def _tears(rule: Rule, split: Split) -> bool:
    """Whether it cuts runs into sections where factors are split together along runs."""
    return split.outer > 1 and split.factor in rule.plain & rule.together.keys()


def natural_splits(op: Op, rule: Rule, axis: AxisKind, taken: Taken) -> Iterator[Split]:
    """Every factor as a whole, or inside the parts of other axes."""
    for factor in sorted(rule.split):
        ways = [Split(factor, outer) for outer in axis.outers]
        if axis.zigzag and factor in rule.uneven:
            ways.append(Split(factor, 2, zigzag=True))
        together = factor in rule.together
        for way in ways:
            for split in _following(rule, way, factor, axis) if together else (way,):
                whole = rule.sizes[single_splits(rule, split)[0].factor] % split.outer == 0
                if whole and allowed(op, rule, split, axis, taken):
                    yield split


def split_strategy(op: Op, rule: Rule, graph: Graph, split: Split, axis: AxisKind) -> Strategy:
    """The strategy of one split."""
    differentiable = _differentiable(op, graph)
    outputs = tuple(shard_of(rule, dims, split, axis) for dims in rule.outputs)
    read = [name in graph.users or name == graph.loss for name in op.outputs]
    lacking = any(shard is None and r for shard, r in zip(outputs, read, strict=True))
    contracted = split.factor not in rule.joined and lacking

    def place(i: int, name: str) -> Placement:
        shard = shard_of(rule, rule.inputs[i], split, axis)
        if shard:
            return shard
        if contracted and i in rule.added:
            return P
        reads = differentiable and graph.tensors[name].requires_grad and i not in rule.free
        whole = split.factor in rule.joined and i not in rule.summed
        return RP if reads and not whole else R

    missing: Placement = R if split.factor in rule.joined else P
    return Strategy(
        tuple(place(i, name) for i, name in enumerate(op.inputs)),
        tuple(o or (missing if r else R) for o, r in zip(outputs, read, strict=True)),
    )


def strategies(
    op: Op, rule: Rule | None, graph: Graph, axis: AxisKind, splits: Iterable[Split]
) -> tuple[Strategy, ...]:
    """All strategies: whole, each split, summands through linear ops, partial gradients."""
    found = [Strategy((R,) * len(op.inputs), (R,) * len(op.outputs))]
    if rule:
        found += [split_strategy(op, rule, graph, split, axis) for split in splits]
        found += linear_strategies(op, rule, graph)
    if _differentiable(op, graph):
        found.append(
            Strategy(
                tuple(RP if graph.tensors[n].requires_grad else R for n in op.inputs),
                tuple(RP if n and graph.tensors[n].requires_grad else R for n in op.outputs),
            )
        )
    return tuple(dict.fromkeys(found))


def linear_strategies(op: Op, rule: Rule, graph: Graph) -> Iterator[Strategy]:
    """Summands in, summands out."""
    outputs = [graph.tensors[name] for name in op.outputs if name]
    if not all(map(_summable, outputs)):
        return
    kinds = {_family(tensor) for tensor in outputs}
    differentiable = _differentiable(op, graph)
    for group in rule.linear:
        inputs = [graph.tensors[op.inputs[i]] for i in sorted(group)]
        if not all(_summable(t) and (_family(t) in kinds or _family(t) == "int") for t in inputs):
            continue
        yield Strategy(
            tuple(
                P if i in group else RP if differentiable and graph.tensors[n].requires_grad else R
                for i, n in enumerate(op.inputs)
            ),
            (P,) * len(op.outputs),
        )


def _differentiable(op: Op, graph: Graph) -> bool:
    return any(name and graph.tensors[name].requires_grad for name in op.outputs)


def _summable(tensor: Tensor) -> bool:
    return tensor.dtype != "bool"


def _family(tensor: Tensor) -> str:
    return "float" if tensor.dtype.startswith(("float", "bfloat", "complex")) else "int"
