"""Which ranks do the same work: they are lowered once per kind and stepped once."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.codegen.lower.lower import lower
from meshwright.codegen.lower.program import StageProgram
from meshwright.forms.exchange import Exchange
from meshwright.forms.flat import chunk_rows
from meshwright.forms.folding import fold_for
from meshwright.forms.sync import exchange_of
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.folded import folded
from meshwright.ir.plan.parameters import choice_of, stage_for
from meshwright.ir.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class RankClass:
    """Ranks whose tensors have the same shapes; the first one stands for all."""

    ranks: tuple[int, ...]
    programs: tuple[StageProgram, ...]

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(program.index for program in self.programs)


def rank_classes(plan: Plan, graph: Graph) -> tuple[RankClass, ...]:
    """All ranks of the plan, in classes, in the order of their first ranks."""
    lowered: dict[object, tuple[StageProgram, ...]] = {}
    found: dict[object, list[int]] = {}
    for rank in sorted({rank for stage in plan.stages for rank in stage.devices}):
        place = tuple(_places(plan, rank))
        if place not in lowered:
            lowered[place] = lower(graph, plan, rank)
        # Ranks at other coordinates are equal too if all that is split there is split evenly.
        key = tuple(map(_shapes, lowered[place])), tuple(_shards(plan, rank, lowered[place]))
        found.setdefault((key, *(p[:2] for p in place)), []).append(rank)
    places = {rank: tuple(_places(plan, rank)) for ranks in found.values() for rank in ranks[:1]}
    return tuple(RankClass(tuple(ranks), lowered[places[ranks[0]]]) for ranks in found.values())


def _places(plan: Plan, rank: int) -> Iterator[tuple[object, ...]]:
    """What a rank's programs depend on, stage by stage."""
    for index, stage in enumerate(plan.stages):
        if rank in stage.devices:
            at = stage.coordinates(rank)
            model = tuple(at[axis] for axis, _ in stage.model)
            yield index, stage.batch_shares[at["dp"]], model


def _shards(plan: Plan, rank: int, programs: tuple[StageProgram, ...]) -> Iterator[int]:
    """Rows of each parameter in the rank's shard: the last shards may have fewer, or none."""
    for program in programs:
        stage = plan.stages[program.index]
        known: dict[object, tuple[int, Exchange, int]] = {}
        for param in program.params:
            view = stage_for(stage, param.fqn)
            key = str(choice_of(stage.by_parameter, param.fqn)), fold_for(view, param.sum_over)
            if key not in known:
                view = folded(view, key[1])
                at = view.coordinates(rank)["dp_shard"]
                known[key] = view.mesh.get("dp_shard", 1), exchange_of(view), at
            size, exchange, at = known[key]
            if exchange.is_split("optimizer") and exchange.owns_whole:
                yield at  # each rank has others
            elif exchange.is_split("optimizer"):
                start, stop = chunk_rows(param.local_shape[0] if param.local_shape else 1, size, at)
                yield stop - start


def _shapes(program: StageProgram) -> object:
    """Shapes of all that a stage stores, receives and sends on a rank."""
    values = tuple(
        (value.name, value.shape, value.dtype) for value in (*program.receives, *program.sends)
    )
    return program.index, values, tuple((p.name, p.local_shape) for p in program.params)
