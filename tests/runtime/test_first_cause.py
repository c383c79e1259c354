"""Of ranks that stand still together, the one that keeps the others waiting is named."""

import multiprocessing
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright.planner.candidates import build_plan, uniform_choice
from meshwright.planner.problem import make_problem
from meshwright.runtime import failure
from meshwright.runtime.standing import Standing, first_cause

WIDTH, BATCH = 4, 4
LAYOUTS = {
    "dp": {"dp_replicate": 2}, "zero3": {"dp_shard": 2, "zero": 3}, "tp": {"tp": 2},
    "pp": {"pp": 2, "num_microbatches": 2},
}  # fmt: skip


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def inputs():
    return (torch.ones(BATCH, WIDTH, dtype=torch.float64),)


@cache
def plan_for(layout):
    graph = mw.trace(Net(), inputs())
    problem = make_problem(graph, mw.Cluster.local(2), precision="fp64")
    return build_plan(problem, uniform_choice(problem, **LAYOUTS[layout]))


def stall():
    time.sleep(1000)


HANG_S = {"forward": 1.0, "loader": 1.0, "optimizer": 1.0, "leave": 30, "kill": 30, "stop": 30}
IN_FORWARD = {
    "forward": stall,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}  # fmt: skip


def one_rank(rank, layout, fault, folder):
    """Trains three steps; rank 1 has the fault in step 1, or before it."""
    sys.stderr = Path(folder, f"stderr{rank}").open("w", buffering=1)
    torch.set_num_threads(1)
    # A hang is older than a beat, and silence is longer than a beat.
    failure.BEAT_S, failure.DEAD_S, failure.GRACE_S = 0.1, 2.0, 0.2
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    job = mw.compile(Net(), plan_for(layout), optimizer="sgd", lr=0.1, hang_s=HANG_S[fault],
                     example_inputs=inputs())  # fmt: skip
    for step in range(3):
        if rank == 1 and step == 1:
            time.sleep(0.3)  # a beat says that step 0 is over
            _prepare(fault, job)
        job.step(inputs())
    os._exit(0)


def _prepare(fault, job):
    if fault == "loader":
        stall()
    elif fault == "leave":
        job.close()
        sys.exit(0)
    elif fault == "optimizer":
        job.optimizer.register_step_pre_hook(lambda *_: stall())
    else:
        stage = next(iter(job.parts.stages.values()))
        stage.blocks[0].register_forward_pre_hook(lambda *_: _strike(fault))


def _strike(fault):
    if fault != "forward":
        time.sleep(0.3)  # a beat says where it is
    IN_FORWARD[fault]()


def said_by_others(layout, fault, folder):
    """What rank 0 says when it leaves, and after how many seconds."""
    plan_for(layout)  # before the fork: made once
    context, started = multiprocessing.get_context("fork"), time.monotonic()
    ranks = [
        context.Process(target=one_rank, args=(rank, layout, fault, str(folder)))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        ranks[0].join(timeout=20)
        assert ranks[0].exitcode not in (None, 0), "rank 0 is still there, or sees no failure"
        return Path(folder, "stderr0").read_text(), time.monotonic() - started
    finally:
        for process in ranks:
            process.kill()
            process.join()


ACTION = {"dp": "0F0", "zero3": "0F0", "tp": "0F0", "pp": "1F0"}


@pytest.mark.parametrize("layout", ["zero3", "tp", "pp"])
def test_a_hang_is_that_of_the_rank_which_did_not_enter(layout, tmp_path):
    text, seconds = said_by_others(layout, "forward", tmp_path)
    action = ACTION[layout]
    assert f"rank 1, step 1, action {action} (running): no progress for 1 s, in stall (" in text
    assert seconds < 15


@pytest.mark.parametrize("layout", ["pp"])
def test_a_hang_in_a_loader_is_outside_a_step(layout, tmp_path):
    text, _ = said_by_others(layout, "loader", tmp_path)
    assert "rank 1, outside a step, after step 0: no progress for 1 s, in stall (" in text


def test_a_hang_in_the_optimizer_is_named(tmp_path):
    text, _ = said_by_others("dp", "optimizer", tmp_path)
    assert "rank 1, step 1, action gradients (synchronising): no progress for 1 s, in stall" in text


@pytest.mark.parametrize("layout", ["tp"])
def test_the_step_of_a_killed_rank_is_named(layout, tmp_path):
    text, _ = said_by_others(layout, "kill", tmp_path)
    assert f"rank 1 died, step 1, action {ACTION[layout]}" in text


def test_a_stopped_rank_is_named_with_its_step(tmp_path):
    text, _ = said_by_others("tp", "stop", tmp_path)
    wanted = "rank 1 died or was stopped, step 1, action 0F0: no sign of life for 2 s"
    assert wanted in text


@pytest.mark.parametrize("layout", ["zero3"])
def test_a_rank_that_leaves_with_0_is_named(layout, tmp_path):
    text, _ = said_by_others(layout, "leave", tmp_path)
    assert "rank 1 left the job, outside a step, after step 0, while others need it" in text


# Who is first, of standings.


def at(step, phase="running", waits=False, entered=10, action="0F0"):
    return Standing(step, action, phase, entered, waits, "")


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
