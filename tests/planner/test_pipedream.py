"""PipeDream's planner on chains and machines whose answers are found by hand or by trying all."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from meshwright.costmodel.comm.comm import send_time
from meshwright.ir.plan.verify import verify
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import compositions
from meshwright.planner.search.search import search_problem
from meshwright.planner.searchers.pipedream import stages_of, units_of
from tests.planner.layered import machines, problem


def found(given: Problem, samples: int) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(s.start, s.stop, s.devices) for s in stages_of(given, samples)]


def test_large_weights_and_small_activations_make_a_pipeline() -> None:
    given = problem([(10.0, 10, 10**8)] * 4, 8, machines(1, 2, 1e9, 1e9))
    assert found(given, 4) == [(0, 2, (0,)), (2, 4, (1,))]


def test_small_weights_and_large_activations_are_replicated() -> None:
    given = problem([(10.0, 10**9, 10)] * 4, 8, machines(1, 2, 1e9, 1e9))
    assert found(given, 4) == [(0, 4, (0, 1))]


def test_micro_batches_have_a_sample_for_each_replica() -> None:
    given = problem([(10.0, 10**9, 10)] * 4, 8, machines(1, 2, 1e9, 1e9))
    assert all(len(devices) == 1 for _, _, devices in found(given, 1))


def test_heavy_layers_get_more_devices() -> None:
    """As VGG: slow layers without weights, then a fast one with most weights."""
    given = problem(
        [(30.0, 10, 10), (30.0, 10, 10), (20.0, 10, 10**9)], 8, machines(1, 4, 1e9, 1e9)
    )
    assert found(given, 8) == [(0, 2, (0, 1, 2)), (2, 3, (3,))]


def test_a_pipeline_inside_nodes_is_replicated_between_them() -> None:
    """Slow inside, fast between: each node runs the whole pipeline."""
    cluster = machines(2, 2, 1e8, 1e11)
    given = problem([(10.0, 10, 10**8)] * 2, 8, cluster)
    assert found(given, 4) == [(0, 1, (0, 2)), (1, 2, (1, 3))]
    plan = search_problem(given, "pipedream")
    assert verify(plan, given.graph, cluster) == ()


def test_a_pipeline_between_nodes_of_replicas() -> None:
    given = problem([(10.0, 10, 10**8)] * 2, 8, machines(2, 2, 1e12, 1e6))
    assert found(given, 4) == [(0, 1, (0, 1)), (1, 2, (2, 3))]


def test_versions_of_weights_must_fit() -> None:
    """Four stages hold up to four versions of their weights, besides gradients and Adam's state."""
    room = 15 * 10**8
    layers = [(10.0, 10, 2 * 10**8)] * 4
    cluster = machines(1, 4, 1e7, 1e7)
    assert len(found(problem(layers, 8, cluster, constraints=(f"memory<={room}B",)), 8)) == 4
    low = problem(layers, 8, cluster, constraints=(f"memory<={room - 2 * 10**8}B",))
    assert found(low, 8) == []


def test_levels_are_those_of_equal_nodes() -> None:
    units = units_of(machines(3, 2, 4e9, 1e9))
    assert [(u.count, u.inside, u.rate) for u in units] == [(2, 1, 4e9), (3, 2, 2e9)]
    assert [(u.count, u.inside) for u in units_of(machines(1, 4, 1e9, 1e9))] == [(4, 1)]
    uneven = machines(2, 2, 4e9, 1e9)
    more = replace(uneven.nodes[1], devices=uneven.nodes[1].devices * 2)
    whole = units_of(replace(uneven, nodes=(uneven.nodes[0], more)))
    assert [(u.count, u.inside, u.rate) for u in whole] == [(6, 1, 1e9)]


@pytest.mark.parametrize("seed", range(6))
def test_one_level_is_as_good_as_all_plans_together(seed: int) -> None:
    """The slowest stage or link of all cuts and replica counts, by trying them."""
    layers = [
        (1.0 + (7 * i + seed) % 5, 10**5 * ((3 * i + seed) % 4), 10**5 * ((i * seed) % 7))
        for i in range(5)
    ]
    samples, devices, rate = 4, 4, 1e9
    given = problem(layers, 8, machines(1, devices, rate, rate))
    link = given.cluster.nodes[0].link

    def stage_s(start: int, stop: int, replicas: int) -> float:
        busy_s = samples * sum(ms for ms, _, _ in layers[start:stop]) * 1e-3
        weights = sum(w for _, _, w in layers[start:stop])
        return max(busy_s, 4 * (replicas - 1) / replicas * weights / rate) / replicas

    def worst_s(cuts: tuple[int, ...], replicas: tuple[int, ...]) -> float:
        ends = (0, *cuts, len(layers))
        whole = {i: given.tables.border_bytes(i)[0] / 8 * samples for i in cuts}
        return max(
            *(stage_s(*ends[i : i + 2], n) for i, n in enumerate(replicas)),
            *(2 * send_time(whole[i], link) for i in cuts),
            0.0,
        )

    best_s = min(
        worst_s(cuts, replicas)
        for stages in range(1, 5)
        for cuts, replicas in product(
            combinations(range(1, 5), stages - 1), compositions(devices, stages)
        )
    )
    stages = found(given, samples)
    ours = worst_s(tuple(s[0] for s in stages[1:]), tuple(len(s[2]) for s in stages))
    assert ours == pytest.approx(best_s, rel=1e-3)
