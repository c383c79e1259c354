"""What searchers enumerate: micro-batch counts, schedules, meshes, cuts; pins already applied."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod

from meshwright.ir.plan import ModelMesh, model_mesh
from meshwright.planner.constraints import allowed, pinned
from meshwright.planner.problem import Problem
from meshwright.planner.schedule_tools import SCHEDULES, stages_per_rank

TWINS = frozenset({"dapple_pa"})
"""Schedules whose tables equal another's; searched only where pinned."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh of a stage, and what is sharded over it."""

    dp_replicate: int
    dp_shard: int
    model: ModelMesh
    zero: int
    variant: str = ""
    """Which of the layouts on the model mesh."""

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return prod(size for _, size in self.model)

    @property
    def size(self) -> int:
        return self.dp * self.model_size


def divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def microbatch_counts(problem: Problem) -> tuple[int, ...]:
    """Legal numbers of micro-batches; 1 if more would change the result, unless pinned."""
    if problem.coupling and pinned(problem.constraints, "num_microbatches") is None:
        return (1,)
    return allowed(problem.constraints, "num_microbatches", divisors(problem.batch))


def pipeline_sizes(problem: Problem) -> tuple[int, ...]:
    """Legal numbers of pipeline ranks: at most one per device and block."""
    most = min(problem.cluster.num_devices, len(problem.graph.blocks))
    return allowed(problem.constraints, "pp", range(1, most + 1))


def schedules(problem: Problem, num_ranks: int) -> Iterator[tuple[str, int]]:
    """(schedule, stages per rank) for so many pipeline ranks; one rank needs only one schedule."""
    pin = pinned(problem.constraints, "schedule")
    names = allowed(problem.constraints, "schedule", SCHEDULES)
    if num_ranks == 1 and pin is None:
        names = ("one_f_one_b",)
    for name in names:
        if name in TWINS and pin is None:
            continue
        for chunks in stages_per_rank(name):
            if num_ranks * chunks <= len(problem.graph.blocks):
                yield name, chunks


def tensor_sizes(problem: Problem) -> tuple[int, ...]:
    """Sizes of tp that are tried: within a node, and even parts of it where nodes are large."""
    widest = max(len(node.devices) for node in problem.cluster.nodes)
    sizes = range(1, widest + 1) if widest <= 4 else divisors(widest)
    return allowed(problem.constraints, "tp", sizes)


def model_meshes(problem: Problem) -> tuple[ModelMesh, ...]:
    """Model meshes that are tried."""
    return tuple(model_mesh({"tp": tp}) for tp in tensor_sizes(problem))


def meshes(problem: Problem, size: int, samples: int) -> Iterator[Mesh]:
    """Every mesh of `size` devices whose replicas all get some of `samples` per micro-batch."""
    for model in model_meshes(problem):
        width = prod(n for _, n in model)
        if size % width or not allowed(problem.constraints, "dp", (size // width,)):
            continue
        for variant in problem.variants(model):
            yield from _sharded(problem, size // width, model, variant, samples)


def _sharded(
    problem: Problem, dp: int, model: ModelMesh, variant: str, samples: int
) -> Iterator[Mesh]:
    for shard in allowed(problem.constraints, "dp_shard", divisors(dp)):
        replicate = dp // shard
        if replicate * shard > samples:
            continue
        if not allowed(problem.constraints, "dp_replicate", (replicate,)):
            continue
        levels: tuple[int, ...] = (1, 2, 3) if shard > 1 else (0,)
        if shard > 1 and (pinned(problem.constraints, "dp_shard") or 0) == shard:
            levels = (0, 1, 2, 3)  # asked for by name: also without sharding anything
        if pinned(problem.constraints, "prefetch"):
            levels = (3,) if shard > 1 else ()
        for zero in allowed(problem.constraints, "zero", levels):
            yield Mesh(replicate, shard, model, zero, variant)


def recompute_modes(problem: Problem) -> tuple[bool, ...]:
    """Whether a stage may keep, or recompute, its activations."""
    names = allowed(problem.constraints, "recompute", ("none", "full"))
    return tuple(name == "full" for name in names)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as `parts` positive numbers in order."""
    for cuts in combinations(range(1, total), parts - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(ends))


def cuts(problem: Problem, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Block numbers at which stages begin, 0 and the end included; pinned blocks respected."""
    blocks, pins = len(problem.graph.blocks), problem.stage_of_block
    for inner in combinations(range(1, blocks), num_stages - 1):
        ends = (0, *inner, blocks)
        if all(
            stage < num_stages and ends[stage] <= block < ends[stage + 1]
            for block, stage in pins.items()
        ):
            yield ends
