"""Choices for stages whose meshes are pinned: devices as pins say, blocks in proportion to them.

Tables are of groups that the search picks by itself, and those that pins ask for, such as 15
replicas before one, need not be among them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod

from meshwright.ir.plan.folded import may_share
from meshwright.ir.plan.plan import MODEL_AXES, model_mesh
from meshwright.planner.decisions.zero import LEVELS, splits
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.pins.decisions import Pin, StageMesh
from meshwright.planner.problem.candidates import Choice, StageChoice, block_flops, recomputable
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import USUAL
from meshwright.planner.problem.space import microbatch_counts, pipeline_sizes, recompute_modes

Sizes = dict[str, int]
REPLICAS = ("dp_replicate", "dp_shard")
AXES = (*REPLICAS, *MODEL_AXES)


def pinned_choices(problem: Problem) -> Iterator[Choice]:
    """With 1F1B, for every number of pipeline ranks and micro-batches that pins leave; none where
    no stage's mesh is pinned."""
    pins = _pinned(problem)
    if not pins:
        return
    for num_ranks in pipeline_sizes(problem):
        meshes = _meshes(pins, num_ranks, problem.cluster.num_devices)
        widest = max((_replicas(mesh) for mesh in meshes), default=problem.batch + 1)
        for count in microbatch_counts(problem):
            if problem.batch // count >= widest:
                for again in recompute_modes(problem):
                    for zero in _levels(problem, meshes):
                        yield _choice(problem, meshes, count, again, zero)


def _pinned(problem: Problem) -> dict[int, Sizes]:
    """Meshes of stages that pins name, whole or by the sizes of axes."""
    found: dict[int, Sizes] = {}
    for pin in problem.constraints:
        if isinstance(pin, StageMesh):
            found.setdefault(pin.stage, {}).update(pin.sizes)
        elif isinstance(pin, Pin) and pin.scope.stage is not None and pin.name in AXES:
            if pin.relation == "=" and isinstance(pin.value, int):
                found.setdefault(pin.scope.stage, {})[pin.name] = pin.value
    return found


def _meshes(pins: dict[int, Sizes], num_ranks: int, num_devices: int) -> list[Sizes]:
    """Of all stages, those that are not pinned as replicas on what is left; empty if it is not
    enough, or too much."""
    free = [stage for stage in range(num_ranks) if stage not in pins]
    left = num_devices - sum(prod(sizes.values()) for sizes in pins.values())
    if max(pins) >= num_ranks or left < len(free) or (left and not free):
        return []
    found = dict(pins)
    for number, stage in enumerate(free):
        found[stage] = {"dp_replicate": (left + number) // len(free)}
    return [found[stage] for stage in range(num_ranks)]


def _levels(problem: Problem, meshes: Sequence[Sizes]) -> tuple[int, ...]:
    sharded = any(may_share(mesh.get("dp_shard", 1), model_mesh(mesh)) for mesh in meshes)
    return allowed(problem.constraints, "zero", filter(splits, LEVELS)) if sharded else (0,)


def _replicas(mesh: Sizes) -> int:
    return prod(mesh.get(axis, 1) for axis in REPLICAS)


def _choice(
    problem: Problem, meshes: Sequence[Sizes], num_microbatches: int, again: bool, zero: int
) -> Choice:
    sizes = [prod(mesh.values()) for mesh in meshes]
    ends = (0, *accumulate(sizes))
    cuts = (0, *proportional_cuts(block_flops(problem.graph), sizes), len(problem.graph.blocks))
    stages = tuple(
        _stage(problem, mesh, blocks, devices, again, zero)
        for mesh, blocks, devices in zip(meshes, pairwise(cuts), pairwise(ends), strict=True)
    )
    return Choice(
        stages=stages, num_microbatches=num_microbatches, schedule=USUAL,
        num_ranks=len(meshes),
    )  # fmt: skip


def _stage(
    problem: Problem, mesh: Sizes, blocks: tuple[int, int], devices: tuple[int, int], again: bool,
    zero: int,
) -> StageChoice:  # fmt: skip
    within = problem.graph.blocks[slice(*blocks)]
    shard = mesh.get("dp_shard", 1)
    return StageChoice(
        start=blocks[0], stop=blocks[1], devices=tuple(range(*devices)),
        dp_replicate=mesh.get("dp_replicate", 1), dp_shard=shard,
        model=model_mesh(mesh), zero=zero if may_share(shard, model_mesh(mesh)) else 0,
        recompute=recomputable(problem.graph, within) if again else (),
    )  # fmt: skip


def proportional_cuts(costs: Sequence[float], shares: Sequence[int]) -> list[int]:
    """Where parts of a chain begin whose costs are nearest to their shares; none is empty."""
    done, total = list(accumulate(costs)), sum(shares)
    cuts: list[int] = []
    for part, share in enumerate(list(accumulate(shares))[:-1], 1):
        wanted = done[-1] * share / total
        at = bisect_left(done, wanted)
        before = done[at - 1] if at else 0.0
        at += done[min(at, len(done) - 1)] - wanted < wanted - before
        least, most = (cuts[-1] if cuts else 0) + 1, len(costs) - (len(shares) - part)
        cuts.append(min(max(at, least), most))
    return cuts
