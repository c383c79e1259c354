"""Model meshes with their layouts: which are tried, after a look at what they really cost.

On the blocks, at the links that a mesh would have, a mesh or layout is left out if another of the
same number of ranks is better in time and in every kind of memory.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.memo import Memo
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.across.model_space import (
    divisors,
    expert_forms,
    forms,
    plain_forms,
    wide_forms,
)
from meshwright.planner.across.spans import Matrix
from meshwright.planner.decisions.samples import may_own_samples
from meshwright.planner.inside.variants import own_variants, sample_ranks_of
from meshwright.planner.pins.constraints import Constraint, asked_meshes, model_allowed
from meshwright.planner.problem.problem import Problem

VARIANTS = ("", "fast", "lean")
"""Layouts that are looked at: the usual ones, those of least time, and those that save memory."""
MOST = 6
"""Meshes with layouts that are kept, besides those of a single tensor axis; as many in which ranks
have samples of their own."""
OPS = 400
"""Ops that are laid out for meshes of other axes: each mesh costs those of all patterns once."""
DEEP = 40
"""Ops up to which three axes are laid out unasked: that takes long."""
SAME = 1.001
"""Costs within this factor are equal."""


class MeshVariant(NamedTuple):
    """A model mesh, and which of its layouts."""

    model: ModelMesh
    variant: str


_tried: Memo[tuple[Constraint, ...], tuple[MeshVariant, ...]] = Memo()


def ways(problem: Problem) -> tuple[MeshVariant, ...]:
    """All that are tried, single tensor axes first; pins kept."""
    known, key = _tried.of(problem), problem.constraints
    if key not in known:
        known[key] = _ways(problem)
    return known[key]


def add_way(problem: Problem, way: MeshVariant) -> None:
    """Adds one to those that are tried; meshes are made of them (`problem.space.add_way`)."""
    _tried.of(problem)[problem.constraints] = (*ways(problem), way)


def variants(problem: Problem, model: ModelMesh) -> tuple[str, ...]:
    """The layouts of one mesh."""
    return tuple(way.variant for way in ways(problem) if way.model == model)


def _ways(problem: Problem) -> tuple[MeshVariant, ...]:
    asked = asked_meshes(problem.constraints)
    free = {*plain_forms(problem), *asked}
    legal = _legal(problem, asked, free)
    found: list[tuple[MeshVariant, Matrix]] = []
    for mesh in legal:
        found += _worth(problem, _of(problem, mesh), () if mesh in free else found)
    for mesh in expert_forms(problem):
        if mesh not in legal and model_allowed(problem.constraints, mesh):
            found += _worth(problem, _apart(problem, mesh), found)
    plain = [way for way, _ in found if way.model in free]
    others = [item for item in found if item[0] not in plain]
    others.sort(key=lambda item: (float(item[1][0]), item[0]))
    shared, own = (
        [w for w, _ in others if (sample_ranks_of(*w) > 1) is apart] for apart in (False, True)
    )
    return (*plain, *shared[:MOST], *own[:MOST])


def _worth(
    problem: Problem, ways: Iterable[MeshVariant], others: Sequence[tuple[MeshVariant, Matrix]]
) -> list[tuple[MeshVariant, Matrix]]:
    """Those that pins leave and none of the `others` beats, with what they cost."""
    left = [way for way in ways if may_own_samples(problem.constraints, sample_ranks_of(*way))]
    return _undominated(_distinct([(way, _costs(problem, way)) for way in left]), others)


def _legal(
    problem: Problem, asked: Collection[ModelMesh], free: Collection[ModelMesh]
) -> list[ModelMesh]:
    """Meshes that pins leave: those of which all ways that are good for something stay (`free`),
    then as many others as are worth laying out, and wide tensor axes, of which there is one or so.
    """
    graph, wide = problem.graph, wide_forms(problem)
    ops = sum(len(graph.block_ops(block)) for block in graph.distinct_blocks())
    legal = [
        mesh
        for mesh in dict.fromkeys([*forms(problem), *wide, *asked])
        if prod(n for _, n in mesh) <= problem.cluster.num_devices
        and model_allowed(problem.constraints, mesh)
        and (len(mesh) < 3 or ops <= DEEP or mesh in asked)
    ]
    others = [mesh for mesh in legal if mesh not in free and mesh not in wide]
    return [
        *(mesh for mesh in legal if mesh in free),
        *others[: OPS // max(1, ops)],
        *(mesh for mesh in legal if mesh in wide and mesh not in free),
    ]


def _apart(problem: Problem, mesh: ModelMesh) -> Iterator[MeshVariant]:
    """Ways in which ranks have samples of their own, which are quick to lay out: of one axis of a
    mesh there is little to choose."""
    for name in own_variants(mesh, problem.batch):
        yield MeshVariant(mesh, name)


def _of(problem: Problem, mesh: ModelMesh) -> Iterator[MeshVariant]:
    plain = problem.tables.run_as.variants or VARIANTS
    one = all(axis == "tp" for axis, _ in mesh)
    for name in ("",) if not mesh else plain if one else VARIANTS[1:2]:
        yield MeshVariant(mesh, name)
    yield from _apart(problem, mesh)


def _distinct(found: Sequence[tuple[MeshVariant, Matrix]]) -> list[tuple[MeshVariant, Matrix]]:
    """Those that are better in something than each one before that has as many samples."""
    kept: list[tuple[MeshVariant, Matrix]] = []
    for way, costs in found:
        alike = [other for w, other in kept if sample_ranks_of(*w) == sample_ranks_of(*way)]
        if not any(bool((other <= SAME * costs).all()) for other in alike):
            kept = [
                (w, other)
                for w, other in kept
                if sample_ranks_of(*w) != sample_ranks_of(*way) or not bool((costs <= other).all())
            ]
            kept.append((way, costs))
    return kept


def _undominated(
    own: Sequence[tuple[MeshVariant, Matrix]], others: Sequence[tuple[MeshVariant, Matrix]]
) -> list[tuple[MeshVariant, Matrix]]:
    """Those that no other mesh of as many ranks beats."""

    def alike(way: MeshVariant, other: MeshVariant) -> bool:
        """What a replica needs can be compared for as many ranks and samples."""
        sizes = [prod(n for _, n in each.model) for each in (way, other)]
        return sizes[0] == sizes[1] and sample_ranks_of(*way) == sample_ranks_of(*other)

    return [
        (way, costs)
        for way, costs in own
        if not any(alike(w, way) and bool((o <= SAME * costs).all()) for w, o in others)
    ]


def _costs(problem: Problem, way: MeshVariant) -> Matrix:
    """Seconds, then bytes of each kind, per block pattern: for one sample and for several."""
    width, unit = prod(n for _, n in way.model), sample_ranks_of(*way)
    most = max(unit, problem.batch * width // problem.cluster.num_devices)
    several = max(d for d in divisors(problem.batch) if d <= max(unit, min(most, width)))
    several -= several % unit
    return np.concatenate([_at(problem, way, samples) for samples in sorted({unit, several})])


def _at(problem: Problem, way: MeshVariant, samples: int) -> Matrix:
    tables = problem.tables
    ranks = tuple(range(prod(n for _, n in way.model)))
    levels = tables.model_levels(ranks, way.model)
    spot = BlockSpot(samples, 1, way.model, tables.device_names[0], (), levels)
    layouts = {layout.pattern: layout for layout in problem.layouts(*way)}
    total: list[float] = []
    rows: list[float] = []
    for block in problem.graph.distinct_blocks():
        cost = tables.block(block, layouts[block.pattern], spot)
        count = problem.graph.pattern_counts[block.pattern]
        total.append(count * (cost.forward_s + cost.backward_s))
        inner = cost.saved_bytes + sum(cost.saved_inputs) + sum(cost.saved_outputs)
        border = sum(cost.input_bytes)
        rows += [
            cost.forward_s, cost.backward_s, inner, border, sum(cost.param_bytes),
            cost.workspace_bytes,
        ]  # fmt: skip
    return np.array([sum(total) * len(ranks) / samples, *rows])
