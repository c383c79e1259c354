"""Collectives measured among forked ranks: complete, equal on every rank, within the budget."""

from dataclasses import replace
from time import perf_counter

import pytest
import torch
import torch.distributed as dist

from meshwright.ir.cluster import Cluster
from meshwright.ir.device import OPERATIONS
from meshwright.ir.profile import CollectiveRecord, GroupShape
from meshwright.runtime.profiling.clocks import loaded_clock, make_clock, message_clock
from meshwright.runtime.profiling.collectives import (
    LOADED,
    group_shapes,
    measure_collectives,
    members,
)
from meshwright.runtime.profiling.copies import copies_exist, measure_copies
from meshwright.runtime.profiling.timings import averaged
from tests.spawn import run_ranks

SIZES = (2**10, 2**18)


def _measure(
    world: int, budget_s: float, sizes: tuple[int, ...]
) -> tuple[list[CollectiveRecord], float]:
    start = perf_counter()
    records = measure_collectives(
        Cluster.local(world), budget_s=budget_s, rank=dist.get_rank(), world=world, sizes=sizes
    )
    return list(records), perf_counter() - start


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_and_size(world: int) -> None:
    # The budget is ample, so that a busy machine leaves nothing out.
    seen = run_ranks(world, _measure, world, 60.0, SIZES)
    records = seen[0][0]
    assert all(found == records for found, _ in seen)
    idle = {(r.operation, r.group.size, r.nbytes) for r in records if not r.loaded}
    groups = {2, world}
    assert idle == {
        (op, size, n)
        for op in OPERATIONS
        for size in groups
        for n in SIZES
        if op != "send" or size == 2
    }
    assert {(r.operation, r.group.size) for r in records if r.loaded} == {
        (op, size) for op in LOADED for size in groups
    }
    assert all(r.time.median_s > 0 and r.time.count >= 5 for r in records)
    assert all(r.nbytes == 2**18 and r.compute_slowdown > 0 for r in records if r.loaded)


def test_the_budget_is_kept() -> None:
    sizes = tuple(4**i for i in range(5, 15))
    records, took_s = run_ranks(2, _measure, 2, 3.0, sizes)[0]
    # What a budget leaves out is at the large end.
    assert took_s < 12
    assert {r.operation for r in records if not r.loaded} == set(OPERATIONS)
    assert max(r.nbytes for r in records) < sizes[-1]


def test_shapes_of_clusters() -> None:
    def shapes(cluster: Cluster) -> list[tuple[int, int, int]]:
        return [(s.size, s.per_node, s.stride) for s in group_shapes(cluster)]

    assert shapes(Cluster.local(1)) == []
    assert shapes(Cluster.local(3)) == [(2, 2, 1), (3, 3, 1)]
    two = Cluster.preset("a100-80", num_nodes=2, devices_per_node=4)
    assert shapes(two) == [(2, 2, 1), (4, 4, 1), (2, 1, 4), (8, 4, 1)]
    assert shapes(Cluster.preset("l4", num_nodes=3, devices_per_node=1)) == [(2, 1, 1), (3, 1, 1)]


def test_sister_groups_fill_the_cluster() -> None:
    assert members(GroupShape(size=2, per_node=2), 5) == ((0, 1), (2, 3))
    strided = members(GroupShape(size=2, per_node=1, stride=4), 8)
    assert strided == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert members(GroupShape(size=4, per_node=4), 3) == ()


def test_a_collective_is_charged_what_it_adds_to_computing() -> None:
    """Beside the time that it holds its members up, that by which they computed more slowly."""
    cpu = torch.device("cpu")
    clock = make_clock(cpu, Cluster.local(4))
    assert clock.slowed_s(0.006, 0.005) == pytest.approx(0.001)
    assert clock.of_group([(0.0, 5.0), (1.0, 6.0), (4.0, 6.0)]) == pytest.approx(4.0)
    # A wait that others fill by computing faster costs nothing.
    assert clock.of_group([(0.0, 1.0), (3.0, 2.0)]) == pytest.approx(0.0)
    found = averaged([-1.0, 0.5, 2.0])
    assert found.expected_s == pytest.approx(0.5) and found.median_s == 0.5
    assert 0.0 < averaged([-2.0, 0.5]).expected_s < 1e-6
    # Messages are on their way while their receivers wait: from the last to come on.
    message = message_clock(cpu, Cluster.local(4))
    assert message.slowed_s(0.006, 0.005) == 0.0
    assert message.of_group([(0.0, 6.0), (4.0, 5.0)]) == pytest.approx(2.0)


def test_collectives_beside_computing_on_shared_cores() -> None:
    cpu, four = torch.device("cpu"), Cluster.local(4)
    spans = [(0.0, 6.0), (4.0, 6.0)]
    for cores, expected in ((2, 2.0), (4, 4.0)):
        cluster = replace(four, nodes=(replace(four.nodes[0], cores=cores),))
        assert loaded_clock(cpu, cluster).of_group(spans) == pytest.approx(expected)


def test_cpus_have_no_copies() -> None:
    cpu = torch.device("cpu")
    assert not copies_exist(cpu)
    assert list(measure_copies(cpu, budget_s=1.0)) == []
