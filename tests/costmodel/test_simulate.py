"""The simulator against closed forms and an independent brute-force reference."""

from collections.abc import Sequence
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.simulate import StageTimes, simulate
from meshwright.ir.errors import PlanError
from meshwright.ir.schedule import Action, Schedule, Work, check_schedule, parse_schedule

FORWARD, BACKWARD = Work.FORWARD, Work.BACKWARD


def gpipe(stages: int, count: int) -> Schedule:
    rows = [
        [Action(s, work, m) for work in (FORWARD, BACKWARD) for m in range(count)]
        for s in range(stages)
    ]
    return Schedule("gpipe", tuple(map(tuple, rows)))


def one_f_one_b(stages: int, count: int, *, split: bool = False) -> Schedule:
    rows = []
    for s in range(stages):
        warm = min(stages - s, count)
        row = [Action(s, FORWARD, m) for m in range(warm)]
        for m in range(count):
            if split:
                row += [Action(s, Work.BACKWARD_INPUT, m), Action(s, Work.BACKWARD_WEIGHT, m)]
            else:
                row.append(Action(s, BACKWARD, m))
            if m + warm < count:
                row.append(Action(s, FORWARD, m + warm))
        rows.append(tuple(row))
    return Schedule("1f1b", tuple(rows))


def reference(
    schedule: Schedule, stages: Sequence[StageTimes], cores: float
) -> dict[Action, float]:
    """Ends of all actions, by advancing time in the smallest step that changes anything.

    Every action asks each time anew whether all that it needs is over; no queues, no waiting lists.
    """
    last = schedule.num_stages - 1
    ends: dict[Action, float] = {}
    left: dict[Action, float] = {}
    now = 0.0

    def arrives(action: Action) -> float:
        """When what the action needs is there; infinity if it is not known yet."""
        s, m = action.stage, action.microbatch
        never = float("inf")
        if action.work is FORWARD:
            if not s:
                return 0.0
            return ends.get(Action(s - 1, FORWARD, m), never) + stages[s - 1].send_s
        own = Work.BACKWARD_INPUT if action.work is Work.BACKWARD_WEIGHT else FORWARD
        at = ends.get(Action(s, own, m), never)
        if action.work is not Work.BACKWARD_WEIGHT and s < last:
            later = [ends.get(Action(s + 1, w, m), never) for w in (BACKWARD, Work.BACKWARD_INPUT)]
            at = max(at, min(later) + stages[s].send_s)
        return at

    while len(ends) < sum(map(len, schedule.ranks)):
        waits = []
        for row in schedule.ranks:
            head = next((a for a in row if a not in ends), None)
            if head is not None and head not in left:
                if arrives(head) <= now:
                    left[head] = stages[head.stage].of(head.work)
                else:
                    waits.append(arrives(head))
        running = [a for a in left if a not in ends]
        busy = sum(stages[a.stage].processes for a in running)
        speed = min(1.0, cores / busy) if busy else 1.0
        step = min([left[a] / speed for a in running] + [at - now for at in waits])
        now += step
        for action in running:
            left[action] -= step * speed
            if left[action] <= 1e-9:
                ends[action] = now
    return ends


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_closed_form(make: object, stages: int, count: int) -> None:
    """(M + S - 1)(F + B): Huang et al. 2019, Narayanan et al. 2021."""
    schedule = make(stages, count)  # type: ignore[operator]
    check_schedule(schedule)
    cost = StageTimes(forward_s=1.0, backward_s=2.0, saved_bytes=10)
    timeline = simulate(schedule, [cost] * stages)
    assert timeline.step_s == pytest.approx((count + stages - 1) * 3)
    assert timeline.bubble == pytest.approx((stages - 1) / (count + stages - 1))
    in_flight = [count if make is gpipe else min(count, stages - rank) for rank in range(stages)]
    assert timeline.peak_bytes == tuple(10 * n for n in in_flight)
    assert timeline.stage_peak_bytes == timeline.peak_bytes


def test_sends_delay_the_pipeline() -> None:
    cost = StageTimes(forward_s=1.0, backward_s=2.0, send_s=0.5)
    assert simulate(gpipe(3, 1), [cost] * 3).step_s == pytest.approx(9 + 4 * 0.5)


def test_shared_cores() -> None:
    """Four stages on two cores: with all four busy each runs at half speed."""
    cost = StageTimes(forward_s=1.0, backward_s=1.0)
    alone = simulate(gpipe(4, 32), [cost] * 4)
    shared = simulate(gpipe(4, 32), [cost] * 4, cores=2)
    assert alone.step_s == pytest.approx(70)
    assert 4 * 64 / 2 <= shared.step_s < 4 * 64 / 2 + 8
    assert simulate(gpipe(1, 4), [cost], cores=2).step_s == 8


TIMES = st.builds(
    StageTimes,
    forward_s=st.integers(1, 4).map(float),
    backward_s=st.integers(1, 5).map(float),
    backward_input_s=st.integers(1, 3).map(float),
    backward_weight_s=st.integers(1, 3).map(float),
    send_s=st.sampled_from([0.0, 0.5, 3.0]),
    saved_bytes=st.integers(0, 9),
    processes=st.integers(1, 2),
)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.sampled_from([1.0, 2.0, float("inf")]))
def test_brute_force_agrees(data: st.DataObject, stages: int, count: int, cores: float) -> None:
    kind = data.draw(st.sampled_from(["gpipe", "1f1b", "split"]))
    schedule = (
        gpipe(stages, count)
        if kind == "gpipe"
        else one_f_one_b(stages, count, split=kind == "split")
    )
    costs = data.draw(st.lists(TIMES, min_size=stages, max_size=stages))
    timeline = simulate(schedule, costs, cores=cores)
    expected = reference(schedule, costs, cores)
    for row in timeline.entries:
        for entry in row:
            assert entry.end_s == pytest.approx(expected[entry.action], abs=1e-6)
    assert timeline.step_s == pytest.approx(max(expected.values()), abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(TIMES, min_size=2, max_size=2), st.integers(1, 4))
def test_several_stages_on_one_rank(costs: list[StageTimes], count: int) -> None:
    """A V shape: the rank order alone decides, so the memory is the sum of both stages."""
    row = [f"{s}F{m}" for m in range(count) for s in (0, 1)]
    row += [f"{s}B{m}" for m in range(count) for s in (1, 0)]
    free = [StageTimes(forward_s=c.forward_s, backward_s=c.backward_s, saved_bytes=c.saved_bytes)
            for c in costs]  # fmt: skip
    timeline = simulate(parse_schedule("v", (" ".join(row),)), free)
    assert timeline.step_s == pytest.approx(count * sum(c.forward_s + c.backward_s for c in costs))
    assert timeline.peak_bytes == (count * sum(c.saved_bytes for c in costs),)
    assert timeline.memory[0][-1][1] == 0


def test_a_deadlock_is_named() -> None:
    schedule = parse_schedule("bad", ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"))
    with pytest.raises(PlanError, match="deadlocks: rank 0 at 0B0, rank 1 at 1F1"):
        simulate(schedule, [StageTimes(forward_s=1, backward_s=1)] * 2)


def test_stage_count_must_match() -> None:
    with pytest.raises(PlanError, match="has 2 stages, the costs 3"):
        simulate(gpipe(2, 1), [StageTimes(forward_s=1, backward_s=1)] * 3)


def test_64_stages_512_microbatches_in_a_second() -> None:
    schedule = one_f_one_b(64, 512)
    costs = [StageTimes(forward_s=1.0, backward_s=2.0, send_s=0.1, saved_bytes=1)] * 64
    start = process_time()
    simulate(schedule, costs)
    assert process_time() - start < 1.0
