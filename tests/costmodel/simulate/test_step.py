"""A step from one meeting of all ranks to the next."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.simulate.compiled_schedule import LAST, B, W
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.simulate.step import Ending, take_step
from meshwright.costmodel.stage.program import NO_SLOWDOWN, SCATTER, Do, Program, Step, run, talk
from meshwright.ir.plan.schedule import parse_schedule
from meshwright.planner.problem.schedule_tools import make_schedule

ONE = parse_schedule("one", ("0F0 0B0",))
TWO = parse_schedule("two", ("0F0 0B0", "1F0 1B0"))
COST = StageTimes(forward_s=1.0, backward_s=2.0)


def ending(
    finish_s: float = 0.0,
    optimizer_s: float = 0.0,
    tied_s: float = 0.0,
    publish_s: float = 0.0,
    clip_s: float = 0.0,
) -> Ending:
    return Ending(
        finish=(Step(Do.WAIT_ALL), talk(finish_s, "gradients")), tied_s=tied_s,
        optimizer_s=optimizer_s, publish=(talk(publish_s, "gather"),), overlap=NO_SLOWDOWN,
        clip_s=clip_s,
    )  # fmt: skip


def test_one_rank_does_one_thing_after_the_other() -> None:
    found = take_step(ONE, [COST], [ending(0.5, 0.25, publish_s=1.0)], meeting_s=0.125)
    assert found.step_s == 1 + 2 + 0.125 + 0.5 + 0.25 + 1.0
    assert found.ended[0].gradients_s == 0.5 and found.ended[0].publish_s == 1.0


def test_a_rank_that_waits_anyway_has_time_for_its_optimizer() -> None:
    """The second stage is needed 1 s after the first one has begun."""
    same = take_step(TWO, [COST] * 2, [ending(optimizer_s=3.0)] * 2, meeting_s=0.0)
    assert same.step_s == 6 + 3
    hidden = take_step(
        TWO, [COST] * 2, [ending(optimizer_s=3.0), ending(optimizer_s=3.75)], meeting_s=0.0
    )
    assert hidden.step_s == 6 + 3
    late = take_step(
        TWO, [COST] * 2, [ending(optimizer_s=3.0), ending(optimizer_s=5.0)], meeting_s=0.0
    )
    assert late.step_s == 6 + 3 + 1
    first = take_step(
        TWO, [COST] * 2, [ending(optimizer_s=5.0), ending(optimizer_s=3.0)], meeting_s=0.0
    )
    assert first.step_s == 6 + 5


def test_what_the_channel_has_left_is_waited_for_after_the_meeting() -> None:
    """A bucket of 4 s after the last backward, while the loss is summed for 1 s."""
    last = Program((run(2.0, "backward"), Step(Do.START, 4.0, SCATTER, "gradients")))
    cost = StageTimes(forward_s=1.0, backward_s=2.0, programs={B + LAST: last})
    found = take_step(ONE, [cost], [ending(optimizer_s=0.5)], meeting_s=1.0)
    assert found.step_s == 1 + 2 + 4 + 0.5
    assert found.ended[0].gradients_s == 3.0
    # The second stage has done with its bucket when the first one is through its backward.
    late = StageTimes(forward_s=1.0, backward_s=5.0)
    both = take_step(TWO, [late, cost], [ending(optimizer_s=0.5)] * 2, meeting_s=0.0)
    assert both.step_s == 1 + 1 + 2 + 5 + 0.5


def test_tied_ranks_wait_for_each_other() -> None:
    found = take_step(
        TWO, [COST] * 2, [ending(1.0, tied_s=0.5), ending(3.0, tied_s=0.5)], meeting_s=0.0
    )
    assert [e.gradients_s for e in found.ended] == [3.5, 3.5]
    assert found.step_s == 6 + 3.5


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["one_f_one_b", "interleaved", "zero_bubble", "gpipe"]), st.integers(2, 4),
    st.lists(st.floats(0, 9), min_size=4, max_size=4),
    st.lists(st.floats(0, 9), min_size=4, max_size=4),
)  # fmt: skip
def test_what_ends_later_need_not_be_played_again(
    name: str, ranks: int, jobs: list[float], tails: list[float]
) -> None:
    """Whether a second simulation is saved or not (a log is not moved), the step is the same."""
    count = 2 * ranks if name == "interleaved" else ranks
    schedule = make_schedule(name, count, 4 * ranks, ranks)
    stages = []
    for i in range(count):
        steps = (run(2.0, "backward"), Step(Do.START, jobs[i % 4], SCATTER, "gradients"))
        stages.append(StageTimes(
            forward_s=1.0 + i / 16, backward_s=2.0, backward_input_s=1.0, backward_weight_s=1.0,
            send_s=0.125, programs={B + LAST: Program(steps), W + LAST: Program(steps)},
        ))  # fmt: skip
    endings = [ending(optimizer_s=tails[i]) for i in range(ranks)]
    quick = take_step(schedule, stages, endings, meeting_s=0.25)
    again = take_step(schedule, stages, endings, meeting_s=0.25, detail=True)
    assert quick.step_s == pytest.approx(again.step_s, rel=1e-9)
    for one, other in zip(quick.ended, again.ended, strict=True):
        assert one.total_s == pytest.approx(other.total_s, rel=1e-9)
    assert quick.timeline.row_end_s == pytest.approx(again.timeline.row_end_s, rel=1e-9)


@pytest.mark.parametrize("talking", [0.0, 0.5])
def test_communication_takes_processor_time_where_cores_are_shared(talking: float) -> None:
    """Two processes compute for 4 s on two cores while 4 s of gradients are on their way."""
    program = Program((Step(Do.START, 4.0, SCATTER), run(4.0, "backward")))
    cost = StageTimes(forward_s=0.0, backward_s=0.0, processes=2, programs={B + LAST: program})
    found = simulate(ONE, [cost], cores=2, talking=talking)
    # With half a core more for each, 3 on 2: two thirds of the speed until the gradients are there.
    expected = 4 + (4 - 4 * 2 / 3) if talking else 4.0
    assert found.step_s == pytest.approx(expected)


def test_collectives_are_not_slowed_by_shared_cores() -> None:
    """They were measured with everybody at it: 2 s of computing at half speed, 3 s of talking."""
    program = Program((run(2.0, "forward"), talk(3.0, "tensor")))
    cost = StageTimes(forward_s=0.0, backward_s=0.0, processes=4, programs={0: program})
    timeline = simulate(parse_schedule("x", ("0F0 0B0",)), [cost], cores=2)
    assert timeline.step_s == pytest.approx(2 * 2 + 3)


def test_all_ranks_meet_to_clip_gradients() -> None:
    """The second rank's gradients take 1 s longer; the norm needs both."""
    endings = [ending(1.0, clip_s=0.5), ending(2.0, clip_s=0.5)]
    found = take_step(TWO, [COST] * 2, endings, meeting_s=0.0)
    assert [e.gradients_s for e in found.ended] == [2.5, 2.5]
