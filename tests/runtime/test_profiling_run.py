"""The list of measurements: skipped if known, stopped by the budget, failures told."""

import warnings
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
import torch

import meshwright as mw
from meshwright.costmodel.cost_cache import BlockSpot, CostTables
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.profile.profile import BlockRecord, Machine, OptimizerRecord, Profile, Timing
from meshwright.ir.profile.profile_store import load_profile, open_store
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.progress import ProfilingProgress
from meshwright.profiling.run import ProfilingRun
from meshwright.profiling.work import block_tasks, tasks_of_plans
from meshwright.runtime.profiling import run as profiling_run
from meshwright.runtime.profiling.run import measure_all, measurer, together
from meshwright.runtime.profiling.tasks import OptimizerTask
from meshwright.runtime.profiling.team import Failed, Team
from meshwright.testing.models import CASES
from tests.traces import zoo_graph

CPU = torch.device("cpu")
HERE = Machine(device="this", kind="cpu", driver="1", torch="2", backend="gloo", cores=2)
SMALL = [
    OptimizerTask(optimizer="adamw", num_tensors=count, nbytes=2**14) for count in (1, 2, 4, 8)
]

MORE = [OptimizerTask(optimizer="adamw", num_tensors=count, nbytes=2**14) for count in (3, 5, 6, 7)]


@pytest.fixture(scope="module")
def graph() -> Graph:
    case, dtype = CASES["sequential"], torch.float32
    return zoo_graph(case, dtype=dtype)


class Counting:
    """Measures nothing; knows how often it was asked, and for how long."""

    def __init__(self) -> None:
        self.budgets: list[float] = []

    def measure(self, task: int, budget_s: float) -> list[OptimizerRecord]:
        self.budgets.append(budget_s)
        time = Timing(median_s=1.0, spread=0.0, count=1)
        done = [*SMALL, *MORE][task]
        return [
            OptimizerRecord(
                optimizer=done.optimizer, num_tensors=done.num_tensors, nbytes=done.nbytes,
                time=time,
            )
        ]  # fmt: skip

    def pace_s(self) -> float:
        return 1.0


class Failing(Counting):
    def measure(self, task: int, budget_s: float) -> list[OptimizerRecord]:
        if task == 1:
            raise Failed("out of range")
        return super().measure(task, budget_s)


def test_what_is_known_is_skipped(tmp_path: Path) -> None:
    with open_store(tmp_path / "p.db") as store:
        first, second = Counting(), Counting()
        assert measure_all(SMALL[:2], first, store, HERE).measured == 2
        outcome = measure_all(SMALL, second, store, HERE)
        assert (outcome.known, outcome.measured, len(second.budgets)) == (2, 2, 2)
        assert len(store.load().optimizers) == 4


class Disturbed(Counting):
    """Slow while the second task is measured for the first time, and while the fourth always is."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def measure(self, task: int, budget_s: float) -> list[OptimizerRecord]:
        self.asked.append(task)
        (found,) = super().measure(task, budget_s)
        return [replace(found, time=replace(found.time, median_s=float(len(self.asked))))]

    def pace_s(self) -> float:
        if not self.asked:
            return 1.0
        return {1: 1.2 if self.asked.count(1) == 1 else 1.01, 3: 1.5}.get(self.asked[-1], 1.0)


def test_what_was_measured_while_the_machine_was_slow_is_measured_again(tmp_path: Path) -> None:
    by = Disturbed()
    with open_store(tmp_path / "p.db") as store:
        outcome = measure_all([*SMALL, *MORE], by, store, HERE)
        found = {r.num_tensors: r.time.median_s for r in store.load().optimizers}
    # The third began at the pace at which the second ended.
    assert by.asked[:8] == [0, 1, 2, 3, 4, 5, 6, 7] and set(by.asked[8:]) == {1, 2, 3, 4}
    assert (outcome.measured, outcome.left) == (8, 0)
    assert found[1] == 1 and found[5] == 6 and found[8] == 4, "a pace no better is no reason"
    assert found[2] > 8 and found[4] > 8


def test_nothing_is_measured_again_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = Disturbed()
    monkeypatch.setattr(profiling_run, "monotonic", lambda: float(len(by.asked)))
    with open_store(tmp_path / "p.db") as store:
        outcome = measure_all(SMALL, by, store, HERE, deadline=5.0)
    assert by.asked[:4] == [0, 1, 2, 3] and len(by.asked) == 5
    assert (outcome.measured, outcome.left) == (4, 0)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    class Interrupted(Counting):
        def measure(self, task: int, budget_s: float) -> list[OptimizerRecord]:
            if task == 2:
                raise KeyboardInterrupt
            return super().measure(task, budget_s)

    with pytest.raises(KeyboardInterrupt), open_store(tmp_path / "p.db") as store:
        measure_all(SMALL, Interrupted(), store, HERE)
    with open_store(tmp_path / "p.db") as store:
        assert measure_all(SMALL, Counting(), store, HERE).known == 2


def test_the_deadline_is_kept_and_shared_out(tmp_path: Path) -> None:
    with open_store(tmp_path / "p.db") as store:
        late = measure_all(SMALL, Counting(), store, HERE, deadline=monotonic() - 1)
        assert (late.left, late.measured) == (4, 0)
        soon = Counting()
        measure_all(SMALL, soon, store, HERE, deadline=monotonic() + 0.2)
        assert 0 < soon.budgets[0] <= 0.05


def test_what_a_phase_leaves_of_its_time_goes_to_those_after_it(tmp_path: Path) -> None:
    def left_s(phase: str, ago_s: float) -> float:
        run = ProfilingRun(
            Cluster.local(2), store, HERE, CPU, shown, 1.0, started=monotonic() - ago_s
        )
        return run.deadline(phase) - monotonic()

    with open_store(tmp_path / "p.db") as store, ProfilingProgress(show=False, minutes=1) as shown:
        assert left_s("blocks", 0) == pytest.approx(33, abs=0.1)
        assert left_s("collectives", 1) == pytest.approx(50, abs=0.1)  # 85 % of the minute is over
        assert left_s("memory", 40) == pytest.approx(17, abs=0.1)
        assert left_s("collectives", 45) == pytest.approx(15, abs=0.1)  # its own share at least
        assert left_s("memory", 58) == pytest.approx(2, abs=0.1)  # and never more than there is
        assert left_s("ops", 30) == pytest.approx(30, abs=0.1)


def test_a_failure_does_not_end_the_run(tmp_path: Path) -> None:
    with open_store(tmp_path / "p.db") as store:
        outcome = measure_all(SMALL, Failing(), store, HERE)
    assert outcome.measured == 3
    assert outcome.failed == ["adamw, 2 tensors, 0.015625 MiB: out of range"]


def test_a_team_survives_a_failing_task() -> None:
    def work(task: int, budget_s: float, agree) -> int:  # type: ignore[no-untyped-def]
        agree(True)
        if task == 1:
            raise RuntimeError("no such table\nmore")
        return task

    with Team(2, work) as team:
        assert team.measure(0, 0.0) == [0, 0]
        with pytest.raises(Failed, match="no such table"):
            team.measure(1, 0.0)
        assert team.measure(2, 0.0) == [2, 2]


def test_a_team_agrees_on_rounds() -> None:
    def work(task: int, budget_s: float, agree) -> int:  # type: ignore[no-untyped-def]
        rounds = 0
        # Each process would stop elsewhere; the first decides.
        while agree(rounds < task + torch.get_num_threads()):
            rounds += 1
        return rounds

    with Team(2, work) as team:
        assert team.measure(3, 0.0) == [4, 4]


def test_processes_measure_blocks_together(graph: Graph, tmp_path: Path) -> None:
    problem = make_problem(graph, Cluster.local(2), precision="fp32")
    tasks = block_tasks(problem)[:4]
    with open_store(tmp_path / "p.db") as store:
        with measurer(graph, tasks, CPU, 2) as by:
            outcome = measure_all(tasks, by, store, HERE, deadline=monotonic() + 30)
        assert outcome.measured == 4 and not outcome.failed
        found = store.load().blocks
    assert set(found) == {task.key for task in tasks}
    assert all(record.processes == 2 for record in found.values())


def test_apart_counts_as_spread() -> None:
    one = Timing(median_s=1.0, spread=0.01, count=3)
    record = OptimizerRecord(optimizer="sgd", num_tensors=1, nbytes=4, time=one)
    other = replace(record, time=replace(one, median_s=3.0))
    found = together([record, other])
    assert isinstance(found, OptimizerRecord)
    assert found.time == Timing(median_s=2.0, spread=0.5, count=6)


@pytest.fixture(scope="module")
def profiled(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "p.db"
    _profile(graph, path, 0.4)
    return path


def _profile(graph: Graph | None, path: Path, minutes: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the budget may be too short on a busy machine
        mw.profile(
            graph, Cluster.local(2), precision="fp32", path=path, minutes=minutes, progress=False
        )


def test_profile_has_everything_that_plans_need(graph: Graph, profiled: Path) -> None:
    found = load_profile(profiled)
    problem = make_problem(graph, Cluster.local(2), precision="fp32", profile=found)
    assert {task.key for task in block_tasks(problem)} <= set(found.blocks)
    assert found.collectives and found.optimizers
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=2, num_microbatches=2))
    assert plan.predicted and plan.profile
    assert plan.profile.fingerprint == found.fingerprint
    blocks = problem.graph.blocks
    stage = next(iter(problem.tables._stages.values()))
    assert len(stage.blocks) == len(blocks)
    assert {cost.source for cost in stage.blocks} == {"measured"}


def test_only_what_given_plans_need(graph: Graph, profiled: Path, tmp_path: Path) -> None:
    known = load_profile(profiled)
    with open_store(tmp_path / "p.db") as store:  # what takes new processes, and is not of plans
        names = ("process", "process_group", "group")
        store.add(known.machine, *(known.memory[name] for name in names))
    problem = make_problem(graph, Cluster.local(2), precision="fp32")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=2, num_microbatches=2))
    tasks = tasks_of_plans(problem, [plan, plan])
    assert {(task.samples, task.tp) for task in tasks} == {(2, 1)}
    assert len(tasks) < len(block_tasks(problem))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = mw.profile(
            graph, Cluster.local(2), precision="fp32", path=tmp_path / "p.db", plans=[plan],
            minutes=0.1, progress=False,
        )  # fmt: skip
    assert set(found.blocks) == {task.key for task in tasks}
    assert not found.ops


def test_the_second_run_measures_nothing_again(graph: Graph, profiled: Path) -> None:
    before = load_profile(profiled)
    _profile(graph, profiled, 0.1)
    assert load_profile(profiled).blocks == before.blocks
    assert set(before.optimizers) <= set(load_profile(profiled).optimizers)


def test_search_takes_a_profile(graph: Graph, profiled: Path) -> None:
    plan = mw.search(graph, Cluster.local(2), precision="fp32", profile=profiled, progress=False)
    assert plan.profile and plan.profile.fingerprint == load_profile(profiled).fingerprint


def test_a_profile_of_another_kind_is_refused(graph: Graph, profiled: Path) -> None:
    gpus = Cluster.preset("a100-40", num_nodes=1, devices_per_node=2)
    with pytest.raises(PlanError, match="is of a cpu device"):
        mw.search(graph, gpus, precision="fp32", profile=profiled, progress=False)


def test_times_between_measured_samples_are_interpolated(graph: Graph, profiled: Path) -> None:
    found = load_profile(profiled)
    task = next(
        t
        for t in block_tasks(make_problem(graph, Cluster.local(2), precision="fp32"))
        if t.samples == 4 and t.tp == 1
    )
    low, high = (_twin(graph, found.blocks, task.pattern, n) for n in (2, 8))
    some = {r.key: r for r in (low, high)}
    cost = _cost(graph, replace(found, blocks=some), task.pattern)
    expected = low.forward.median_s + (high.forward.median_s - low.forward.median_s) / 3
    assert cost.source == "interpolated"
    assert cost.forward_s == pytest.approx(expected)
    beyond = _cost(graph, replace(found, blocks={low.key: low}), task.pattern)
    assert beyond.source == "interpolated"
    assert beyond.forward_s >= low.forward.median_s
    assert beyond.uncertain_s / beyond.forward_s > cost.uncertain_s / cost.forward_s


def _twin(graph: Graph, blocks: dict[str, BlockRecord], pattern: str, samples: int) -> BlockRecord:
    problem = make_problem(graph, Cluster.local(2), precision="fp32")
    key = next(
        t.key for t in block_tasks(problem) if (t.pattern, t.samples, t.tp) == (pattern, samples, 1)
    )
    return blocks[key]


def _cost(graph: Graph, profile: Profile, pattern: str):  # type: ignore[no-untyped-def]
    problem = make_problem(graph, Cluster.local(2), precision="fp32", profile=profile)
    block = next(b for b in graph.blocks if b.pattern == pattern)
    layout = next(x for x in problem.layouts(()) if x.pattern == pattern)

    spot = BlockSpot(4, 1, (), problem.tables.device_names[0], (), ())
    return problem.tables.block(block, layout, spot)


def test_recomputed_blocks_use_the_forward_without_a_graph(graph: Graph, profiled: Path) -> None:
    found = load_profile(profiled)
    record = next(r for r in found.blocks.values() if r.samples == 4 and r.tp == 1)
    assert record.no_grad_forward
    cost = _cost(graph, found, record.pattern)
    again = cost.recomputed()
    assert again.forward_s == record.no_grad_forward.median_s
    assert again.backward_s == pytest.approx(cost.backward_s + record.forward.median_s)


def test_nonsense_is_refused(graph: Graph) -> None:
    with pytest.raises(PlanError, match="minutes is 0"):
        mw.profile(graph, Cluster.local(2), minutes=0)
    if not torch.cuda.is_available():
        with pytest.raises(PlanError, match="this machine has none"):
            mw.profile(graph, Cluster.preset("a100-40", num_nodes=1, devices_per_node=2))


def test_without_a_profile_nothing_changes(graph: Graph) -> None:
    tables = CostTables(graph, Cluster.local(2), "fp32")
    assert tables.profile is None and tables.cluster == Cluster.local(2)
