"""What searchers enumerate: micro-batch counts, schedules, meshes, cuts; pins already applied."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from math import prod

from meshwright.costmodel.comm.comm import Levels
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.stage.replica_lines import ReplicaLines, lines_among
from meshwright.forms.copied import copied
from meshwright.forms.exchange import Exchange
from meshwright.forms.sync import chosen_exchange, exchange, form_folds, stored_exchange, suits
from meshwright.ir.errors import PlanError
from meshwright.ir.memo import Memo
from meshwright.ir.plan.bag_problems import uncut_bags
from meshwright.ir.plan.folded import FOLDED, Fold, folded_mesh, folds_of
from meshwright.ir.plan.plan import ModelMesh, sync_name
from meshwright.ir.precision import AS_TRACED, Precision, precision
from meshwright.planner.across import mesh_variants
from meshwright.planner.across.mesh_variants import MeshVariant
from meshwright.planner.across.mesh_variants import variants as variants
from meshwright.planner.across.mesh_variants import ways as ways
from meshwright.planner.across.mesh_variants import ways_so_far as ways_so_far
from meshwright.planner.across.model_space import divisors as divisors
from meshwright.planner.across.model_space import tensor_sizes as tensor_sizes
from meshwright.planner.across.model_space import widest_node
from meshwright.planner.decisions.prefetch import depths
from meshwright.planner.decisions.recompute import modes
from meshwright.planner.decisions.store import pinned_store
from meshwright.planner.decisions.zero import levels
from meshwright.planner.inside.variants import sample_ranks_of, takes
from meshwright.planner.pins.constraints import Constraint, allowed, pinned
from meshwright.planner.problem.candidates import StageChoice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.saved_modes import asked as asked_saved
from meshwright.planner.problem.schedule_tools import (
    SCHEDULES,
    USUAL,
    recomputes_early,
    stages_per_rank,
    traits,
    twin,
)

FEW = 16
"""Replicas up to which every divisor is tried as the size of dp_shard."""


@dataclass(frozen=True)
class Mesh:
    """The mesh of a stage, and what is sharded over it."""

    dp_replicate: int
    dp_shard: int
    model: ModelMesh
    zero: int
    variant: str = ""
    """Which of the layouts on the model mesh."""
    prefetch: int = 0
    dp_inside: bool = False
    """Whether neighbouring devices are replicas, and a replica's devices lie apart."""
    sync: str = ""
    """A form by which replicas agree other than as `zero` says."""
    numbers: Precision = field(default=precision(AS_TRACED), repr=False)
    """What its blocks read of parameters, and gradients are summed in."""
    store: str = ""
    """Where parameters are, other than as `zero` says."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cases are looked up by mesh very often.
        return hash((self.dp_replicate, self.dp_shard, self.model, self.zero, self.variant,
                     self.prefetch, self.dp_inside, self.sync, self.store))  # fmt: skip

    @cached_property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @cached_property
    def exchange(self) -> Exchange:
        """What its replicas do to agree."""
        name = sync_name(self.zero, self.dp_shard)
        if self.sync:
            zero = 0 if name == sync_name(0, self.dp_shard) else self.zero
            found = chosen_exchange(self.sync, self.dp, self.dp_shard, zero, store=self.store)
            return copied(found, self.numbers)
        if self.store:
            return copied(stored_exchange(name, self.dp, self.zero, self.store), self.numbers)
        return copied(exchange(name, self.dp), self.numbers)

    @cached_property
    def exchange_as_stepped(self) -> Exchange:
        """The same for parameters that blocks read as they are stepped, beside copies of others."""
        return replace(self, numbers=precision(AS_TRACED)).exchange

    @property
    def is_refused(self) -> bool:
        """Whether its form does not go with its store, or with copies that blocks read."""
        try:
            return not self.exchange
        except PlanError:
            return True

    def folded(self, fold: Fold) -> "Mesh":
        """The mesh as it is for parameters for which axes are one with dp_shard."""
        if not fold:
            return self
        if fold not in self._folded:
            times = prod([size for axis, size in self.model if axis in fold])
            left = tuple([(axis, size) for axis, size in self.model if axis not in fold])
            self._folded[fold] = replace(self, dp_shard=self.dp_shard * times, model=left)
        return self._folded[fold]

    @cached_property
    def _folded(self) -> "dict[Fold, Mesh]":
        return {}

    @cached_property
    def folds(self) -> tuple[Fold, ...]:
        """All foldings that its parameters may have."""
        form = self.sync or sync_name(self.zero, self.dp_shard)
        return folds_of(self.model) if form_folds(form) and not self.store else ((),)

    def under(self, form: str) -> "Mesh":
        """The mesh with a form, where that goes with it."""
        fits = form and self.dp > 1 and suits(form, self.zero)
        return replace(self, sync=form) if fits else self

    def own_levels(self, tables: CostTables, ranks: Sequence[int]) -> Levels | None:
        """Of its ranks, in the order of the mesh, the links among those with samples of the first
        replica, where replicas train alone; None: they do not."""
        own = ranks[:: self.model_size][: self.dp_shard]
        return tables.levels(own) if self.exchange.apart else None

    def lines(self, tables: CostTables, ranks: tuple[int, ...], fold: Fold) -> ReplicaLines:
        """Of its ranks, in the order of the mesh, the links among those that hold the same of
        parameters for which axes are one with dp_shard."""
        sizes = ("dp_replicate", self.dp_replicate), ("dp_shard", self.dp_shard), *self.model
        view = self.folded(fold)
        return lines_among(
            tables, folded_mesh(sizes, ranks, fold)[1] if fold else ranks,
            view.model_size, view.dp, view.dp_shard,
        )  # fmt: skip

    @cached_property
    def model_size(self) -> int:
        """Ranks of one replica."""
        return prod([size for _, size in self.model])

    @cached_property
    def sample_ranks(self) -> int:
        """Of how many samples each replica has a multiple."""
        return sample_ranks_of(self.model, self.variant)

    @cached_property
    def size(self) -> int:
        return self.dp * self.model_size

    def placed(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of a group in the order of the mesh."""
        if not self.dp_inside:
            return ranks
        return tuple(ranks[m * self.dp + d] for d in range(self.dp) for m in range(self.model_size))


_names: Memo[tuple[int, tuple[Constraint, ...]], tuple[tuple[str, int], ...]] = Memo()
"""Schedules by pipeline ranks."""
_of_size: Memo[tuple[int, tuple[Constraint, ...]], tuple[Mesh, ...]] = Memo()


def microbatch_counts(problem: Problem) -> tuple[int, ...]:
    """Legal numbers of micro-batches; 1 if more would change the result and pins leave it.
    PlanError where they leave none that a job could run."""
    found = allowed(problem.constraints, "num_microbatches", divisors(problem.batch))
    if found and 1 not in found and problem.mixing:
        counts = ", ".join(map(str, found[:4]))
        raise PlanError(
            f"num_microbatches is pinned to {counts}, and samples of a step depend on each other; "
            f"nearest is 1: {next(uncut_bags(problem.graph, found[0]), problem.mixing[0])}"
        )
    return (1,) if problem.coupling and 1 in found else found


def pipeline_sizes(problem: Problem) -> tuple[int, ...]:
    """Legal numbers of pipeline ranks: at most one per device and block."""
    most = min(problem.cluster.num_devices, len(problem.graph.blocks))
    return allowed(problem.constraints, "pp", range(1, most + 1))


def schedules(problem: Problem, num_ranks: int) -> Iterator[tuple[str, int]]:
    """(schedule, stages per rank) for so many pipeline ranks; one rank needs only one schedule."""
    known, key = _names.of(problem), (num_ranks, problem.constraints)
    if key not in known:
        known[key] = tuple(_schedules(problem, num_ranks))
    return iter(known[key])


def _schedules(problem: Problem, num_ranks: int) -> Iterator[tuple[str, int]]:
    pin = pinned(problem.constraints, "schedule")
    names = allowed(problem.constraints, "schedule", SCHEDULES)
    if num_ranks == 1 and pin is None and USUAL in names:
        names = (USUAL,)
    # Those that say when to recompute, and those with pairs, are for finished plans
    # (`planner.search.finish`), unless asked for.
    names = (
        tuple(name for name in names if not (recomputes_early(name) or traits(name).pairs)) or names
    )
    for name in _distinct(names):
        for chunks in stages_per_rank(name):
            if num_ranks * chunks <= len(problem.graph.blocks):
                yield name, chunks


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of schedules that are the same under several names one, the usual one first."""
    firsts = sorted(names, key=lambda name: name != USUAL)
    return tuple(
        name
        for name in names
        if not any(twin(name, before) for before in firsts[: firsts.index(name)])
    )


def meshes(problem: Problem, size: int, samples: int) -> Iterator[Mesh]:
    """Every mesh of `size` devices whose replicas all get some of `samples` per micro-batch."""
    known, key = _of_size.of(problem), (size, problem.constraints)
    if key not in known:
        known[key] = tuple(meshes_of(problem, ways(problem), size))
    return (m for m in known[key] if takes(m.dp, m.model, m.variant, samples))


def asked_form(problem: Problem) -> str:
    """The form by which pins ask all stages with replicas to agree; empty: none, or several."""
    form = str(pinned(problem.constraints, "sync") or "")
    return form if form in problem.forms else ""


def mesh_of(problem: Problem, stage: StageChoice) -> Mesh:
    """The mesh of a stage, with the form that pins ask for."""
    found = Mesh(
        stage.dp_replicate, stage.dp_shard, stage.model, stage.zero, stage.variant, stage.prefetch,
        store=pinned_store(problem.constraints), numbers=problem.tables.numbers,
    )  # fmt: skip
    return found.under(asked_form(problem))


def add_way(problem: Problem, way: MeshVariant) -> None:
    """Adds a way to what all searches of this problem look at."""
    mesh_variants.add_way(problem, way)
    _of_size.of(problem).clear()


def meshes_of(problem: Problem, tried: Iterable[MeshVariant], size: int) -> Iterator[Mesh]:
    """Every mesh of `size` devices with one of these ways."""
    for model, variant in tried:
        width = prod(n for _, n in model)
        if size % width == 0 and allowed(problem.constraints, "dp", (size // width,)):
            yield from _sharded(problem, size // width, model, variant)


def _sharded(problem: Problem, dp: int, model: ModelMesh, variant: str) -> Iterator[Mesh]:
    for shard in allowed(problem.constraints, "dp_shard", _shards(problem, dp, model)):
        replicate = dp // shard
        if not allowed(problem.constraints, "dp_replicate", (replicate,)):
            continue
        store = pinned_store(problem.constraints)
        within = 1 if store else prod([size for axis, size in model if axis in FOLDED])
        for zero in levels(problem.constraints, dp, shard, folded=within):
            plain = Mesh(
                replicate, shard, model, zero, variant, store=store, numbers=problem.tables.numbers
            ).under(asked_form(problem))
            if plain.is_refused and pinned(problem.constraints, "zero") is None:
                continue
            for prefetch in depths(problem.constraints, plain.folded(plain.folds[-1]).exchange):
                yield replace(plain, prefetch=prefetch)
                if _may_turn(problem, dp, model):
                    yield replace(plain, prefetch=prefetch, dp_inside=True)


def _shards(problem: Problem, dp: int, model: ModelMesh) -> tuple[int, ...]:
    """Sizes of dp_shard: where there are many replicas, those of a node, of one, and all."""
    if dp <= FEW or pinned(problem.constraints, "dp_shard") is not None:
        return divisors(dp)
    inside = widest_node(problem) // prod(n for _, n in model)
    return tuple(n for n in divisors(dp) if n in (1, inside, dp))


def _may_turn(problem: Problem, dp: int, model: ModelMesh) -> bool:
    """Whether it can pay that replicas are neighbours: a group reaches over nodes."""
    width = prod(n for _, n in model)
    nodes = problem.cluster.num_nodes > 1
    return nodes and width > 1 and 1 < dp <= FEW and dp * width > widest_node(problem)


def recompute_modes(problem: Problem) -> tuple[bool, ...]:
    """Whether a stage may keep, or recompute, its activations; not where single values are made
    again or moved."""
    return (False,) if asked_saved(problem.constraints) else modes(problem.constraints)


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
