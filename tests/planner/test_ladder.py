"""Treatments of a stage by number: found again, and shared by stages of equal blocks."""

from meshwright.planner.across.ladder import Ladder, Treatment, evenly, spread_out
from meshwright.planner.across.treatments import FEW, Treatments
from tests.planner.problems import cluster, mlp, problem


def check(ladder: Ladder) -> None:
    found = [ladder[at] for at in range(len(ladder))]
    assert len(set(found)) == len(found)
    assert [ladder.place(treatment) for treatment in found] == list(range(len(found)))
    assert ladder[-1] == found[-1]
    assert ladder.place(Treatment(recompute=("no such block",))) == 0


def test_each_treatment_has_its_place() -> None:
    sets = Treatments(problem(mlp(12), cluster(1)))
    long, short = sets.of(0, 12), sets.of(3, 5)
    assert len(long) > FEW and len(long.groups[0]) == 12
    assert long[0].is_plain and long[-1] == Treatment(("layers.*",))
    for ladder in (long, short):
        check(ladder)


def test_equal_blocks_share_steps() -> None:
    """What differs is names."""
    sets = Treatments(problem(mlp(12), cluster(1)))
    one, other = sets.of(0, 10), sets.of(2, 12)
    assert one.steps is other.steps
    partly = [at for at in range(len(one)) if len(one[at].recompute) > 1]
    assert partly and all(one[at] != other[at] for at in partly)
    assert sets.near(2, 12, other[3], 1) == other[4]
    assert sets.near(2, 12, one[partly[0]], 2) == other[2], "not of this stage: from the start"


def test_positions() -> None:
    assert evenly(6, 2, "offload") == ("", "", "offload", "", "", "offload")
    assert list(spread_out(2, ("a", "b"))) == [
        ("", ""), ("b", ""), ("b", "b"), ("a", ""), ("a", "b"), ("a", "a"),
    ]  # fmt: skip
