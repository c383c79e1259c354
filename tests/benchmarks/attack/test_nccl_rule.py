"""NCCL's rules, kept by a process group of the tests: what breaks them hangs there, no job does."""

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.attack.schedules import (
    STEPS,
    TRACED,
    Crossing,
    Traced,
    crossings,
    distinct,
    pipeline,
    pipelines,
    planned_traced,
    train_all,
    train_crossings,
    train_traced,
)
from meshwright.codegen.lower.lower import lower
from meshwright.planner.problem.schedule_tools import SCHEDULES, make_schedule
from meshwright.runtime.job.job import Job
from meshwright.testing import nccl_rule
from meshwright.testing.handmade import batches, make_job
from meshwright.testing.nccl_rule import run_under_rule
from meshwright.testing.spawn import RankFailed


def test_every_schedule_ends_under_the_rule() -> None:
    """On three ranks, one to a stage or unequal ones, with a shared weight: whatever files the
    folder has, and what a solver makes."""
    every = [*pipelines(3, 4)]
    found = distinct(every)
    names = {one.plan.schedule.name for one in every}
    assert names == {*SCHEDULES, "synthesised"}, "each file has a table for three ranks"
    assert {"zbv", "gpipe", "pre_recompute_1f1b"} <= {one.plan.schedule.name for one in found}
    for one, difference in zip(found, train_all(3, found), strict=True):
        assert difference <= 1e-9, one.name


def test_stages_that_differ_in_tensor_parallelism_end_too() -> None:
    found = [*crossings(4)]
    assert {one.stages for one in found} >= {((1, 2), (2, 1)), ((2, 1), (1, 2))}
    for one, difference in zip(found, train_crossings(found), strict=True):
        assert difference.worst_of_both <= 1e-9, f"{one}: {difference}"


@pytest.mark.parametrize(
    ("one", "sends"), [(TRACED[0], "ring_attention"), (TRACED[1], "routed_experts")], ids=str
)
def test_rings_and_experts_beside_messages_end_too(one: Traced, sends: str) -> None:
    plan, graph = planned_traced(one)
    assert any(sends in program.source for program in lower(graph, plan, 0))
    difference = train_traced(one)
    assert difference.worst_of_both <= 1e-9, str(difference)


@pytest.mark.parametrize(("name", "ranks"), [("gpipe", 2), ("dapple_pb", 4)])
def test_pairs_that_are_not_opened_before_the_first_step_hang(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is as strict as NCCL, where these two hung."""
    monkeypatch.setattr(Job, "_open_pairs", lambda job: None)
    one = pipeline(name, make_schedule(name, ranks, 4, ranks), 1)
    with pytest.raises(RankFailed, match=r"waits for rank . to make the communicator pair"):
        run_under_rule(ranks, _step, one, patience_s=2.0)


def _step(one):  # type: ignore[no-untyped-def]
    make_job(one.chain, one.plan).step(batches(STEPS)[0])


def test_a_send_that_nobody_receives_is_not_over() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 waits for send 0 of 1 .* in pair of ranks 0, 1"):
        run_under_rule(2, _unreceived, patience_s=1.0)


def _unreceived() -> None:
    rank = dist.get_rank()
    x, never = torch.ones(1), torch.ones(1)
    if rank == 0:
        dist.isend(x, 1)
        dist.isend(never, 1).wait()
    else:
        dist.irecv(x, 0).wait()
        time.sleep(3.0)


@pytest.mark.parametrize("groups", [1, 2])
def test_what_is_asked_for_early_keeps_back_what_follows(groups: int) -> None:
    """In one stream both ranks would first receive; so pipelines have a group per direction."""
    if groups == 2:
        assert run_under_rule(2, _asks_early, groups, patience_s=5.0) == [7.0, 1.0]
        return
    with pytest.raises(RankFailed, match=r"rank . has 'recv 0 1 .*' where rank . has 'recv 0 1"):
        run_under_rule(2, _asks_early, groups, patience_s=1.0)


def _asks_early(groups: int) -> float:
    """Rank 0 asks for what rank 1 only makes of what rank 0 sends after that."""
    rank = dist.get_rank()
    up, *more = [dist.new_group() for _ in range(groups)]
    down = more[0] if more else up
    for group, source in ((up, 0), (down, 1)):  # the communicators are there
        act = dist.isend if rank == source else dist.irecv
        act(torch.ones(1), 1 - rank, group=group).wait()  # type: ignore[union-attr]
    x = torch.ones(1)
    if rank == 0:
        asked = torch.zeros(1)
        arriving = dist.irecv(asked, 1, group=down)
        dist.isend(x, 1, group=up).wait()  # type: ignore[union-attr]
        arriving.wait()  # type: ignore[union-attr]
        return float(asked)
    dist.irecv(x, 0, group=up).wait()  # type: ignore[union-attr]
    dist.isend(7 * x, 0, group=down).wait()  # type: ignore[union-attr]
    return float(x)


def test_messages_of_a_pair_keep_their_order() -> None:
    """Tags do not help: NCCL has none."""
    with pytest.raises(RankFailed, match=r"'send 1 2 torch.float32' where rank 1 has 'recv 0 1"):
        run_under_rule(2, _swapped, patience_s=5.0)


def _swapped() -> None:
    act = dist.isend if dist.get_rank() == 0 else dist.irecv
    first, second = (1, 0) if dist.get_rank() == 0 else (0, 1)
    works = [act(torch.ones(1 + tag), 1 - dist.get_rank(), tag=tag) for tag in (first, second)]
    for work in works:
        work.wait()


def _unequal_parts() -> list[list[float]]:
    """What each of three ranks gets of parts of other sizes, of which the second is none."""
    rank, sizes = dist.get_rank(), [2, 0, 3]
    gathered = [torch.zeros(n) for n in sizes]
    dist.all_gather(gathered, torch.full((sizes[rank],), 1.0 + rank))
    own = torch.zeros(sizes[rank])
    dist.reduce_scatter(own, [torch.full((n,), float(n)) for n in sizes])
    swapped = torch.zeros(3)
    dist.all_to_all_single(swapped, torch.arange(3.0) + 10 * rank)
    return [torch.cat(gathered).tolist(), own.tolist(), swapped.tolist()]


@pytest.mark.parametrize("far", [False, True], ids=["where it is", "through the host"])
def test_parts_of_other_sizes_come_whole(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the host as what is on GPUs."""
    monkeypatch.setattr(nccl_rule, "_is_far", lambda x: far)
    for rank, (gathered, own, swapped) in enumerate(run_under_rule(3, _unequal_parts)):
        assert gathered == [1, 1, 3, 3, 3]
        assert own == [[6.0, 6.0], [], [9.0, 9.0, 9.0]][rank]
        assert swapped == [rank, 10 + rank, 20 + rank]


def test_jobs_go_through_the_host_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_rule, "_is_far", lambda x: True)
    one = Crossing(((1, 2), (2, 1)), "zero_bubble")
    (found,) = train_crossings([one])
    assert found.worst_of_both <= 1e-9, str(found)
