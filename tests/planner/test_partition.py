"""The dynamic programme against all partitions, and its tables against the cost model."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.stage.placement import spots
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.partition import Pipeline, path_within, solve
from meshwright.planner.across.places import Places
from meshwright.planner.across.run_classes import RunClasses
from meshwright.planner.across.run_costs import At, RunCosts
from meshwright.planner.across.spans import highest, sums, sums_of_named
from meshwright.planner.across.stage_options import Figures, StageOptions
from meshwright.planner.across.stage_tables import StageTables, _undominated
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.space import Mesh
from tests.planner.problems import cluster, mlp, problem, traced
from tests.wide_layers import WideLayers, rows

BLOCKS = 5


EDGE = np.arange(BLOCKS + 1)
CLASSES = RunClasses(
    np.repeat(EDGE, BLOCKS + 1), np.tile(EDGE, BLOCKS + 1),
    np.where(EDGE[:, None] < EDGE, EDGE[:, None] * (BLOCKS + 1) + EDGE, -1),
)  # fmt: skip
"""Every run is of a kind of its own."""


def options_of(seed: int, size: int, modes: tuple[bool, ...] = (False, True)) -> StageOptions:
    """Two random meshes; recomputing takes longer and needs less."""
    rng = np.random.default_rng((seed, size))
    shape = (2, (BLOCKS + 1) ** 2)
    path, load, room = (rng.integers(1, 50, shape).astype(float) for _ in range(3))
    keep = Figures(path, load, load, room, room, 0 * room)
    again = Figures(path + 10, load + 10, load + 10, room, room / 4, 0 * room)
    layers = np.broadcast_to((CLASSES.stop - CLASSES.start).clip(0).astype(float), shape)
    names = (Mesh(size, 1, (), 0), Mesh(1, size, (), 1))
    return StageOptions(names, keep, lambda: (again,) if True in modes else (), layers, modes)


def by_hand(asked: Pipeline, limit: float, room: float) -> float:
    best = np.inf
    for inner in combinations(range(1, BLOCKS), asked.num_stages - 1):
        ends = (0, *inner, BLOCKS)
        for sizes in product(asked.sizes, repeat=asked.num_stages):
            if sum(sizes) != asked.num_devices:
                continue
            total = 0.0
            for s in range(asked.num_stages):
                found = asked.fitted(s, sum(sizes[:s]), sizes[s])
                assert found
                held = (asked, found.options, s, asked.num_stages - s, room)
                total += stage_by_hand(*held, ends[s], ends[s + 1], limit)
            best = min(best, total)
    return float(best)


def stage_by_hand(
    asked: Pipeline,
    found: StageOptions,
    stage: int,
    in_flight: int,
    room: float,
    start: int,
    stop: int,
    limit: float,
) -> float:
    """The shortest path of all meshes and all numbers of recomputed blocks."""
    if not all((start <= b < stop) == (t == stage) for b, t in asked.pins.items()):
        return float("inf")
    best, layers, kind = float("inf"), stop - start, CLASSES.index[start, stop]
    for pick in range(2):
        keep, *more = (
            [float(figure[pick, kind]) for figure in held] for held in (found.keep, *found.more())
        )
        again = more[-1] if more else keep
        for count in range(layers + 1):
            path, load, _, static, flight, _ = (
                k + (a - k) * count / layers for k, a in zip(keep, again, strict=True)
            )
            held = static + in_flight * flight
            allowed = (count > 0) in found.modes
            if allowed and held <= room + 1e-9 and load <= limit + 1e-9:
                best = min(best, path)
    return best


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 999), stages=st.integers(1, 3), limit=st.integers(10, 60),
    room=st.integers(30, 200), pin=st.booleans(),
    modes=st.sampled_from([(False, True), (False,), (True,)]),
)  # fmt: skip
def test_partition_is_optimal(
    seed: int, stages: int, limit: int, room: int, pin: bool, modes: tuple[bool, ...]
) -> None:
    asked = Pipeline(
        classes=CLASSES, num_blocks=BLOCKS, num_devices=4, num_stages=stages, sizes=(1, 2, 3, 4),
        fitted=lambda stage, first, size: options_of(seed + first, size, modes).fitted(
            stages - stage, room
        ),
        keeping=lambda _, first, size: options_of(seed + first, size, modes).kept(),
        pins={2: 0} if pin else {},
    )  # fmt: skip
    answer = solve(asked, path_within(limit), join=np.add)
    expected = by_hand(asked, limit, room)
    assert (answer[0] if answer else np.inf) == pytest.approx(expected)
    kept = solve(replace(asked, fitted=asked.keeping), path_within(limit), join=np.add)
    assert answer is None or (kept is not None and kept[0] <= answer[0])
    if answer:
        assert [p.start for p in answer[1][1:]] == [p.stop for p in answer[1][:-1]]
        assert sum(p.mesh.size for p in answer[1]) == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 4)] * 10), min_size=1, max_size=8))
def test_what_is_left_is_what_nothing_beats(drawn: list[tuple[int, ...]]) -> None:
    """In time and memory, in each of two kinds of runs."""
    every = [np.array(values, float).reshape(5, 2) for values in drawn]
    left = _undominated([Figures(*values, np.zeros(2)) for values in every])
    for index, mine in enumerate(every):
        better = [n for n, x in enumerate(every) if n != index and (x <= mine).all()]
        assert index in left if not better else any((every[n] <= mine).all() for n in left)
    assert not any((every[a] <= every[b]).all() for a in left for b in left if a != b)


def test_blocks_whose_replicas_meet_are_priced_with_them() -> None:
    """Statistics of batch norms are; others cost the same wherever replicas are."""
    for model, meet in (("gpt2", False), ("resnet50", True)):
        asked = problem(traced(model), cluster(2))
        stage = build_plan(asked, uniform_choice(asked, dp_replicate=2)).stages[0]
        (spot,) = spots(asked.tables, stage)
        assert RunCosts(asked).canonical(At(spot, "")).spot.dp == (2 if meet else 1)


def test_spans() -> None:
    assert sums([1, 2, 4])[0].tolist() == [0, 1, 3, 7]
    assert highest([1, 3, 2])[1].tolist() == [0, 0, 3, 3]
    shared = sums_of_named([{"a": 5, "b": 1}, {"b": 1}, {"a": 5}])
    assert shared[0].tolist() == [0, 6, 6, 6]
    assert shared[1].tolist() == [-6, 0, 1, 6]


@pytest.mark.parametrize("model", ["mlp", "gpt2", "t5"])
@pytest.mark.parametrize(
    "asked",
    [
        {"dp_replicate": 4}, {"dp_shard": 4, "zero": 1}, {"dp_shard": 4, "zero": 2},
        {"dp_shard": 2, "dp_replicate": 2, "zero": 3}, {"tp": 2, "dp_replicate": 2},
        {"pp": 2, "dp_replicate": 2, "num_microbatches": 4}, {"recompute": "full", "tp": 4},
        {"pp": 2, "dp_shard": 2, "zero": 2, "num_microbatches": 2, "recompute": "full"},
    ],
)  # fmt: skip
def test_tables_say_what_the_cost_model_says(model: str, asked: dict[str, object]) -> None:
    given = problem(mlp(4) if model == "mlp" else traced(model), cluster(4))
    choice = uniform_choice(given, **asked)  # type: ignore[arg-type]
    plan = build_plan(given, choice)
    assert plan.predicted
    runs = RunCosts(given)
    tables = StageTables(runs, Places(given, tuple(range(4))))
    for i, stage in enumerate(choice.stages):
        first, size = stage.devices[0], len(stage.devices)
        mesh = Mesh(stage.dp_replicate, stage.dp_shard, stage.model, stage.zero)
        case = tables.case(first, mesh, choice.num_microbatches)
        kind = runs.classes.index[stage.start, stage.stop]
        path, _, busy, static, flight, _ = (
            values[kind]
            for values in tables.entry(
                case, "full" if stage.recompute else "keep", None, choice.num_microbatches
            )
        )
        predicted = plan.predicted.stages[i]
        assert busy == pytest.approx(predicted.forward_s + predicted.backward_s, rel=0.02)
        assert path >= busy
        held = min(choice.num_microbatches, len(choice.stages) - i)
        used = predicted.memory.used_bytes - predicted.memory.inputs_bytes
        # Where all are in flight at once, gradients come as activations go.
        most = 1.6 if 1 < held == choice.num_microbatches else 1.15
        # Tables have one block's gradients on their way where the simulator may have two.
        assert 0.87 * used < static + held * flight < most * used
        assert size == mesh.size


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tables_have_messages_where_they_are(recompute: str) -> None:
    """Of wide layers, where they are as large as what is saved."""
    wide = trace(WideLayers(), rows(), precision="fp32")
    given = make_problem(wide, cluster(2), precision="fp32", optimizer="sgd")
    choice = uniform_choice(given, pp=2, num_microbatches=4, recompute=recompute)
    plan = build_plan(given, choice)
    assert plan.predicted
    runs = RunCosts(given)
    tables = StageTables(runs, Places(given, (0, 1)))
    for i, stage in enumerate(choice.stages):
        case = tables.case(i, Mesh(1, 1, stage.model, stage.zero), 4)
        found = tables.entry(case, "full" if recompute == "full" else "keep", None, 4)
        kind = runs.classes.index[stage.start, stage.stop]
        static, flight = found.static_bytes[kind], found.flight_bytes[kind]
        memory = plan.predicted.stages[i].memory
        used = memory.used_bytes - memory.inputs_bytes
        assert static + (2 - i) * flight == pytest.approx(used, rel=0.03)
