"""The order of messages, looked at without processes; and that executor and mailbox keep to it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.schedule import Action, Schedule
from meshwright.planner.problem.schedule_tools import SCHEDULES, make_schedule, stages_per_rank
from meshwright.runtime.messages.mailbox import Mailbox
from meshwright.runtime.messages.messages import pairs_of, plan_messages
from meshwright.runtime.messages.ordering import Act, doings, standstill
from meshwright.runtime.record.record import Recorder
from meshwright.runtime.step.executor import Executor, RankProgress
from meshwright.runtime.world.groups import Groups
from meshwright.testing.handmade import programs_of
from meshwright.testing.pipelines import pipeline
from meshwright.tools.dry.classes import RankClass
from meshwright.tools.dry.transfers import check_order

SIZES = [(ranks, count) for ranks in (2, 3, 4, 6, 8) for count in (1, 2, 3, 4, 8, 12)]


def rows_of(schedule: Schedule, replicas: int | tuple[int, ...] = 1) -> dict[int, Any]:
    """Per rank: its messages and how many actions it takes."""
    one = pipeline(schedule.name, schedule, replicas)
    found = {}
    for rank in range(one.plan.world_size):
        programs = programs_of(one.chain, one.plan, rank)
        messages = plan_messages(one.plan, schedule, programs, rank)
        row = schedule.ranks[schedule.rank_of(programs[0].index)]
        found[rank] = messages, len(row), pairs_in(schedule, row)
    return found


def pairs_in(schedule: Schedule, row: tuple[Action, ...]) -> set[int]:
    return {row.index(first) for first, _ in schedule.pairs if first in row}


def waits(schedule: Schedule, replicas: int | tuple[int, ...] = 1, *, opened: bool = True) -> Any:
    rows = rows_of(schedule, replicas)
    done = {rank: doings(found, rank, *more) for rank, (found, *more) in rows.items()}
    return standstill(done, opened=opened)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_stands_still(name: str) -> None:
    made = 0
    for ranks, count in SIZES:
        try:
            schedule = make_schedule(name, stages_per_rank(name)[0] * ranks, count, ranks)
        except PlanError:
            continue  # not for this many micro-batches
        assert not waits(schedule), f"{ranks} ranks, {count} micro-batches"
        made += 1
    assert made >= 5


@pytest.mark.parametrize("replicas", [(1, 3), (3, 1), (2, 1, 3), (1, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpipe", "zero_bubble", "dapple_pb"])
def test_nor_with_unequal_replicas(name: str, replicas: tuple[int, ...]) -> None:
    assert not waits(make_schedule(name, len(replicas), 4, len(replicas)), replicas)


@pytest.mark.parametrize(
    ("name", "ranks", "hangs"),
    [("gpipe", 2, True), ("dapple_pb", 4, True), ("one_f_one_b", 4, False)],
)
def test_some_would_if_connections_were_made_at_first_use(
    name: str, ranks: int, hangs: bool
) -> None:
    found = waits(make_schedule(name, ranks, 4, ranks), opened=False)
    assert bool(found) is hangs
    if hangs:
        assert any(text.startswith("rank 0 asks for the gradient of h") for text in found)


def test_a_dry_run_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = pipeline("zbv", make_schedule("zbv", 4, 4, 2), 1)
    classes = [
        RankClass((rank,), programs_of(one.chain, one.plan, rank))
        for rank in range(one.plan.world_size)
    ]
    assert not list(check_order(one.plan, classes))

    def forgetful(*given: Any) -> list[Any]:
        return [(act, m) for act, m in doings(*given) if act is not Act.SEND or m.number != 3]

    monkeypatch.setattr("meshwright.tools.dry.transfers.doings", forgetful)
    found = list(check_order(one.plan, classes))
    assert found and found[0].rule == "message order" and "rank" in found[0].message


def test_ends_that_disagree_are_named() -> None:
    rows = rows_of(make_schedule("gpipe", 2, 2, 2))
    messages, count, _ = rows[1]
    first, second, *more = [m for m in messages if not m.gradient]
    swapped = replace(first, number=1), replace(second, number=0)
    (other, others) = rows[0][0], rows[0][1]
    done = {
        0: doings(other, 0, others),
        1: doings((swapped[1], swapped[0], *more, *messages[len(more) + 2 :]), 1, count),
    }
    found = standstill(done)
    assert any("where rank 1 asks for" in text for text in found)


@pytest.mark.parametrize("name", ["gpipe", "zbv", "interleaved", "dual_pipe_v_pairs"])
def test_executor_and_mailbox_do_what_is_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule(name, stages_per_rank(name)[0] * 2, 4, 2)
    one = pipeline(name, schedule, (1, 2) if len(set(stages_per_rank(name))) == 1 else 1)
    for rank in range(one.plan.world_size):
        programs = programs_of(one.chain, one.plan, rank)
        messages = plan_messages(one.plan, schedule, programs, rank)
        done: list[Any] = []
        _watch(monkeypatch, done, messages, rank)
        row = schedule.ranks[schedule.rank_of(programs[0].index)]
        device = torch.device("cpu")
        samples = {
            p.index: one.plan.stages[p.index].batch_shares[
                one.plan.stages[p.index].coordinates(rank)["dp"]
            ]
            for p in programs
        }
        recorder = Recorder(device)
        groups = Groups({}, dict.fromkeys(pairs_of(one.plan, programs, rank), None))
        mailbox = Mailbox(rank, messages, programs, samples, groups, device, recorder)
        stages: Any = {p.index: _Stage(p) for p in programs}
        offsets = dict.fromkeys(stages, 0)
        Executor(
            row, stages, mailbox, offsets, 6, RankProgress(), recorder, pairs=schedule.pairs
        ).run(lambda s, m: {})
        wanted = list(doings(messages, rank, len(row), pairs_in(schedule, row)))
        assert _by_action(done) == _by_action(wanted), f"rank {rank}"


def _by_action(done: list[Any]) -> list[Any]:
    """Runs of the same kind of act, each in no order but that of its pairs."""
    found: list[Any] = []
    for act, message in done:
        if not found or found[-1][0] is not act:
            found.append((act, []))
        found[-1][1].append((message.source, message.target, message.number))
    return [(act, sorted(those)) for act, those in found]


def _watch(monkeypatch: pytest.MonkeyPatch, done: list[Any], messages: Any, rank: int) -> None:
    def begun(act: Act, source: int, target: int, tag: int) -> Any:
        found = next(m for m in messages if (m.source, m.target, m.number) == (source, target, tag))
        done.append((act, found))
        return SimpleNamespace(wait=lambda: done.append((Act.WAIT, found)))

    monkeypatch.setattr(dist, "isend", lambda x, to, group, tag: begun(Act.SEND, rank, to, tag))
    monkeypatch.setattr(
        dist, "irecv", lambda x, source, group, tag: begun(Act.ASK, source, rank, tag)
    )


class _Stage:
    """A stage that computes nothing."""

    def __init__(self, program: Any) -> None:
        self.program, self.comm, self.reduce_early = program, SimpleNamespace(), False

    def __call__(self, microbatch: int, values: Any, **more: Any) -> dict[str, torch.Tensor]:
        return _zeros(self.program.sends)

    def forward_turns(self, microbatch: int, values: Any, **more: Any) -> Any:
        yield
        return _zeros(self.program.sends)

    def backward_turns(self, microbatch: int, gradients: Any, last: bool) -> Any:
        yield
        return _zeros(self.program.receives)

    def recompute(self, microbatch: int) -> None:
        pass

    def backward(self, microbatch: int, gradients: Any, last: bool) -> dict[str, torch.Tensor]:
        return _zeros(self.program.receives)

    def backward_input(self, microbatch: int, gradients: Any) -> dict[str, torch.Tensor]:
        return _zeros(self.program.receives)

    def backward_weight(self, microbatch: int, last: bool) -> None:
        pass


def _zeros(values: Any) -> dict[str, torch.Tensor]:
    return {v.name: torch.zeros(v.shape, dtype=getattr(torch, v.dtype)) for v in values}
