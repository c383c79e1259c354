"""The dynamic programme against all partitions, and its tables against the cost model."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.candidates import build_plan, uniform_choice
from meshwright.planner.partition import Pipeline, path_within, solve
from meshwright.planner.space import Mesh
from meshwright.planner.spans import highest, sums, sums_of_named
from meshwright.planner.stage_tables import Option, Options, StageTables
from tests.planner.problems import cluster, mlp, problem, traced

BLOCKS = 5


def options_of(seed: int, size: int) -> Options:
    """Two random options."""
    rng = np.random.default_rng((seed, size))
    shape = (2, BLOCKS + 1, BLOCKS + 1)
    empty = np.tril(np.full(shape[1:], np.inf))
    path, load, room = (rng.integers(1, 50, shape).astype(float) for _ in range(3))
    names = tuple(Option(Mesh(size, 1, (), 0), again) for again in (False, True))
    return Options(names, path + empty, load + empty, load + empty, room, room)


def by_hand(asked: Pipeline, limit: float) -> float:
    best = np.inf
    for inner in combinations(range(1, BLOCKS), asked.num_stages - 1):
        ends = (0, *inner, BLOCKS)
        for sizes in product(asked.sizes, repeat=asked.num_stages):
            if sum(sizes) != asked.num_devices:
                continue
            for picks in product(range(2), repeat=asked.num_stages):
                total = 0.0
                for s, pick in enumerate(picks):
                    found = asked.options(sum(sizes[:s]), sizes[s])
                    at = (pick, ends[s], ends[s + 1])
                    held = found.static_bytes[at] + asked.in_flight[s] * found.flight_bytes[at]
                    fits = held <= asked.room_bytes(0, 0) and found.load_s[at] <= limit
                    pinned = all(
                        (ends[s] <= b < ends[s + 1]) == (t == s) for b, t in asked.pins.items()
                    )
                    total += found.path_s[at] if fits and pinned else np.inf
                best = min(best, total)
    return float(best)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 999), stages=st.integers(1, 3), limit=st.integers(10, 60),
    room=st.integers(30, 200), pin=st.booleans(),
)  # fmt: skip
def test_partition_is_optimal(seed: int, stages: int, limit: int, room: int, pin: bool) -> None:
    asked = Pipeline(
        num_blocks=BLOCKS, num_devices=4, num_stages=stages, sizes=(1, 2, 3, 4),
        options=lambda first, size: options_of(seed + first, size),
        in_flight=tuple(range(stages, 0, -1)), room_bytes=lambda first, size: room,
        pins={2: 0} if pin else {},
    )  # fmt: skip
    answer = solve(asked, path_within(limit), join=np.add)
    expected = by_hand(asked, limit)
    assert (answer[0] if answer else np.inf) == expected
    if answer:
        assert [p.start for p in answer[1][1:]] == [p.stop for p in answer[1][:-1]]
        assert sum(p.option.mesh.size for p in answer[1]) == 4


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
    tables = StageTables(given)
    for i, stage in enumerate(choice.stages):
        first, size = stage.devices[0], len(stage.devices)
        mesh = Mesh(stage.dp_replicate, stage.dp_shard, stage.model, stage.zero)
        case = tables.case(first, Option(mesh, bool(stage.recompute)), choice.num_microbatches)
        path, _, busy, static, flight = (
            matrix[stage.start, stage.stop]
            for matrix in tables.entry(case, None, choice.num_microbatches)
        )
        predicted = plan.predicted.stages[i]
        assert busy == pytest.approx(predicted.forward_s + predicted.backward_s, rel=0.02)
        assert path >= busy
        held = min(choice.num_microbatches, len(choice.stages) - i)
        used = predicted.memory.used_bytes - predicted.memory.inputs_bytes
        # Where all are in flight at once, gradients come as activations go.
        most = 1.6 if 1 < held == choice.num_microbatches else 1.15
        assert 0.9 * used < static + held * flight < most * used
        assert size == mesh.size
