"""The simulator against closed forms and an independent brute-force reference."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappush
from itertools import pairwise
from math import sqrt
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.simulate import events, run_ahead
from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F, I, W, table_of
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.stage.program import (
    IDLE,
    SCATTER,
    Do,
    Overlap,
    Program,
    Step,
    play,
    run,
    talk,
)
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.schedule import Action, Schedule, Work, check_schedule, parse_schedule
from meshwright.planner.problem.schedule_tools import make_schedule

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


class Reference:
    """The same by advancing time in the smallest step that changes anything.

    Every action and every message asks each time anew whether all that it needs is over; no
    queues, no waiting lists.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[StageTimes], cores: float) -> None:
        self.rows, self.stages, self.cores = schedule.ranks, stages, cores
        self.rank = {a: r for r, row in enumerate(self.rows) for a in row}
        self.last = schedule.num_stages - 1
        self.now = 0.0
        self.left: dict[Action, float] = {}
        self.ends: dict[Action, float] = {}
        self.messages: dict[Action, tuple[float, float]] = {}
        """Receiver -> (when it was asked for and made, when it is there)."""
        self.free: dict[tuple[int, bool], float] = {}

    def sender(self, action: Action) -> Action | None:
        s, m = action.stage, action.microbatch
        if action.work is FORWARD:
            return Action(s - 1, FORWARD, m) if s else None
        if action.work in (Work.BACKWARD_WEIGHT, Work.RECOMPUTE) or s == self.last:
            return None
        if self.stages[s].is_silent:
            return None
        whole = Action(s + 1, BACKWARD, m)
        return whole if whole in self.rank else Action(s + 1, Work.BACKWARD_INPUT, m)

    def asked(self, action: Action) -> bool:
        """The receive is posted one action ahead of need."""
        row = self.rows[self.rank[action]]
        index = row.index(action)
        return index < 2 or row[index - 2] in self.ends

    def start_messages(self) -> None:
        ready = []
        for action, target in self.rank.items():
            made = self.sender(action)
            if made is None or self.rank[made] == target or action in self.messages:
                continue
            if made in self.ends and self.asked(action):
                ready.append((self.now - self.ends[made], str(made), made, action))
        # A rank sends what it has made before it asks for more.
        for _, _, made, action in sorted(ready):
            source, target = self.rank[made], self.rank[action]
            cost = self.stages[min(made.stage, action.stage)]
            is_back = action.work is not FORWARD and cost.back_s is not None
            seconds = cost.back_s if is_back else cost.send_s
            ports = ((source, True), (target, False)) if seconds else ()
            end = max([self.now, *(self.free.get(port, 0) for port in ports)]) + seconds
            self.free.update(dict.fromkeys(ports, end))
            self.messages[action] = self.now, end

    def is_ready(self, action: Action) -> bool:
        made = self.sender(action)
        if made is None or self.rank[made] == self.rank[action]:
            return True
        return action in self.messages and self.messages[action][1] <= self.now + 1e-12

    def run(self) -> dict[Action, float]:
        while len(self.ends) < len(self.rank):
            self.start_messages()
            for row in self.rows:
                head = next((a for a in row if a not in self.ends), None)
                if head is not None and head not in self.left and self.is_ready(head):
                    self.left[head] = self.seconds(head)
            self.advance()
        return self.ends

    def seconds(self, action: Action) -> float:
        cost = self.stages[action.stage]
        early = Action(action.stage, Work.RECOMPUTE, action.microbatch) in self.rank
        there = early and action.work in (BACKWARD, Work.BACKWARD_INPUT)
        return cost.of(action.work) - (cost.again_s if there else 0.0)

    def advance(self) -> None:
        running = [a for a in self.left if a not in self.ends]
        busy = sum(self.stages[a.stage].processes for a in running)
        speed = min(1.0, self.cores / busy) if busy else 1.0
        waits = [end - self.now for _, end in self.messages.values() if end > self.now + 1e-12]
        step = min([self.left[a] / speed for a in running] + waits)
        self.now += step
        for action in running:
            self.left[action] -= step * speed
            if self.left[action] <= 1e-9:
                self.ends[action] = self.now


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


MERAK = ("one_f_one_b", "pre_recompute_1f1b", "last_no_recompute_1f1b", "full_critical_path_1f1b")


@pytest.mark.parametrize("again", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("stages,count", [(2, 3), (4, 8), (8, 16), (5, 7)])
def test_merak_saves_what_its_closed_forms_say(stages: int, count: int, again: float) -> None:
    """(S-1)R by early recompute, F+R by a last stage that keeps all, R by the shift."""
    cost = StageTimes(forward_s=1.0, backward_s=2.0 + again, again_s=again)
    steps = [
        simulate(make_schedule(name, stages, count, stages), [cost] * stages).step_s
        for name in MERAK
    ]
    whole = (count + stages - 1) * (3.0 + again)
    early = whole - (stages - 1) * again
    assert steps[:2] == [whole, early]
    if again == 1.0:
        assert steps[2:] == [early - 2.0, early - 3.0]
    if again == 0.0:  # nothing to be gained, nor lost
        assert steps[2] == whole


def test_sends_delay_the_pipeline() -> None:
    cost = StageTimes(forward_s=1.0, backward_s=2.0, send_s=0.5)
    assert simulate(gpipe(3, 1), [cost] * 3).step_s == pytest.approx(9 + 4 * 0.5)


def test_gradients_take_their_own_time_on_the_way_back() -> None:
    cost = StageTimes(forward_s=1.0, backward_s=2.0, send_s=0.5, back_s=0.125)
    assert simulate(gpipe(3, 1), [cost] * 3).step_s == pytest.approx(9 + 2 * 0.5 + 2 * 0.125)


def test_backwards_wait_for_no_gradient_where_none_comes_back() -> None:
    cost = StageTimes(forward_s=1.0, backward_s=2.0, send_s=0.5)
    timeline = simulate(gpipe(2, 1), [replace(cost, is_silent=True), cost])
    assert timeline.row_end_s == (1.0 + 2.0, 1.0 + 0.5 + 1.0 + 2.0)


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
    again_s=st.just(0.25),
    send_s=st.sampled_from([0.0, 0.5, 3.0]),
    back_s=st.sampled_from([None, 0.25]),
    is_silent=st.sampled_from([False, False, True]),
    saved_bytes=st.integers(0, 9),
    processes=st.integers(1, 2),
)


def apart(costs: Sequence[StageTimes]) -> list[StageTimes]:
    """The same, but no two ends at the same time: their order at a port would be anybody's."""
    return [
        replace(
            c,
            forward_s=c.forward_s + sqrt(2 + 7 * i) / 100,
            backward_s=c.backward_s + sqrt(3 + 7 * i) / 100,
            backward_input_s=c.backward_input_s + sqrt(5 + 7 * i) / 100,
            backward_weight_s=c.backward_weight_s + sqrt(6 + 7 * i) / 100,
        )
        for i, c in enumerate(costs)
    ]


MADE = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "split": lambda stages, count: one_f_one_b(stages, count, split=True),
    "interleaved": lambda stages, count: make_schedule("interleaved", 2 * stages, count, stages),
    "zero_bubble": lambda stages, count: make_schedule("zero_bubble", stages, count, stages),
    "merak": lambda stages, count: make_schedule("pre_recompute_1f1b", stages, count, stages),
}


@settings(max_examples=80, deadline=None)
@given(
    st.data(), st.sampled_from([*MADE]), st.integers(1, 4), st.integers(1, 5),
    st.sampled_from([1.0, 2.0, float("inf")]),
)  # fmt: skip
def test_brute_force_agrees(
    data: st.DataObject, kind: str, stages: int, count: int, cores: float
) -> None:
    count = stages * count if kind == "interleaved" else count
    schedule = MADE[kind](stages, count)
    size = schedule.num_stages
    costs = apart(data.draw(st.lists(TIMES, min_size=size, max_size=size)))
    timeline = simulate(schedule, costs, cores=cores)
    expected = Reference(schedule, costs, cores).run()
    for row in timeline.entries:
        for entry in row:
            assert entry.end_s == pytest.approx(expected[entry.action], abs=1e-6)
    assert timeline.step_s == pytest.approx(max(expected.values()), abs=1e-6)


STEPS = st.lists(
    st.one_of(
        st.builds(run, st.integers(1, 5).map(float), st.just("forward")),
        st.builds(talk, st.integers(1, 3).map(float), st.just("tensor")),
        st.builds(Step, st.just(Do.START), st.integers(1, 6).map(float), st.integers(-1, 2)),
        st.builds(Step, st.just(Do.WAIT), st.just(0.0), st.integers(0, 2)),
        st.sampled_from([Step(Do.WAIT_SCATTER), Step(Do.WAIT_ALL)]),
    ),
    max_size=8,
).map(lambda steps: Program(tuple(steps)))


@settings(max_examples=80, deadline=None)
@given(
    st.data(), st.sampled_from([*MADE, "pairs"]), st.integers(1, 3), st.integers(1, 4),
    st.sampled_from([1.0, 1.25]), st.sampled_from([1.0, 2.0]),
)  # fmt: skip
def test_running_ahead_and_events_agree(
    data: st.DataObject, kind: str, stages: int, count: int, compute: float, channel: float
) -> None:
    """Two programs that share no code but for whose turn it is at a port."""
    pairs = make_schedule("dual_pipe_v_pairs", 2 * stages, stages * count, stages)
    schedule = pairs if kind == "pairs" else MADE[kind](stages, stages * count)
    costs = []
    drawn = [data.draw(TIMES) for _ in range(schedule.num_stages)]
    for cost in apart(drawn) if data.draw(st.booleans()) else drawn:
        kinds = (F, B, I, W, B + LAST, W + LAST)
        programs = {k: data.draw(STEPS) for k in kinds if data.draw(st.booleans())}
        costs.append(replace(cost, programs=programs, overlap=Overlap(compute, channel)))
    offsets = data.draw(st.lists(st.sampled_from([0.0, 1.7]), min_size=stages, max_size=stages))
    fast = simulate(schedule, costs, offsets=offsets)
    slow = simulate(schedule, costs, offsets=offsets, detail=True)
    assert fast.ran.starts == pytest.approx(slow.ran.starts, rel=1e-9, abs=1e-7)
    assert fast.ran.ends == pytest.approx(slow.ran.ends, rel=1e-9, abs=1e-7)
    for left, expected in zip(fast.ran.channels, slow.ran.channels, strict=True):
        assert left == pytest.approx(expected, rel=1e-9, abs=1e-7)


def integrated(steps: Sequence[Step], overlap: Overlap, tick: float = 1e-3) -> float:
    """Seconds of a program by small steps in time."""
    now, jobs, marks = 0.0, [], {}
    newest = previous = -1
    for do, seconds, job, _ in steps:
        left = seconds if do in (Do.RUN, Do.TALK) else 0.0
        if do is Do.START:
            jobs.append(seconds)
            marks[job] = len(jobs) - 1
            if job == SCATTER:
                newest, previous = len(jobs) - 1, newest
        wanted = {Do.WAIT: marks.get(job, -1), Do.WAIT_ALL: len(jobs) - 1,
                  Do.WAIT_SCATTER: previous}.get(do, -1)  # fmt: skip
        while left > tick / 2 or any(x > tick / 2 for x in jobs[: wanted + 1]):
            busy = next((i for i, x in enumerate(jobs) if x > tick / 2), -1)
            if busy >= 0:
                jobs[busy] -= tick / (overlap.channel if do is Do.RUN else 1.0)
            if left:
                left -= tick / (overlap.compute if do is Do.RUN and busy >= 0 else 1.0)
            now += tick
    return now


@settings(max_examples=30, deadline=None)
@given(STEPS, st.sampled_from([1.0, 1.25]), st.sampled_from([1.0, 2.0]))
def test_play_is_what_small_steps_give(program: Program, compute: float, channel: float) -> None:
    overlap = Overlap(compute, channel)
    found, _ = play(program.steps, IDLE, overlap)
    assert found == pytest.approx(integrated(program.steps, overlap), abs=0.05)


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


def test_messages_that_meet_share_a_port() -> None:
    """Two messages to the middle stage at the same time: both are there after twice the time."""
    schedule = parse_schedule("meet", ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"))
    quick = StageTimes(forward_s=1.0, backward_s=1.0)
    # At 6, stage 0 has made 0F1's output and stage 2 the gradient of 2B0.
    costs = [replace(quick, forward_s=3.0, send_s=1.0), quick, replace(quick, backward_s=1.0)]
    costs[1] = replace(costs[1], send_s=0.5)
    timeline = simulate(schedule, costs, detail=True)
    messages = sorted(
        (x.start_s, x.end_s) for x in timeline.log if x.channel == "message" and x.rank == 1
    )
    for (_, end), (begin, _) in pairwise(messages):
        assert begin >= end
    alone = simulate(schedule, [replace(c, send_s=0.0) for c in costs])
    assert timeline.step_s > alone.step_s


def test_two_messages_at_once_take_twice_as_long() -> None:
    """Each of the two outer ranks has something for the one in the middle when it begins."""
    rows = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1")
    cost = StageTimes(forward_s=2.0, backward_s=2.0, send_s=1.0)
    timeline = simulate(parse_schedule("x", rows), [cost] * 3, detail=True)
    got = {x.what: (x.start_s, x.end_s) for x in timeline.log if x.channel == "message"}
    ends = {str(e.action): e.end_s for row in timeline.entries for e in row}
    # 2B0 ends at 10; nothing else is on the way then.
    assert got["1F1"] == (4.0, 5.0) and got["1B0"] == (ends["2B0"], ends["2B0"] + 1.0)


def test_offload_hides_or_does_not() -> None:
    """Copies of 1 s hide behind forwards of 2 s; copies of 5 s do not."""
    schedule = gpipe(1, 4)
    plain = StageTimes(forward_s=2.0, backward_s=3.0, saved_bytes=10)
    hidden = replace(plain, offload_s=1.0, offload_bytes=8)
    # The first backward's bytes are asked for when the last forward starts, and are there at 7.
    assert simulate(schedule, [hidden]).step_s == simulate(schedule, [plain]).step_s == 20.0
    slow = replace(hidden, offload_s=5.0)
    timeline = simulate(schedule, [slow], detail=True)
    # Gone at 7, 12, 17, 22. Back: 0 at 7 to 12, then one after the other: 17, 22, 27.
    starts = [e.start_s for e in timeline.entries[0] if e.action.work is BACKWARD]
    assert starts == [12.0, 17.0, 22.0, 27.0]
    assert [x.channel for x in timeline.log].count("to_host") == 4


def test_buckets_hide_wholly_or_not_at_all() -> None:
    """Three blocks of 2 s, a bucket after each."""

    def program(bucket_s: float) -> Program:
        steps = [(run(2.0, "backward"), Step(Do.START, bucket_s, SCATTER)) for _ in range(3)]
        return Program((*(s for pair in steps for s in pair), Step(Do.WAIT_ALL)))

    assert play(program(1.0).steps)[0] == 7.0  # the last one is exposed
    assert play(program(2.0).steps)[0] == 8.0
    assert play(program(5.0).steps)[0] == 2.0 + 15.0
    at_end = Program((run(6.0, "backward"), Step(Do.START, 3.0), Step(Do.WAIT_ALL)))
    assert play(at_end.steps)[0] == 9.0
    slower = play(program(1.0).steps, IDLE, Overlap(1.5, 2.0))[0]
    # Two buckets take 2 s each beside computing, which gets 4/3 s done meanwhile.
    assert slower == pytest.approx(2 + 2 + 2 / 3 + 2 + 2 / 3 + 1)


def test_the_channel_carries_over_to_the_next_action() -> None:
    """A scatter of 5 s goes on during the next forward, which must not wait for it."""
    scatter = Program((run(1.0, "backward"), Step(Do.WAIT_SCATTER), Step(Do.START, 5.0, SCATTER)))
    cost = StageTimes(forward_s=1.0, backward_s=1.0, programs={1: scatter})
    timeline = simulate(parse_schedule("x", ("0F0 0B0 0F1 0B1 0F2 0B2",)), [cost])
    ends = [e.end_s for e in timeline.entries[0]]
    # The first scatter ends at 7; the third may not start before.
    assert ends == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    assert timeline.ran.channels[0] == pytest.approx((10.0, 10.0, 5.0))


def test_equal_stages_take_turns_at_a_port_whatever_their_times_are_sums_of() -> None:
    """0.1 + 0.2 is more than 0.3; the order at a port must not hang on that."""
    schedule = make_schedule("interleaved", 8, 8, 4)
    plain = StageTimes(forward_s=0.3, backward_s=0.6, send_s=0.25)
    parts = Program((run(0.1, "forward"), talk(0.2, "tensor")))
    costs = [replace(plain, programs={F: parts}) if i % 2 else plain for i in range(8)]
    assert 0.1 + 0.2 != 0.3
    timeline, same = simulate(schedule, costs), simulate(schedule, [plain] * 8)
    assert timeline.ran.ends == pytest.approx(same.ran.ends, rel=1e-12)


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_every_message_is_one_event(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every action one, where events are played; benchmarks/simulator_speed.py has seconds."""
    ranks = 16 if name == "interleaved" else 32
    schedule = make_schedule(name, 32, 64, ranks)
    cost = StageTimes(forward_s=1.0, backward_s=2.0, backward_input_s=1.0, backward_weight_s=1.0,
                      send_s=0.1, saved_bytes=1)  # fmt: skip
    pushed = {module: _counted(monkeypatch, module) for module in (run_ahead, events)}
    simulate(schedule, [cost] * 32)
    messages = sum(item.source >= 0 for item in table_of(schedule).items)
    assert messages == 2 * 31 * 64
    assert len(pushed[run_ahead]) == messages and not pushed[events]
    simulate(schedule, [cost] * 32, detail=True)
    assert len(pushed[events]) == 2 * messages + len(table_of(schedule).items)


def _counted(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[object]:
    """What the module puts into its queues from now on."""
    pushed: list[object] = []

    def push(heap: list[Any], item: Any) -> None:
        pushed.append(item)
        heappush(heap, item)

    monkeypatch.setattr(module, "heappush", push)
    return pushed
