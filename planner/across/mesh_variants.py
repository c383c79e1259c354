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
from meshwright.ir.plan.plan import ModelMesh, model_mesh
from meshwright.planner.across.model_space import (
    divisors,
    expert_forms,
    expert_sizes,
    forms,
    plain_forms,
    wide_forms,
)
from meshwright.planner.across.spans import Matrix
from meshwright.planner.decisions.samples import may_own_samples
from meshwright.planner.inside.variants import fast_variants, own_variants, sample_ranks_of
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


class Look(NamedTuple):
    """A way, with what it costs."""

    way: MeshVariant
    costs: Matrix


_tried: Memo[tuple[Constraint, ...], tuple[MeshVariant, ...]] = Memo()
_looked: Memo[tuple[Constraint, ...], list[Look]] = Memo()
"""What a look at all of them has found so far."""


def ways(problem: Problem) -> tuple[MeshVariant, ...]:
    """All that are tried, single tensor axes first; pins kept."""
    known, key = _tried.of(problem), problem.constraints
    if key not in known:
        found: list[Look] = []
        try:
            _look(problem, found)
        finally:
            _looked.of(problem)[key] = max(_looked.of(problem).get(key, []), found, key=len)
        known[key] = _kept(problem, found)
    return known[key]


def ways_so_far(problem: Problem) -> tuple[MeshVariant, ...]:
    """All that are tried; where time was up before that was known, the same choice of what was
    looked at by then, and experts of a node whose ranks have samples of their own."""
    known, key = _tried.of(problem), problem.constraints
    if key in known:
        return known[key]
    looked = _looked.of(problem).get(key, [])
    for size in expert_sizes(problem)[:1] if looked else ():
        mesh = model_mesh({"ep": size})
        if model_allowed(problem.constraints, mesh) and all(x.way.model != mesh for x in looked):
            looked = [*looked, *_worth(problem, _apart(problem, mesh), ())]
    return _kept(problem, looked)


def ways_in_haste(problem: Problem) -> tuple[MeshVariant, ...]:
    """What `ways_so_far` has, or else all of the first mesh that pins leave, looked at or not."""
    legal = _legal(problem, asked_meshes(problem.constraints), _free(problem))
    return ways_so_far(problem) or tuple(way for mesh in legal[:1] for way in _of(problem, mesh))


def add_way(problem: Problem, way: MeshVariant) -> None:
    """Adds one to those that are tried; meshes are made of them (`problem.space.add_way`)."""
    _tried.of(problem)[problem.constraints] = (*ways(problem), way)


def variants(problem: Problem, model: ModelMesh) -> tuple[str, ...]:
    """The layouts of one mesh."""
    return tuple(way.variant for way in ways(problem) if way.model == model)


def _look(problem: Problem, found: list[Look]) -> None:
    """Adds to `found` what is worth a try."""
    free = _free(problem)
    legal = _legal(problem, asked_meshes(problem.constraints), free)
    for mesh in legal:
        found += _worth(problem, _of(problem, mesh), () if mesh in free else found)
    least_s: dict[int, float] = {}  # by ranks of tensor parallelism beside experts
    ended: set[int] = set()
    for mesh in expert_forms(problem):
        tensor = dict(mesh).get("tp", 1)
        if mesh in legal or tensor in ended or not model_allowed(problem.constraints, mesh):
            continue
        looks = _worth(problem, _apart(problem, mesh), found)
        if not looks:
            continue
        found += looks
        own_s = min(float(look.costs[0]) for look in looks)
        slower = own_s > SAME * least_s.get(tensor, np.inf)
        if slower and all(way.model != mesh for way in _kept(problem, found)):
            ended.add(tensor)  # tokens go further than on fewer ranks, and on more further still
        least_s[tensor] = own_s


def _free(problem: Problem) -> set[ModelMesh]:
    """Meshes of which all ways stay that are good for something."""
    return {*plain_forms(problem), *asked_meshes(problem.constraints)}


def _kept(problem: Problem, found: Sequence[Look]) -> tuple[MeshVariant, ...]:
    """Of what was looked at: what stays anyway, and the fastest of the others."""
    free = _free(problem)
    others = sorted(
        (look for look in found if look.way.model not in free),
        key=lambda look: (float(look.costs[0]), look.way),
    )
    shared, own = (
        [look.way for look in others if (sample_ranks_of(*look.way) > 1) is apart][:MOST]
        for apart in (False, True)
    )
    return (*(look.way for look in found if look.way.model in free), *shared, *own)


def _worth(problem: Problem, ways: Iterable[MeshVariant], others: Sequence[Look]) -> list[Look]:
    """Those that pins leave and none of the `others` beats, with what they cost."""
    left = [way for way in ways if may_own_samples(problem.constraints, sample_ranks_of(*way))]
    return _undominated(_distinct([Look(way, _costs(problem, way)) for way in left]), others)


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
    names: Sequence[str] = problem.tables.run_as.variants or VARIANTS
    if not mesh:
        names = ("",)
    elif any(axis != "tp" for axis, _ in mesh):
        fast = fast_variants(mesh, problem.batch, problem.cluster.num_devices)
        names = fast if len(mesh) == 1 else fast[:1]
    for name in names:
        yield MeshVariant(mesh, name)
    yield from _apart(problem, mesh)


def _distinct(found: Sequence[Look]) -> list[Look]:
    """Those that are better in something than each one before that has as many samples."""
    kept: list[Look] = []
    for look in found:
        way, costs = look
        alike = [other for w, other in kept if sample_ranks_of(*w) == sample_ranks_of(*way)]
        if not any(bool((other <= SAME * costs).all()) for other in alike):
            kept = [
                other
                for other in kept
                if sample_ranks_of(*other.way) != sample_ranks_of(*way)
                or not bool((costs <= other.costs).all())
            ]
            kept.append(look)
    return kept


def _undominated(own: Sequence[Look], others: Sequence[Look]) -> list[Look]:
    """Those that no other mesh of as many ranks beats."""

    def alike(way: MeshVariant, other: MeshVariant) -> bool:
        """What a replica needs can be compared for as many ranks and samples."""
        sizes = [prod(n for _, n in each.model) for each in (way, other)]
        return sizes[0] == sizes[1] and sample_ranks_of(*way) == sample_ranks_of(*other)

    return [
        look
        for look in own
        if not any(alike(w, look.way) and bool((o <= SAME * look.costs).all()) for w, o in others)
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
