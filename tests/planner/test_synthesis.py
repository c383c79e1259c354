"""Synthesised schedules: as good as all legal orders, never behind a file, never above memory."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.costmodel.simulate.simulate import StageTimes
from meshwright.ir.deadline import TimeUp, until
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.plan.schedule import Schedule, check_schedule, parse_schedule
from meshwright.planner.problem.schedule_tools import make_schedule
from meshwright.planner.synthesis.bound import bound_s
from meshwright.planner.synthesis.choose import files
from meshwright.planner.synthesis.greedy import RULES, list_schedule
from meshwright.planner.synthesis.repeat import extended
from meshwright.planner.synthesis.solve import FEW, Synthesis, _fewest, synthesise
from meshwright.planner.synthesis.task import (
    Task,
    excess_bytes,
    peaks_bytes,
    step_s,
    to_rows,
    to_schedule,
)
from tests.planner.brute import best_s


def stage(f: float, i: float, w: float, *, extra: float = 0.0, send: float = 0.0) -> StageTimes:
    """`extra`: what two halves take more than one whole backward."""
    return StageTimes(
        forward_s=f, backward_s=i + w - extra, backward_input_s=i, backward_weight_s=w,
        send_s=send, saved_bytes=1,
    )  # fmt: skip


def task(
    times: list[tuple[float, float, float]],
    count: int,
    rooms: tuple[float, ...] = (),
    **more: object,
) -> Task:
    """One stage per rank and a byte per micro-batch, unless told otherwise."""
    given = {"placement": tuple(range(len(times))), **more}
    return Task(
        stages=tuple(stage(*t) for t in times), num_microbatches=count, capacity_bytes=rooms,
        **given,  # type: ignore[arg-type]
    )  # fmt: skip


UNEVEN = [(1, 1, 1), (3, 2, 1), (1, 2, 3), (2, 1, 1)]


def check(asked: Task, found: Synthesis) -> None:
    """Legal, within memory, and as quick as it says."""
    check_schedule(found.schedule)
    assert excess_bytes(asked, found.schedule) == 0
    assert step_s(asked, found.schedule) == found.step_s
    assert found.bound_s <= found.step_s
    again = parse_schedule(found.schedule.name, tuple(str(found.schedule).splitlines()))
    assert again == found.schedule


SHAPES = (
    (2, 2, (0, 1)),
    (2, 3, (0, 1)),
    (3, 2, (0, 1, 2)),
    (3, 1, (0, 1, 0)),
    (4, 1, (0, 1, 1, 0)),
    (3, 2, (0, 1, 0)),
)
"""Stages, micro-batches, placement."""


@st.composite
def tiny(draw: st.DrawFn, *, costly: bool = False) -> Task:
    # With whole and split backwards to choose from there are many more orders.
    num_stages, count, placement = draw(
        st.sampled_from(SHAPES[:1] * 3 + SHAPES[3:5] if costly else SHAPES)
    )
    times = st.integers(1, 5)
    stages = []
    for _ in range(num_stages):
        i, w = draw(times), draw(times)
        extra = draw(st.integers(0, w)) if costly else 0
        made = stage(draw(times), i, w, extra=extra)
        stages.append(replace(made, saved_bytes=draw(st.integers(1, 3))))
    asked = Task(
        stages=tuple(stages), placement=placement, num_microbatches=count,
        halved_bytes=tuple(draw(st.integers(0, 2)) for _ in stages) if costly else (),
        release_s=tuple(float(draw(st.integers(0, 3))) for _ in range(max(placement) + 1)),
    )  # fmt: skip
    rooms = tuple(float(draw(st.integers(1, 3 * count * len(own)))) for own in asked.held)
    return replace(asked, capacity_bytes=rooms)


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(asked=tiny())
def test_as_good_as_the_best_of_all_orders(asked: Task) -> None:
    wanted = best_s(asked)
    if wanted == float("inf"):
        with pytest.raises(Infeasible, match="may hold"):
            synthesise(asked)
        return
    found = synthesise(asked)
    check(asked, found)
    assert found.step_s == pytest.approx(wanted)
    assert found.gap <= 2e-3


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(asked=tiny(costly=True))
def test_bound_holds_where_halves_cost_time_and_memory(asked: Task) -> None:
    wanted = best_s(asked)
    assume(wanted < float("inf"))
    found = synthesise(asked)
    check(asked, found)
    assert found.bound_s <= wanted + 1e-9 <= found.step_s + 2e-9


def rooms_between(least: int, most: int, ranks: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(*(st.integers(least, most).map(float) for _ in range(ranks)))


@st.composite
def small(draw: st.DrawFn) -> Task:
    ranks, chunks = draw(st.sampled_from(((2, 1), (3, 1), (4, 1), (2, 2))))
    seconds = st.floats(0.5, 2.0)
    times = [(draw(seconds), draw(seconds), draw(seconds)) for _ in range(ranks * chunks)]
    count = draw(st.integers(1, 8))
    folded = chunks == 2 and draw(st.booleans())
    placement = [s % ranks if not folded else min(s, 3 - s) for s in range(ranks * chunks)]
    rooms = draw(rooms_between(chunks, 3 * ranks * chunks, ranks))
    send_s = draw(st.sampled_from((0.0, 0.1, 1.0)))
    asked = task(times, count, rooms, placement=tuple(placement))
    return replace(asked, stages=tuple(replace(s, send_s=send_s) for s in asked.stages))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(asked=small())
def test_never_behind_a_schedule_file(asked: Task) -> None:
    known = list(files(asked))
    found = synthesise(asked, known, effort=0.05)
    check(asked, found)
    fitting = [step_s(asked, one) for one in known if not excess_bytes(asked, one)]
    assert all(found.step_s <= other * (1 + 1e-12) for other in fitting)  # sums in other orders
    assert bound_s(asked) <= min([found.step_s, *fitting]) * (1 + 1e-12)


def test_beats_every_file_on_uneven_stages() -> None:
    asked = task([(1, 1, 1), (2, 2, 2), (2, 2, 4), (4, 3, 1)], 4)
    known = {one.name: step_s(asked, one) for one in files(asked)}
    found = synthesise(asked, effort=0.5)
    check(asked, found)
    assert len(known) == 5 and min(known.values()) / found.step_s > 1.2, (known, found)
    assert found.gap == 0  # proven


def test_fits_where_no_file_does() -> None:
    asked = task(UNEVEN, 8, (2, 2, 2, 1))
    known = list(files(asked))
    assert known and all(excess_bytes(asked, one) for one in known)
    found = synthesise(asked, known, effort=0.5)
    check(asked, found)
    assert peaks_bytes(asked, found.schedule) == (2, 2, 2, 1)
    assert found.gap <= 1e-3


def test_says_what_does_not_fit() -> None:
    with pytest.raises(Infeasible, match=r"rank 1 may hold 1 B .* needs 2 B"):
        synthesise(task(UNEVEN, 4, (9, 1), placement=(0, 1, 1, 0)))
    with pytest.raises(PlanError, match="nearest is 4, or none"):
        task(UNEVEN, 4, (9, 1))
    with pytest.raises(PlanError, match="each rank"):
        task(UNEVEN, 4, placement=(0, 1, 3, 3))


def test_many_microbatches() -> None:
    asked = task(UNEVEN * 2, 32, (8,) * 8)
    known = list(files(asked))
    found = synthesise(asked, known, effort=0.1)
    check(asked, found)
    best = min(step_s(asked, one) for one in known if not excess_bytes(asked, one))
    assert found.step_s < best


def test_the_best_by_then_where_time_is_up() -> None:
    asked = task(UNEVEN, 12, (8,) * 4)
    known = [one for one in files(asked) if not excess_bytes(asked, one)]

    def late() -> Iterator[Schedule]:
        yield known[0]
        while time.monotonic() <= end:
            time.sleep(0.01)
        yield from known[1:]

    end = time.monotonic() + 0.2
    with until(end):
        found = synthesise(asked, late())
        with pytest.raises(TimeUp):
            synthesise(asked, known)
    check(asked, found)
    assert found.schedule.name == known[0].name
    assert synthesise(asked, known).step_s < found.step_s


def test_the_same_again() -> None:
    asked = task(UNEVEN, 12, (3, 3, 2, 2))
    assert synthesise(asked, effort=0.05) == synthesise(asked, effort=0.05)


def test_repeating_keeps_order_and_memory() -> None:
    few = task(UNEVEN, 6, (4,) * 4)
    asked = replace(few, num_microbatches=40)
    solved = to_rows(synthesise(few).schedule)
    made: list[Schedule] = [to_schedule("more", rows) for rows in extended(few, solved, 34)]
    assert made
    for schedule in made:
        check_schedule(schedule)
        assert schedule.num_microbatches == 40
        assert excess_bytes(asked, schedule) == 0
    # In the middle every micro-batch takes the time of the busiest rank.
    best = min(step_s(asked, schedule) for schedule in made)
    assert best <= bound_s(asked) * 1.1


def test_files_are_those_of_the_placement() -> None:
    asked = task([(1, 1, 1)] * 4, 4, placement=(0, 1, 1, 0))
    assert [one.name for one in files(asked)] == ["dual_pipe_v", "zbv"]
    assert make_schedule("zbv", 4, 4, 2) in list(files(asked))


@pytest.mark.parametrize("room", range(240, 300, 6))
def test_no_micro_batch_takes_the_memory_of_an_older_one(room: int) -> None:
    """Stages differ in bytes: what one frees is not what the next one needs."""
    sizes = (27, 31, 27, 27, 27, 31, 31, 23)
    stages = tuple(replace(stage(1, 1, 1), saved_bytes=size) for size in sizes)
    asked = Task(
        stages=stages, placement=(0, 1) * 4, num_microbatches=4,
        halved_bytes=(22, 26, 22, 22, 22, 26, 26, 15), capacity_bytes=(float(room), 330.0),
    )  # fmt: skip
    for rules in RULES:
        _, rows = list_schedule(asked, rules)
        assert excess_bytes(asked, to_schedule("listed", rows)) == 0


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_the_shortest_list_schedules_are_those_of_all(placement: tuple[int, ...]) -> None:
    """Others are given up on the way, as they would take longer."""
    asked = task([(1.0, 1.1, 0.8), (1.3, 1.2, 0.9), (0.9, 1.0, 1.1), (1.2, 1.4, 0.7)], 9,
                 placement=placement)  # fmt: skip
    every = [(made, rules) for rules in RULES if (made := list_schedule(asked, rules))]
    every.sort(key=lambda entry: entry[0][0])
    assert _fewest(asked, RULES) == [(rows, rules) for (_, rows), rules in every[:FEW]]
    assert list_schedule(asked, every[-1][1], every[0][0][0]) is None


@pytest.mark.parametrize("idle", [0, 1, 3])
def test_a_stage_may_take_no_time(idle: int) -> None:
    """As one that only views its input; it too needs a micro-batch in flight."""
    times = [(0.0, 0.0, 0.0) if s == idle else (1.0, 1.0, 1.0) for s in range(4)]
    asked = task(times, 6)
    for rules in RULES:
        _, rows = list_schedule(asked, rules)
        check_schedule(to_schedule("listed", rows))
    check(asked, synthesise(asked, effort=0.05))
