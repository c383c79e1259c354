"""Of ranks that stand still together, the one that keeps the others waiting is named."""

import pytest

from benchmarks.attack.faulty_ranks import cause, said_by_the_other
from meshwright.runtime.world.standing import RankStanding, first_cause

FAULTS = [
    ("zero3", "forward"), ("tp", "forward"), ("pp", "forward"), ("pp", "loader"),
    ("dp", "optimizer"), ("tp", "kill"), ("tp", "stop"), ("zero3", "leave"),
]  # fmt: skip
"""All layouts, faults and ranks: `python -m benchmarks.attack faults`."""


@pytest.mark.parametrize(("layout", "fault"), FAULTS)
def test_the_rank_and_the_step_of_a_fault_are_named(layout, fault, tmp_path):
    assert cause(layout, fault, 1) in said_by_the_other(layout, fault, tmp_path)


# Who is first, of standings.


def at(step, phase="running", waits=False, entered=10, action="0F0"):
    return RankStanding(step, action, phase, entered, waits, "")


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ({0: at(3, waits=True), 1: at(3), 2: at(3, waits=True)}, 1),
        ({0: at(3, waits=True), 1: at(3, waits=True), 2: at(3, waits=True, entered=9)}, 2),
        ({0: at(3, waits=True), 1: at(2, "idle", action="end"), 2: at(3, waits=True)}, 1),
        ({0: at(3), 1: at(2, "idle", action="end"), 2: at(3, waits=True)}, 0),
        ({0: at(3), 1: at(1, "idle", action="end"), 2: at(3, waits=True)}, 1),
        ({0: at(3, waits=True), 1: at(3), 2: at(2, "left")}, 2),
        ({0: at(0, "idle", action="start"), 1: at(0, waits=True)}, 0),
    ],
    ids=str,
)
def test_the_first_cause(others, cause):
    assert first_cause(others) == cause
