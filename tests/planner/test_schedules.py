"""Every schedule is legal at every size, keeps its memory promise, and torch reads its rows."""

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    _Action,
    _validate_schedule,
)

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.schedule import (
    FORWARDS,
    Action,
    Schedule,
    Work,
    check_schedule,
    parse_schedule,
)
from meshwright.planner.problem.schedule_tools import SCHEDULES, make_schedule, stages_per_rank

GOLDEN = {
    "gpipe": """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2""",
    "one_f_one_b": """
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2""",
    "dapple_pa": """
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2""",
    "dapple_pb": """
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2""",
    "interleaved": """
        0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
        1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2""",
    "zero_bubble": """
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2""",
    "pre_recompute_1f1b": """
        0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2
        1F0 1R0 1B0 1F1 1R1 1B1 1F2 1R2 1B2""",
    "last_no_recompute_1f1b": """
        0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2
        1K0 1B0 1K1 1B1 1K2 1B2""",
    "full_critical_path_1f1b": """
        0K0 0F1 0F2 0B0 0R1 0B1 0R2 0B2
        1K0 1B0 1K1 1B1 1K2 1B2""",
    "dual_pipe_v": """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 3F2 0B0 3B2 0B1 0I2 0W2
        1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 2B1 1B1 2B2 1B2""",
    "zbv": """
        0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0F2 0W1 3F2 3I2 3W2 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 2W1 1W0 1W1 1F2 2F2 2I2 1I2 2W2 1W2""",
}


GOLDEN["dual_pipe_v_pairs"] = """0F0 0F1 0F2 3F0 3B0 3F1 3B1 3F2+0B0 3B2 0B1 0B2
    1F0 2F0 1F1 2F1 1F2+2B0 2F2+1B0 2B1 1B1 2B2 1B2"""


def sizes() -> st.SearchStrategy[tuple[int, int, int]]:
    return st.tuples(st.integers(1, 6), st.integers(1, 14), st.integers(0, 2))


def built(name: str, ranks: int, microbatches: int, pick: int) -> Schedule:
    chunks = stages_per_rank(name)
    return make_schedule(name, ranks * chunks[pick % len(chunks)], microbatches, ranks)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None, max_examples=60)
@given(size=sizes())
def test_legal_at_every_size(name: str, size: tuple[int, int, int]) -> None:
    schedule = built(name, *size)
    check_schedule(schedule)
    assert (len(schedule.ranks), schedule.num_microbatches) == size[:2]
    assert parse_schedule(name, tuple(str(schedule).splitlines())) == schedule


def most_in_flight(row: tuple, end: tuple[Work, ...]) -> int:
    held = most = 0
    for action in row:
        held += (action.work is Work.FORWARD) - (action.work in end)
        most = max(most, held)
    return most


@settings(deadline=None, max_examples=40)
@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 16))
def test_in_flight(ranks: int, microbatches: int) -> None:
    """Micro-batches in flight are what each schedule's paper says."""

    def held(name: str, chunks: int = 1) -> list[int]:
        rows = make_schedule(name, chunks * ranks, microbatches, ranks).ranks
        return [most_in_flight(row, (Work.BACKWARD, Work.BACKWARD_WEIGHT)) for row in rows]

    assert held("gpipe") == [microbatches] * ranks
    assert held("one_f_one_b") == [min(ranks - s, microbatches) for s in range(ranks)]
    assert held("dapple_pb") == [min(2 * (ranks - s) - 1, microbatches) for s in range(ranks)]
    assert max(held("zero_bubble")) <= min(ranks, microbatches)
    assert max(held("zbv", 2)) <= 2 * min(ranks, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden(name: str) -> None:
    expected = "\n".join(line.strip() for line in GOLDEN[name].strip().splitlines())
    assert str(built(name, 2, 3, 0)) == expected


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks,microbatches", [(1, 1), (2, 3), (4, 8), (3, 7)])
def test_torch_accepts_the_rows(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    """torch's pipelining runtime reads the rows and finds them valid (checked with torch 2.13),
    but for what they say of recompute."""
    schedule = _of_torch(built(name, ranks, microbatches, 0))
    path = tmp_path / "schedule.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[str(a) for a in row] for row in schedule.ranks])
    with path.open(newline="") as file:
        rows = {i: [_Action.from_str(s) for s in row] for i, row in enumerate(csv.reader(file))}
    owners = _validate_schedule(rows, ranks, schedule.num_stages, microbatches)
    assert owners == {s: schedule.rank_of(s) for s in range(schedule.num_stages)}


@pytest.mark.parametrize("ranks,microbatches", [(1, 2), (2, 4), (3, 7), (4, 8), (4, 13)])
def test_dual_pipe_v_is_that_of_torch(ranks: int, microbatches: int) -> None:
    """Which has pairs of a forward and a backward as one action each, of two."""
    theirs: Any = object.__new__(ScheduleDualPipeV)
    theirs.pp_group_size, theirs._n_microbatches = ranks, microbatches
    rows = [
        " ".join(str(a) for one in row if one for a in one.sub_actions or (one,))
        for row in map(theirs._calculate_single_rank_operations, range(ranks))
    ]
    schedule = make_schedule("dual_pipe_v", 2 * ranks, microbatches, ranks)
    assert str(schedule).splitlines() == rows
    together = {
        tuple(map(str, one.sub_actions))
        for rank in range(ranks)
        for one in theirs._calculate_single_rank_operations(rank)
        if one and one.sub_actions
    }
    ours = make_schedule("dual_pipe_v_pairs", 2 * ranks, microbatches, ranks).pairs
    assert {(str(a), str(b)) for a, b in ours} >= together
    apart = {(a, b) for a, b in ours if (str(a), str(b)) not in together}
    # Theirs leaves the first pair of the rank at the turn of the V apart.
    assert all(a.stage == ranks - 1 for a, _ in apart) and len(apart) <= 1


def _of_torch(schedule: Schedule) -> Schedule:
    rows = (
        tuple(
            Action(a.stage, Work.FORWARD, a.microbatch) if a.work in FORWARDS else a
            for a in row
            if a.work is not Work.RECOMPUTE
        )
        for row in schedule.ranks
    )
    return Schedule(schedule.name, tuple(rows))


@pytest.mark.parametrize(
    "row,broken",
    [
        ("0F0 0B0 0R0", "after the backward"),
        ("0K0 0R0 0B0", "K may stand for F"),
        ("0R0 0F0 0B0", "deadlocks"),
        ("0F0 0K0 0B0", "K may stand for F"),
    ],
)
def test_recompute_has_its_place(row: str, broken: str) -> None:
    with pytest.raises(PlanError, match=broken):
        check_schedule(parse_schedule("x", (row,)))


def test_refusals_name_the_nearest() -> None:
    with pytest.raises(PlanError, match="nearest is 'gpipe'"):
        make_schedule("gpip", 1, 1, 1)
    with pytest.raises(PlanError, match="nearest is 4"):
        make_schedule("zbv", 3, 2, 2)
    with pytest.raises(PlanError, match="nearest is 3"):
        make_schedule("gpipe", 4, 2, 3)
    with pytest.raises(PlanError, match="at least 1"):
        make_schedule("gpipe", 1, 0, 1)
