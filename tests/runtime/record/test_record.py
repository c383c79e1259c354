"""What a run records of itself: times, memory, traces, files."""

import gzip
import json
import time
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import linear

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import Work
from meshwright.ir.profile import measured
from meshwright.ir.profile.measured import TensorMemory
from meshwright.ir.torch_modes import watching
from meshwright.runtime.record.tensors import TensorTracker
from meshwright.runtime.stage.stage import StageModule
from meshwright.testing.handmade import BATCH, WIDTH, Chain, batches, make_job, plan_of, reference
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.small_jobs import gpipe, split_gpipe, stage

SPLIT = plan_of(
    (stage(0, 1, (0, 1), shares=(4, 2), zero=3), stage(2, 3, (2, 3), shares=(3, 3), zero=1)),
    split_gpipe(2, 4), 4,
)  # fmt: skip
PIPELINE = plan_of((stage(0, 1, (0,), shares=(6,)), stage(2, 3, (1,), shares=(6,))), gpipe(2, 4), 4)


def _run(plan: Plan, folder: str) -> list[float]:
    job = make_job(Chain(4), plan)
    *plain, tracked, traced = batches(5)
    losses = [float(job.step(batch)) for batch in plain]
    losses.append(float(job.track_memory(tracked)))
    path = f"{folder}/trace_rank{job.parts.rank}.json.gz"
    losses.append(float(job.trace_step(traced, path)))
    job.write_run(folder)
    job.close()
    return losses


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(4, _run, SPLIT, str(folder))


def test_recording_changes_no_loss(run):
    wanted, _ = alone(reference, Chain(4), batches(5))
    for losses in run[1]:
        assert losses == pytest.approx(wanted, rel=1e-12)


def test_files_of_all_ranks_are_complete(run):
    folder, losses = run
    found = measured.load_run(folder)
    assert [m.rank for m in found] == [0, 1, 2, 3]
    assert Plan.load(folder / "plan.json").hash == found[0].plan
    for m in found:
        kinds = ["warm-up", "timed", "timed", "tracked", "traced"]
        assert [step.kind for step in m.steps] == kinds
        assert [step.loss for step in m.steps] == losses[0]
        own = m.rank // 2
        works = [Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT]
        assert [(a.stage, a.work) for a in m.actions] == [(own, work) for work in works]
        assert all(a.count == 2 * 4 for a in m.actions)
        assert set(m.phases) == {
            "batch", "totals", "schedule", "loss", "gradients", "optimizer", "publish"
        }  # fmt: skip
        timed = [step.step_s for step in m.steps if step.kind == "timed"]
        assert sum(phase.median_s for phase in m.phases.values()) < max(timed)
        assert m.memory.resident_peak_bytes >= m.memory.resident_start_bytes > 1e6


def test_collectives_are_counted_with_whole_bytes(run):
    found = measured.load_run(run[0])
    steps, microbatches, blocks = 2, 4, 2
    gathers = [c for c in found[0].collectives if c.primitive == "all_gather"]
    # ZeRO-3 gathers each block for F, I and W of every micro-batch.
    assert sum(c.count for c in gathers) == steps * microbatches * blocks * 3
    assert {c.purpose for c in gathers} == {"parameters"}
    # 1 + 6 + 36 parameters, cut in two and padded; one block reads the gain as well.
    assert {c.nbytes for c in gathers} == {8 * (36 + 6 + 2), 8 * (36 + 6)}
    scatters = [c for c in found[2].collectives if c.primitive == "reduce_scatter"]
    assert [(c.count, c.size, c.stage) for c in scatters] == [(steps, 2, 1)]
    assert all(0 <= c.exposed_s <= c.median_s for m in found for c in m.collectives)


def test_the_timeline_is_one_step_in_order(run):
    for m in measured.load_run(run[0]):
        assert m.timeline is not None and m.timeline.step == 2
        row = SPLIT.schedule.parse().ranks[m.rank // 2]
        taken = [a for a in m.timeline.actions if a.name not in m.phases]
        assert [a.name for a in taken] == [str(action) for action in row]
        assert all(a.end_s <= b.start_s for a, b in pairwise(taken))
        assert all(0 <= a.waiting_s <= a.end_s - a.start_s for a in taken)
        assert m.timeline.messages
        for message in m.timeline.messages:
            assert m.rank in (message.source, message.target)
            assert 0 < message.start_s <= message.end_s < m.timeline.actions[-1].end_s


def test_traces_hold_the_names_of_actions(run):
    for rank in range(4):
        with gzip.open(run[0] / f"trace_rank{rank}.json.gz", "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        row = SPLIT.schedule.parse().ranks[rank // 2]
        assert {str(action) for action in row} | {"gradients", "optimizer"} <= names


def _slow() -> list[tuple[int, str, float, float]]:
    """Stage 0 sleeps in every forward."""
    forward = StageModule.forward

    def sleepy(self, *args, **kwargs):
        if self.program.index == 0:
            time.sleep(0.1)
        return forward(self, *args, **kwargs)

    StageModule.forward = sleepy
    job = make_job(Chain(4), PIPELINE)
    for batch in batches(3):
        job.step(batch)
    found = job.measured().actions
    job.close()
    return [(a.stage, a.work.value, a.busy.median_s, a.waiting.median_s) for a in found]


def test_waiting_for_a_slow_stage_is_not_work():
    first, second = run_ranks(2, _slow)
    by_kind = {(stage, work): seconds for stage, work, *seconds in (*first, *second)}
    busy, waiting = by_kind[0, "F"]
    assert busy > 0.1 and waiting == 0
    busy, waiting = by_kind[1, "F"]
    assert busy < 0.05 < waiting


def _by_hand(samples: int) -> TensorMemory:
    """linear, relu, linear, sum, on one process and without a job."""
    x = torch.randn(samples, 64)
    up, down = (torch.randn(n, m).requires_grad_() for n, m in ((256, 64), (64, 256)))
    tracker = TensorTracker()
    tracker.label("inputs", [x])
    tracker.label("parameters", [up, down])
    with watching(tracker.see):
        loss = linear(linear(x, up).relu(), down).sum()
        loss.backward()
    tracker.label("gradients", [up.grad, down.grad])
    return tracker.peak()


@pytest.mark.parametrize("samples", [16, 64])
def test_the_tracked_peak_is_that_of_a_calculation_by_hand(samples):
    memory = alone(_by_hand, samples)
    weight, hidden = 64 * 256 * 4, samples * 256 * 4
    scalars = 2 * 4  # the loss and its gradient
    assert (memory.parameters_bytes, memory.inputs_bytes) == (2 * weight, samples * 64 * 4)
    if samples == 16:  # the most is there when the first weight's gradient is made
        assert memory.gradients_bytes == 2 * weight
        assert memory.rest_bytes == hidden + scalars  # the gradient of relu's input
    else:  # or when relu's backward runs: its result, and the gradients of result and input
        assert memory.gradients_bytes == weight
        assert memory.rest_bytes == 3 * hidden + scalars
    assert memory.optimizer_bytes == 0
    assert memory.peak_bytes == (
        2 * weight + memory.inputs_bytes + memory.gradients_bytes + memory.rest_bytes
    )


def test_a_storage_that_is_resized_counts_as_it_is():
    whole = torch.zeros(100)
    tracker = TensorTracker([whole])
    tracker.label("parameters", [whole])
    with watching(tracker.see):
        whole.untyped_storage().resize_(0)
        torch.zeros(60)
        whole.untyped_storage().resize_(400)
        torch.zeros(20)
    assert tracker.peak().peak_bytes == 400 + 20 * 4


def test_a_jobs_tensors_are_told_apart(run):
    for m in measured.load_run(run[0]):
        memory = m.memory.tensors
        assert memory is not None
        whole = 8 * ((36 + 6 + 1) + (36 + 6))  # of the first two blocks; the others lack the gain
        if m.rank < 2:  # halves, and whole blocks as they are gathered
            assert whole / 2 <= memory.parameters_bytes < whole / 2 + whole
        else:
            assert memory.parameters_bytes == whole - 8
            # Adam's two moments of this rank's rows, and a step count for each of the four.
            assert memory.optimizer_bytes == 2 * (whole - 8) / 2 + 4 * 4
        assert memory.inputs_bytes == 2 * BATCH * WIDTH * 8
        # Whole ones and this rank's rows of their sum, for a moment.
        assert 0 <= memory.gradients_bytes <= 2 * whole and memory.rest_bytes > 0


AWAY_S = 1000.0


def _accumulated():
    clock, away = time.perf_counter, 0.0
    time.perf_counter = lambda: clock() + away
    job = make_job(Chain(4), plan_of((stage(0, 3, (0,), shares=(12,)),), gpipe(1, 2), 2))
    for first, second in zip(*[iter(batches(4))] * 2, strict=True):
        job.accumulate(first)
        away += AWAY_S
        job.accumulate(second)
        job.apply(0.5)
    return [(step.kind, step.step_s) for step in job.stats.taken], job.measured().actions


def test_an_accumulated_step_is_one_step_without_the_users_time():
    steps, actions = alone(_accumulated)
    assert [kind for kind, _ in steps] == ["warm-up", "timed"]
    assert all(0 < seconds < AWAY_S for _, seconds in steps)
    assert {a.count for a in actions} == {4}


def _two_plans(folder: str) -> str:
    make_job(Chain(4), PIPELINE).write_run(folder)
    with pytest.raises(PlanError, match=r"holds a run of plan .* choose another folder"):
        make_job(Chain(4), _other()).write_run(folder)
    return folder


def _other() -> Plan:
    stages = (stage(0, 0, (0,), shares=(6,)), stage(1, 3, (1,), shares=(6,)))
    return plan_of(stages, gpipe(2, 4), 4)


def test_a_folder_of_another_plan_is_refused(tmp_path):
    run_ranks(2, _two_plans, str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "line"),
        (lambda text: text.replace("measured/1", "measured/9"), "this version reads"),
        (lambda text: text.replace('"rank": 1', '"rank": "one"'), "rank: Input should be"),
        (lambda text: text.replace('"host"', '"hots"'), "hots"),
    ],
)
def test_damaged_files_are_refused(run, tmp_path, change, message):
    text = (run[0] / "measured_rank1.json").read_text()
    (tmp_path / "measured_rank1.json").write_text(change(text))
    with pytest.raises(PlanError, match=message):
        measured.load(tmp_path / "measured_rank1.json")


def test_a_run_with_a_rank_missing_is_refused(run, tmp_path):
    for rank in (0, 2, 3):
        name = f"measured_rank{rank}.json"
        (tmp_path / name).write_text((run[0] / name).read_text())
    with pytest.raises(PlanError, match=r"has ranks \[0, 2, 3\], the run had 4"):
        measured.load_run(tmp_path)


def test_the_chain_is_what_the_figures_above_are_about():
    assert sum(p.numel() for p in Chain(4).parameters()) == 3 * WIDTH**2 + 4 * WIDTH + 1
    assert BATCH == 24


def _peak(prefetch: int) -> int:
    only = stage(0, 5, (0, 1), shares=(7, 5), zero=3, prefetch=prefetch)
    job = make_job(Chain(6, tied=False), plan_of((only,), gpipe(1, 2), 2))
    for batch in batches(2):
        job.step(batch)
    job.track_memory(batches(1)[0])
    job.close()
    assert job.tensor_memory is not None
    return job.tensor_memory.peak_bytes


def test_prefetch_costs_the_memory_of_that_many_blocks():
    block = 8 * (36 + 6)
    # Gloo's thread may hold a tensor for a moment longer, which only adds: the least counts.
    none, one, two = (
        min(run_ranks(2, _peak, prefetch)[0] for _ in range(3)) for prefetch in range(3)
    )
    assert one - none == block
    assert two - none == 2 * block
