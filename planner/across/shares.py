"""Samples per replica of a stage on devices of several types, by their cost tables."""

from math import floor

import numpy as np

from meshwright.costmodel.cost_cache import BlockSpot, StageCost
from meshwright.costmodel.memory.memory import training_state
from meshwright.ir.plan.folded import Fold, fold_of
from meshwright.planner.across.balance import Replica, exact_shares
from meshwright.planner.inside.variants import sample_ranks_of
from meshwright.planner.problem.candidates import StageChoice, modes_of
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import mesh_of

_EACH, _POINTS = 8, 12
"""Sample counts that are priced: each up to here, then so many up to all; others lie between."""
_NEAR, _ROUNDS = 4, 3
"""Beside them so many on both sides of the shares that are best by then, in so many rounds."""
Types = tuple[str, ...]
"""Names of the device types of one replica."""


def balanced_shares(
    problem: Problem, stage: StageChoice, num_microbatches: int, in_flight: int = 1
) -> tuple[int, ...]:
    """Shares of a micro-batch with which the slowest replica of the stage is as fast as can be.

    Empty, which means as even as can be, where all replicas are on equal devices, or their ranks
    have samples of their own. `in_flight`:
    micro-batches whose activations the stage holds at once. Where memory holds no shares at all,
    those that are fastest, for the driver to refuse.
    """
    if len(problem.tables.devices) == 1 or sample_ranks_of(stage.model, stage.variant) > 1:
        return ()
    replicas = _replicas(problem, stage)
    if len(set(replicas)) == 1:
        return ()
    samples = problem.batch // num_microbatches
    kinds = sorted(set(replicas))
    points = {types: _points(samples) for types in kinds}
    held = {types: _most(problem, stage, types, samples, in_flight) for types in kinds}
    shares: tuple[int, ...] = ()
    for _ in range(_ROUNDS):
        tables = {t: _table(problem, stage, t, samples, points[t]) for t in kinds}
        fitting = [Replica(tables[types], held[types]) for types in replicas]
        boundless = [Replica(tables[types], samples) for types in replicas]
        shares = exact_shares(samples, fitting) or exact_shares(samples, boundless) or ()
        for types, share in zip(replicas, shares, strict=False):
            points[types] |= _around(share, samples)
    return shares


def _replicas(problem: Problem, stage: StageChoice) -> list[Types]:
    names, size = problem.tables.device_names, len(stage.devices) // stage.dp
    lines = [stage.devices[i * size : (i + 1) * size] for i in range(stage.dp)]
    return [tuple(sorted({names[rank] for rank in line})) for line in lines]


def _cost(problem: Problem, stage: StageChoice, device: str, samples: int) -> StageCost:
    """One micro-batch on the first rank, as if it were of that type."""
    tables, size = problem.tables, len(stage.devices) // stage.dp
    blocks = problem.graph.blocks[stage.start : stage.stop]
    layouts = {x.pattern: x for x in problem.layouts(stage.model, stage.variant)}
    levels = tables.model_levels(stage.devices[:size], stage.model)
    dp_levels = tables.levels(stage.devices[::size])
    own = mesh_of(problem, stage).own_levels(tables, stage.devices)
    spot = BlockSpot(samples, stage.dp, stage.model, device, dp_levels, levels, own_levels=own)
    return tables.stage(blocks, layouts, modes_of(problem, stage), spot)


def _table(
    problem: Problem, stage: StageChoice, types: Types, samples: int, points: set[int]
) -> tuple[float, ...]:
    """Seconds for 1, 2, ... samples on the slowest device of a replica."""
    counts = sorted(points)
    times = []
    for count in counts:
        costs = [_cost(problem, stage, device, count) for device in types]
        times.append(max(cost.forward_s + cost.backward_s for cost in costs))
    return tuple(np.interp(np.arange(1, samples + 1), counts, times).tolist())


def _points(samples: int) -> set[int]:
    more = np.geomspace(min(_EACH, samples), samples, _POINTS).round().astype(int)
    return {*range(1, min(_EACH, samples) + 1), *more.tolist()}


def _around(share: int, samples: int) -> set[int]:
    return set(range(max(1, share - _NEAR), min(samples, share + _NEAR) + 1))


def _most(problem: Problem, stage: StageChoice, types: Types, samples: int, in_flight: int) -> int:
    """Samples that every device of a replica holds: on the line through one and many of them."""
    least = samples
    for device in types:
        one, many = (_cost(problem, stage, device, n) for n in (1, samples))
        low, high = (in_flight * c.saved_bytes + c.workspace_bytes for c in (one, many))
        per_sample = (high - low) / max(1, samples - 1)
        state = sum(_state(problem, stage, one))
        ranks = [r for r in stage.devices if problem.tables.device_names[r] == device]
        room = problem.room_bytes((ranks[0],)) - state - (low - per_sample)
        if per_sample > 0:
            least = min(least, max(0, floor(room / per_sample)))
        elif room < 0:
            return 0
    return least


def _state(problem: Problem, stage: StageChoice, cost: StageCost) -> tuple[int, int, int]:
    mesh, sizes = mesh_of(problem, stage), dict[Fold, dict[str, int]]()
    for name, nbytes in cost.params.items():
        fold = fold_of(stage.model, cost.summed_over.get(name, ()))
        sizes.setdefault(fold if fold in mesh.folds else (), {})[name] = nbytes
    found = (0, 0, 0)
    for fold, own in sizes.items():
        trained, frozen = (
            sum(n for name, n in own.items() if name in names)
            for names in (problem.tables.trained, problem.tables.frozen)
        )
        view = mesh.folded(fold)
        state = training_state(
            sum(own.values()), trained,
            optimizer=problem.optimizer, exchange=view.exchange, dp_shard=view.dp_shard,
            frozen_bytes=frozen,
        )  # fmt: skip
        more = state.parameters_bytes, state.gradients_bytes, state.optimizer_bytes
        found = (found[0] + more[0], found[1] + more[1], found[2] + more[2])
    return found
