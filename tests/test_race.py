"""Plans that are predicted alike are run, and the fastest is kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.cli.race import _start
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import MismatchError, PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.found import NEAR, executed
from meshwright.planner.search.plan_comparison import name_of
from meshwright.planner.search.search import rank, search_finalists, search_problem
from meshwright.testing.models import CASES
from meshwright.testing.spawn import RankFailed, run_ranks
from meshwright.tools.race import standing as heats
from meshwright.tools.race.racing import race
from meshwright.tools.race.standing import Heat, RaceStanding
from tests.command_line import GPT2, SEARCH, invoke
from tests.warm import shell

CASE = CASES["sequential"]


def _batch(seed: int) -> object:
    return CASE.batch(8, torch.Generator().manual_seed(seed))


def problem(devices: int) -> Problem:
    graph = trace(CASE.model().float(), _batch(0), CASE.loss_fn)
    return make_problem(graph, Cluster.local(devices), precision="fp32", optimizer="adamw")


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, ...]:
    asked = problem(2)
    pins = (("dp_shard=2",), ("dp_replicate=2",), ("pp=2",))
    return tuple(
        search_problem(make_problem(asked.graph, asked.cluster, precision="fp32",
                                    optimizer="adamw", constraints=pin))
        for pin in pins
    )  # fmt: skip


def standing(*seconds: tuple[int, int, float]) -> RaceStanding:
    """Of four plans, after heats (plan, turn, seconds)."""
    ran = tuple(Heat(number, turn, (9.0, s, s, 9.0)) for number, turn, s in seconds)
    return RaceStanding(plans=("a", "b", "c", "d"), heats=ran)


FIRST = ((0, 0, 1.05), (1, 0, 1.0), (2, 0, 1.4), (3, 0, 1.25))


def test_those_in_front_run_again_to_and_fro() -> None:
    now, order = standing(), []
    seconds = {number: s for number, _, s in FIRST}
    while up := now.next_up(4):
        turn, number = up
        order.append(up)
        now = now.starts(number).ends(Heat(number, turn, (seconds[number],)))
    assert order == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 1), (1, 0), (2, 0), (2, 1), (3, 1), (3, 0),
    ]  # fmt: skip
    assert now.order == (1, 0, 3, 2) and now.running is None


def test_a_run_that_was_disturbed_puts_no_plan_out() -> None:
    # Plan 3 was slow in its first run, plan 0 in its second: what counts are the shorter steps.
    now = standing(*FIRST, (3, 1, 0.98), (1, 1, 1.0), (0, 1, 3.0))
    assert now.field(1) == (0, 1, 3) == now.field(2)
    assert [now.step_s(number) for number in now.field(2)] == [1.05, 1.0, 0.98]


def test_the_field_is_told_by_earlier_turns_only() -> None:
    now = standing(*FIRST, (3, 1, 0.5))
    assert now.field(1) == (0, 1, 3) and now.next_up(2) == (1, 1)
    later = standing(*FIRST, (3, 1, 0.5), (1, 1, 1.0), (0, 1, 1.0))
    assert later.field(2) == (3,) and later.next_up(3) is None and later.order[0] == 3


def test_who_is_alone_in_front_need_not_run_again() -> None:
    far = standing((0, 0, 1.0), (1, 0, 1.31), (2, 0, 1.4), (3, 0, 1.5))
    assert far.next_up(3) is None and far.order[0] == 0


def test_a_plan_that_ends_two_jobs_is_out() -> None:
    once = standing(*FIRST).starts(1).gone_on()
    assert once.failed == () and 1 in once.field(1)
    twice = once.starts(1).gone_on()
    assert twice.failed == (1,) and 1 not in twice.field(1) and 1 not in twice.order
    assert twice.gone_on() == twice


def test_the_journal_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "race"
    assert heats.load(path, "abcd") == standing()
    left = standing(*FIRST).starts(2).gone_on().starts(3)
    heats.save(left, path)
    assert heats.load(path, "abcd") == left
    with pytest.raises(PlanError, match="race of a, b, c, d, these plans are a, b"):
        heats.load(path, "ab")


@pytest.mark.parametrize(
    "change",
    [
        {"heats": [{"number": 4, "turn": 0, "steps_s": [1.0]}]},
        {"heats": [{"number": 0, "turn": 0, "steps_s": []}]},
        {"heats": [{"number": 0, "turn": 0, "steps_s": [-1.0]}]},
        {"running": 9},
        {"more": 1},
    ],
)
def test_a_journal_that_is_none_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "race"
    heats.save(standing(*FIRST), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanError, match="no journal of a race"):
        heats.load(path, "abcd")


def _race(plans: tuple[Plan, ...], journal: Path | None, batches: int = 2) -> object:
    told: list[tuple[int, int]] = []
    groups = len(dist.distributed_c10d._world.pg_map)
    over = race(
        plans, CASE.model().float(), batches=[_batch(seed) for seed in range(batches)],
        loss_fn=CASE.loss_fn, turns=2, steps=2, warmup=1, journal=journal,
        told=lambda plan, heat: told.append((heat.number, len(heat.steps_s))),
    )  # fmt: skip
    return over.best, over.standing, told, len(dist.distributed_c10d._world.pg_map) - groups


def test_all_run_and_one_is_kept(plans: tuple[Plan, ...], tmp_path: Path) -> None:
    path = tmp_path / "race"
    found = run_ranks(2, _race, plans, path)
    (best, over, told, groups), (other, same, *_) = found
    assert over == same and best.hash == other.hash  # ranks agree
    assert {number for number, _ in told} == {0, 1, 2} and {steps for _, steps in told} == {2}
    winner = over.order[0]
    assert executed(best) == executed(plans[winner])
    assert "fastest of 3" in best.notes[-1] and plan_io.loads(plan_io.dumps(best)) == best
    assert groups == 0, "process groups of plans are left"
    # It is over: asked again, nothing runs.
    (again, still, told, _), _ = run_ranks(2, _race, plans, path)
    assert told == [] and still == over and again == best


def test_a_race_that_was_broken_off_goes_on(plans: tuple[Plan, ...], tmp_path: Path) -> None:
    path = tmp_path / "race"
    hashes = tuple(plan.hash for plan in plans)
    heats.save(RaceStanding(plans=hashes, heats=(Heat(0, 0, (1e-6, 1e-6)),), running=1), path)
    (best, over, told, _), _ = run_ranks(2, _race, plans, path)
    assert over.ended == (1,) and over.heats[0].steps_s == (1e-6, 1e-6)
    assert told == [(1, 2), (2, 2)] and executed(best) == executed(plans[0])


def test_what_cannot_be_raced(plans: tuple[Plan, ...]) -> None:
    model, batches = CASE.model().float(), [_batch(0)]
    for given, words in (
        ((), "at least one"),
        ((plans[0], plans[0]), "given twice"),
        ((plans[0], search_problem(problem(1))), "for 1, 2 ranks"),
    ):
        with pytest.raises(PlanError, match=words):
            race(given, model, batches=batches, loss_fn=CASE.loss_fn)
    with pytest.raises(PlanError, match="steps is 0"):
        race(plans, model, batches=batches, loss_fn=CASE.loss_fn, steps=0)
    with pytest.raises(RankFailed, match="no batch"):
        run_ranks(2, _race, plans, None, 0)
    with pytest.raises(RankFailed, match=MismatchError.__name__):
        run_ranks(3, _race, plans, None)


def test_one_process_races_too(tmp_path: Path) -> None:
    asked = problem(1)
    given = tuple(
        search_problem(replace(asked, optimizer=name)) for name in ("adamw", "sgd")
    )  # fmt: skip
    over = race(given, CASE.model().float(), batches=[_batch(0)], loss_fn=CASE.loss_fn, turns=1)
    assert sorted(over.standing.order) == [0, 1] and not dist.is_initialized()


def test_the_command_starts_again_without_a_plan_that_ends_the_job(
    plans: tuple[Plan, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, started = tmp_path / "race", []
    hashes = [plan.hash for plan in plans]

    def torchrun(world: int, *arguments: str) -> int:
        """Dies while plan 1 runs."""
        started.append(world)
        now = heats.load(path, hashes).gone_on()
        if 1 in now.failed:
            heats.save(now, path)
            return 0
        heats.save(now.starts(1), path)
        return 1

    assert _start(list(plans), path, torchrun) == 0
    assert started == [2, 2, 2] and heats.load(path, hashes).failed == (1,)
    said = " ".join(capsys.readouterr().err.split())
    assert "another chance" in said and "it is out" in said
    # Another race's journal is refused before there are ranks.
    with pytest.raises(PlanError, match="is of a race of"):
        _start(list(plans[:2]), path, torchrun)
    assert len(started) == 3
    # What is no plan's fault is told by the ranks, once.
    path.unlink()
    assert _start(list(plans), path, lambda *_: 4) == 4


def test_finalists_are_other_plans_of_nearly_the_same_speed() -> None:
    asked = problem(4)
    best, *others = search_finalists(asked, most=4)
    assert 1 <= len(others) <= 3
    every = (best, *others)
    assert len({executed(plan) for plan in every}) == len({name_of(p) for p in every}) == len(every)
    steps = [plan.predicted.step_s for plan in every if plan.predicted]
    assert max(steps) <= min(steps) * (1 + NEAR) and steps[1:] == sorted(steps[1:])
    for plan in every:
        assert plan.verify(asked.graph, asked.cluster) == () and plan.world_size == 4
        assert plan.evidence and plan.evidence.bound_s > 0 and plan.hash
    ranking = rank(asked.graph, [asked.cluster], precision="fp32", finalists=2, progress=False)
    assert [plan.hash for plan in ranking.finalists] == [plan.hash for plan in every[:2]]
    for number, objective, words in ((0, "throughput", "at least 1"), (2, "memory", "finalists=1")):
        with pytest.raises(PlanError, match=words):
            rank(asked.graph, [asked.cluster], finalists=number, objective=objective)


def test_the_search_command_writes_finalists(tmp_path, capsys) -> None:
    plan = tmp_path / "plan.json"
    assert (
        invoke(*SEARCH[:2], "-c", "local:4", *SEARCH[4:], "--finalists", "2", "-o", str(plan)) == 0
    )
    second = plan_io.load(tmp_path / "plan.2.json")
    said = capsys.readouterr().out
    assert second.hash[:12] in said and plan_io.load(plan).hash[:12] in said
    assert not (tmp_path / "plan.3.json").exists()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    """Plans for two ranks."""
    folder = tmp_path_factory.mktemp("plans")
    found = [folder / "shard.json", folder / "pipeline.json"]
    for path, pin in zip(found, ("dp_shard=2", "pp=2"), strict=True):
        assert invoke(*SEARCH, "--pin", pin, "-o", str(path)) == 0
    return found


def test_the_race_command_starts_its_ranks(files: list[Path], tmp_path: Path) -> None:
    best = tmp_path / "best.json"
    asked = ("-o", str(best), "--turns", "1", "--steps", "2")
    done = shell("meshwright", "race", GPT2, *map(str, files), *asked)
    assert done.returncode == 0, done.stderr
    assert "The fastest of those that were run" in done.stdout and "turn 1" in done.stderr
    assert executed(plan_io.load(best)) in {executed(plan_io.load(path)) for path in files}
    over = heats.load(tmp_path / "best.race", [plan_io.load(path).hash for path in files])
    assert len(over.heats) == 2 and over.running is None


def test_the_race_command_in_one_process(tmp_path: Path, capsys) -> None:
    plan, best = tmp_path / "plan.json", tmp_path / "best.json"
    assert invoke(*SEARCH[:2], "-c", "local:1", *SEARCH[4:], "-o", str(plan)) == 0
    capsys.readouterr()
    assert invoke("race", GPT2, str(plan), "-o", str(best), "--steps", "2", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["plans"]
    assert row["runs"] == 1 and row["measured_s"] > 0
    assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
    assert invoke("race", GPT2, str(plan), str(plan), "-o", str(best)) == 4
    assert "given twice" in capsys.readouterr().err
