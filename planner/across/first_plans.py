"""Plans that are found at once: every stage alike, blocks in equal parts, ranked by a rough guess.

They need no tables over runs of blocks, whose size grows with the square of the blocks: they are
what is left of a search whose time is up, and what is tried of models too deep for tables. A guess
has all that a block does and what replicas send each other, as if nothing but prefetched parameters
went beside computing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import NamedTuple

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.comm.comm import collective_time
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.memory.memory import training_state
from meshwright.forms.exchange_rows import Send
from meshwright.forms.retention import AGAIN
from meshwright.ir.deadline import check_time
from meshwright.ir.plan.folded import Fold, fold_of
from meshwright.planner.across.mesh_variants import MeshVariant
from meshwright.planner.inside.variants import takes
from meshwright.planner.problem.candidates import Choice, recomputable, uniform_choice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import USUAL
from meshwright.planner.problem.space import (
    Mesh,
    meshes_of,
    microbatch_counts,
    pipeline_sizes,
    recompute_modes,
    schedules,
    ways,
    ways_so_far,
)

COUNTS = 6
"""Numbers of micro-batches that are tried for each number of stages."""
SAMPLE_BYTES = 1e9
"""A message of so many tells what each byte takes."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A plan in a few words."""

    ranks: int
    mesh: Mesh
    count: int
    again: bool


def first_choices(problem: Problem, among: Sequence[MeshVariant] = ()) -> Iterator[Choice]:
    """The most promising first: those that should fit by their guessed step, then the others. Of
    all meshes, or where time was up before these were known, of those that are; or `among` few."""
    guess = _Guess(problem)
    ranked = sorted(
        ((*guess.of(draft), number, draft) for number, draft in enumerate(_drafts(problem, among))),
        key=lambda item: item[:3],
    )
    for *_, draft in ranked:
        check_time()
        yield _choice(problem, draft)


def _drafts(problem: Problem, among: Sequence[MeshVariant] = ()) -> Iterator[_Draft]:
    devices, counts = problem.cluster.num_devices, microbatch_counts(problem)
    tried = among or ways_so_far(problem) or ways(problem)
    for ranks in pipeline_sizes(problem):
        if devices % ranks or not any(chunks == 1 for _, chunks in schedules(problem, ranks)):
            continue
        wanted = [n for n in counts if n >= 2 * ranks] or list(counts[-1:])
        simple = [m for m in meshes_of(problem, tried, devices // ranks) if _is_simple(m)]
        for count in (counts[:1] if ranks == 1 else ()) + tuple(wanted[:COUNTS]):
            for mesh in simple:
                check_time()
                if takes(mesh.dp, mesh.model, mesh.variant, problem.batch // count):
                    for again in recompute_modes(problem):
                        yield _Draft(ranks, mesh, count, again)


def _is_simple(mesh: Mesh) -> bool:
    """At most one axis inside a replica, or ranks of experts with samples of their own."""
    plain = not mesh.variant and len(mesh.model) < 2
    return (plain or mesh.sample_ranks > 1) and not mesh.dp_inside


def _choice(problem: Problem, draft: _Draft) -> Choice:
    mesh = draft.mesh
    names = [name for name, chunks in schedules(problem, draft.ranks) if chunks == 1]
    return uniform_choice(
        problem, pp=draft.ranks, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard,
        model=mesh.model, variant=mesh.variant, zero=mesh.zero, prefetch=mesh.prefetch,
        num_microbatches=draft.count,
        schedule=USUAL if USUAL in names else names[0],
        recompute=AGAIN if draft.again else "none",
    )  # fmt: skip


class _MessageTimes(NamedTuple):
    """Seconds of messages among replicas for each byte that a rank has of parameters."""

    each_s_per_byte: float
    """Of each micro-batch."""
    once_s_per_byte: float
    """Of a step, beside these."""


class _Guess:
    """About what drafts need, from one block of each kind."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self._costs: dict[tuple[MeshVariant, int], tuple[tuple[BlockCost, int, bool], ...]] = {}
        self._messages: dict[object, _MessageTimes] = {}

    def of(self, draft: _Draft) -> tuple[bool, float]:
        """Whether it needs too much memory, and the seconds of a step."""
        mesh, samples = draft.mesh, ceil(self.problem.batch / draft.count / draft.mesh.dp)
        held = busy = worked = 0.0
        sizes = dict[Fold, float]()
        for cost, number, treated in self._of(MeshVariant(mesh.model, mesh.variant), samples):
            again = treated and draft.again
            cost = cost.recomputed() if again else cost
            busy += number * (cost.forward_s + cost.backward_s)
            held += number * (cost.saved_bytes + sum(cost.saved_inputs))
            worked = max(worked, cost.workspace_bytes + cost.remade_bytes)
            for nbytes, over in zip(cost.param_bytes, cost.summed_over, strict=True):
                fold = fold_of(mesh.model, over) if len(mesh.folds) > 1 else ()
                sizes[fold] = sizes.get(fold, 0.0) + number * nbytes
        flight = min(draft.count, draft.ranks)
        needed = int(held * flight / draft.ranks + worked)
        each_s = once_s = 0.0
        for fold, stored in sizes.items():
            needed += self._state_bytes(mesh.folded(fold), stored / draft.ranks)
            sent = self._sent_s(mesh, fold)
            each_s += sent.each_s_per_byte * stored / draft.ranks
            once_s += sent.once_s_per_byte * stored / draft.ranks
        busy /= draft.ranks
        busy = max(busy, each_s) if mesh.prefetch else busy + each_s
        return needed > self._room, busy * (draft.count + draft.ranks - 1) + once_s

    def _sent_s(self, mesh: Mesh, fold: Fold) -> "_MessageTimes":
        """What replicas on the first devices send of parameters for which these axes are folded."""
        key = mesh.dp_replicate, mesh.dp_shard, mesh.model, mesh.zero, mesh.sync, mesh.store, fold
        if key not in self._messages:
            exchange = mesh.folded(fold).exchange
            lines = mesh.lines(self.problem.tables, tuple(range(mesh.size)), fold)

            def per_byte(sends: Iterable[Send]) -> float:
                shard = mesh.folded(fold).dp_shard
                return sum(
                    collective_time(send.primitive, SAMPLE_BYTES, lines.levels(send.axis))
                    * send.times / (shard if send.of_part else 1) / SAMPLE_BYTES
                    for send in sends
                )  # fmt: skip

            self._messages[key] = _MessageTimes(
                per_byte([*exchange.fetches, *exchange.every_backward]),
                per_byte([*exchange.last_backward, *exchange.at_end, *exchange.published]),
            )
        return self._messages[key]

    def _state_bytes(self, mesh: Mesh, stored: float) -> int:
        """Of so many bytes of parameters."""
        trained = int(stored * self._trained_share)
        state = training_state(
            int(stored), trained, optimizer=self.problem.optimizer, exchange=mesh.exchange,
            dp_shard=mesh.dp_shard, frozen_bytes=int(stored) - trained,
        )  # fmt: skip
        return state.parameters_bytes + state.gradients_bytes + state.optimizer_bytes

    @cached_property
    def _room(self) -> int:
        return self.problem.room_bytes(tuple(range(self.problem.cluster.num_devices)))

    @cached_property
    def _trained_share(self) -> float:
        wider = 1 / (self.problem.tables.numbers.copied or 1.0)
        sizes = [
            (t.nbytes * (wider if t.requires_grad else 1.0), t.requires_grad)
            for t in self.graph.parameters
        ]
        return sum(n for n, trained in sizes if trained) / max(1, sum(n for n, _ in sizes))

    def _of(self, way: MeshVariant, samples: int) -> tuple[tuple[BlockCost, int, bool], ...]:
        """(cost, how many such blocks, whether they can be recomputed) on the slowest device."""
        if (way, samples) not in self._costs:
            model = way.model
            tables, blocks = self.problem.tables, self.graph.distinct_blocks()
            levels = tables.model_levels(tuple(range(prod(size for _, size in model))), model)
            layouts = {layout.pattern: layout for layout in self.problem.layouts(*way)}
            again = frozenset(recomputable(self.graph, self.graph.blocks))
            found = []
            for block in blocks:
                check_time()
                each = [
                    tables.block(
                        block,
                        layouts[block.pattern],
                        BlockSpot(samples, 1, model, name, (), levels),
                    )
                    for name in dict.fromkeys(tables.device_names)
                ]
                slowest = max(each, key=lambda cost: cost.forward_s + cost.backward_s)
                number = self.graph.pattern_counts[block.pattern]
                found.append((slowest, number, block.pattern in again))
            self._costs[way, samples] = tuple(found)
        return self._costs[way, samples]
