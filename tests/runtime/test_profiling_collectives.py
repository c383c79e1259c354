"""Collectives measured among forked ranks: complete, equal on every rank, within the budget."""

from dataclasses import replace
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OPERATIONS
from meshwright.ir.profile.profile import CollectiveRecord, GroupShape
from meshwright.runtime.profiling import collectives
from meshwright.runtime.profiling.clocks import loaded_clock, make_clock, message_clock
from meshwright.runtime.profiling.collectives import (
    LOADED,
    _Runner,
    _Task,
    group_shapes,
    measure_collectives,
    members,
)
from meshwright.runtime.profiling.copies import copies_exist, measure_copies
from meshwright.runtime.profiling.gloo_forks import sizes_for
from meshwright.runtime.profiling.timings import averaged
from meshwright.testing.spawn import run_ranks

SIZES = (2**10, 2**18)


def _measure(
    world: int, budget_s: float, sizes: tuple[int, ...]
) -> tuple[list[CollectiveRecord], float]:
    start = perf_counter()
    with patch.object(collectives, "_MOST", 6):  # rounds: enough to see what is there
        records = list(
            measure_collectives(
                Cluster.local(world), budget_s=budget_s, rank=dist.get_rank(), world=world,
                sizes=sizes,
            )
        )  # fmt: skip
    return records, perf_counter() - start


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


def test_sizes_that_a_budget_allows() -> None:
    """However short it is, where cores are shared messages as long as buckets are among them."""
    crowded, roomy = (
        replace(c, nodes=(replace(c.nodes[0], cores=cores),))
        for c, cores in ((Cluster.local(4), 2), (Cluster.local(4), 4))
    )
    assert sizes_for(crowded, 20.0) == (2**10, 2**22, 2**24)
    assert sizes_for(crowded, 2.0) == (2**10,)
    assert 2**26 in sizes_for(crowded, 40.0)
    assert len(sizes_for(roomy, 20.0)) > len(sizes_for(crowded, 40.0)) > 3


def test_what_is_measured_beside_computing() -> None:
    """On shared cores the longest first: a budget leaves out what comes last."""

    def wanted(sizes: tuple[int, ...], *, crowded: bool) -> list[int]:
        task = _Task(GroupShape(size=2, per_node=2), "all_reduce", loaded=True)
        none: Any = None
        return _Runner(none, none, none, task, (), crowded)._wanted(sizes)

    sizes = tuple(4**i for i in range(5, 14))
    assert wanted(sizes, crowded=True) == [2**24, 2**22, 2**18]
    assert wanted((2**10, 2**22), crowded=True) == [2**22, 2**18]
    assert wanted((2**10,), crowded=True) == wanted((2**10,), crowded=False) == []
    assert wanted(sizes, crowded=False) == [2**18, 2**20, 2**22, 2**24, 2**26]


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


CPU, FOUR = torch.device("cpu"), Cluster.local(4)


def on_cores(count: int) -> Cluster:
    return replace(FOUR, nodes=(replace(FOUR.nodes[0], cores=count),))


def test_crowded_groups_are_charged_processor_time() -> None:
    """With more processes than cores a wait is another's computation."""
    pair = make_clock(CPU, on_cores(2), 2)
    spans = [(0.0, 5.0, 0.01), (1.0, 6.0, 0.03)]
    assert pair.of_group(spans) == pytest.approx(0.02 * 4 / 2)
    # All processes wait for each other: from the last to come to the last to leave.
    assert make_clock(CPU, on_cores(2), 4).of_group(spans) == pytest.approx(5.0)
    # A core each: what holds a member up, on average, its waiting included.
    spans = [(0.0, 6.0, 0.01), (4.0, 6.0, 0.03)]
    assert make_clock(CPU, on_cores(4), 2).of_group(spans) == pytest.approx(4.0)
    # Beside computing the last to come counts where cores are shared; as with messages.
    assert loaded_clock(CPU, on_cores(2), 2).of_group(spans) == pytest.approx(2.0)
    assert loaded_clock(CPU, on_cores(4), 2).of_group(spans) == pytest.approx(4.0)
    assert message_clock(CPU, on_cores(4)).of_group(spans) == pytest.approx(2.0)


@pytest.mark.parametrize(("cores", "size", "expected"), [(4, 2, 0.5), (2, 2, 1.0), (2, 4, 1.0)])
def test_a_collective_is_charged_the_computing_that_it_slows(
    cores: int, size: int, expected: float
) -> None:
    """Half a second of processor time more on each; where two share a core both take longer."""
    clock = make_clock(CPU, on_cores(cores), size)
    spans = [(0.0, 5.0, 0.01)] * size
    slowed = [clock.with_slowed(span, 0.5) for span in spans]
    assert clock.of_group(slowed) - clock.of_group(spans) == pytest.approx(expected)
    message = message_clock(CPU, on_cores(cores))
    assert message.with_slowed(spans[0], 0.5) == spans[0]


def test_means_of_differences() -> None:
    assert averaged([-1.0, 0.25, 2.0, 90.0]).expected_s == pytest.approx(1.125)
    assert 0.0 < averaged([-2.0, 0.5]).expected_s < 1e-6


def test_cpus_have_no_copies() -> None:
    cpu = torch.device("cpu")
    assert not copies_exist(cpu)
    assert list(measure_copies(cpu, budget_s=1.0)) == []
