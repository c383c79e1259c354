"""Which dims of parameters are split together: what the rules of ops make of one another.

Where an op may be split along a factor, all dims that hold the factor are split with it. So dims of
values fall into groups, along whole models: the width between layers, the width inside of them,
heads, vocabulary, experts. Groups that hold dims of parameters are what is decided.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.graph.graph import Kind
from meshwright.ir.layout.layout import Placement, Shard
from meshwright.planner.inside.mesh_space import MeshSpace, OpSpace

Bools = NDArray[np.bool_]
Dim = tuple[str, int]
"""A value by its common name, and one of its dims."""


@dataclass(frozen=True, slots=True)
class DimGroup:
    """Dims of parameters that one axis splits together, or not at all."""

    axis: int
    dims: frozenset[Dim]


@dataclass(frozen=True, slots=True)
class Linkage:
    """Groups of a space, axis by axis, and what decisions leave of where parameters may lie."""

    groups: tuple[DimGroup, ...]
    params: tuple[str, ...]
    split: tuple[tuple[Bools, ...], ...]
    """Per group and parameter: places in which the group splits it."""
    touches: tuple[tuple[int, ...], ...]
    """Per group: parameters that it may split."""

    @classmethod
    def of(cls, space: MeshSpace, parameters: Sequence[str], linked: bool) -> "Linkage":
        groups = tuple(_groups(space, frozenset(parameters), linked))
        split = tuple(
            tuple(_splits(space.params[name], name, group) for name in parameters)
            for group in groups
        )
        touches = tuple(tuple(i for i, found in enumerate(own) if found.any()) for own in split)
        return cls(groups, tuple(parameters), split, touches)

    def after(self, left: Sequence[Bools], group: int, partition: bool) -> tuple[Bools, ...]:
        """What a decision leaves of the places of each parameter."""
        found = list(left)
        for i in self.touches[group]:
            own = self.split[group][i]
            found[i] = left[i] & (own if partition else ~own)
        return tuple(found)

    def rivals(self, group: int) -> frozenset[int]:
        """Groups that would split some of its parameters along another dim on the same axis."""
        own, axis = set(self.touches[group]), self.groups[group].axis
        return frozenset(
            other
            for other, touched in enumerate(self.touches)
            if other != group and self.groups[other].axis == axis and own & set(touched)
        )

    def is_possible(self, left: Sequence[Bools], group: int) -> bool:
        """Whether all parameters of a group still have a place."""
        return all(left[i].any() for i in self.touches[group])

    def everything(self) -> tuple[Bools, ...]:
        """All places of all parameters."""
        return tuple(np.ones(len(own), np.bool_) for own in self.split[0]) if self.split else ()


def trained(space: MeshSpace, kinds: dict[str, Kind]) -> tuple[str, ...]:
    """Parameters that some axis may split."""
    return tuple(
        name for name, places in space.params.items()
        if kinds[name] is Kind.PARAMETER
        and any(isinstance(p, Shard) for place in places for p in place)
    )  # fmt: skip


def _splits(places: Sequence[Sequence[Placement]], name: str, group: DimGroup) -> Bools:
    def held(p: Placement) -> bool:
        return isinstance(p, Shard) and (name, p.dim) in group.dims

    return np.array([held(place[group.axis]) for place in places], np.bool_)


def _groups(space: MeshSpace, parameters: frozenset[str], linked: bool) -> Iterator[DimGroup]:
    """Of all axes; those that split most tensors first."""
    for axis in range(len(space.mesh)):
        joined = _joined(space, axis) if linked else {}
        found: dict[Dim, set[Dim]] = {}
        for name in sorted(parameters):
            dims = {p.dim for place in space.params[name] if isinstance(p := place[axis], Shard)}
            for dim in sorted(dims):
                found.setdefault(joined.get((name, dim), (name, dim)), set()).add((name, dim))
        for root in sorted(found, key=lambda root: (-len(found[root]), root)):
            yield DimGroup(axis, frozenset(found[root]))


def _joined(space: MeshSpace, axis: int) -> dict[Dim, Dim]:
    """Each dim of a value -> the one that stands for its group."""
    root: dict[Dim, Dim] = {}

    def find(dim: Dim) -> Dim:
        while dim in root:
            dim = root[dim]
        return dim

    for own in space.ops.values():
        for linked in _together(space, own, axis):
            first = find(linked[0])
            for dim in linked[1:]:
                other = find(dim)
                if other != first:
                    root[other] = first
    names = {(name, dim) for name, places in space.params.items()
             for dim in range(_rank(places))}  # fmt: skip
    return {dim: find(dim) for dim in names}


def _rank(places: Sequence[Sequence[Placement]]) -> int:
    dims = [p.dim for place in places for p in place if isinstance(p, Shard)]
    return max(dims, default=-1) + 1


def _together(space: MeshSpace, own: OpSpace, axis: int) -> Iterator[list[Dim]]:
    """What each strategy of an op splits."""
    names = (*own.op.inputs, *own.op.outputs)
    for strategy in own.found[axis]:
        sides = (*strategy.inputs, *strategy.outputs)
        found = [
            (space.tied(space.alias(name)), p.dim)
            for name, p in zip(names, sides, strict=True)
            if name and isinstance(p, Shard)
        ]
        if found:
            yield found
