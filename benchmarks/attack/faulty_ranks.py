"""Two ranks over Gloo of which one has a fault, and what the other says of it."""

import multiprocessing
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.world import failure

WIDTH, BATCH = 4, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp_replicate": 2}, "zero3": {"dp_shard": 2, "zero": 3}, "tp": {"tp": 2},
    "pp": {"pp": 2, "num_microbatches": 2},
}  # fmt: skip


class Net(nn.Module):
    """Two layers, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def inputs() -> tuple[Tensor]:
    """The batch of every step."""
    return (torch.ones(BATCH, WIDTH, dtype=torch.float64),)


@cache
def plan_for(layout: str) -> Plan:
    """The plan of one of LAYOUTS."""
    graph = mw.trace(Net(), inputs())
    problem = make_problem(graph, mw.Cluster.local(2), precision="fp64")
    return build_plan(problem, uniform_choice(problem, **LAYOUTS[layout]))


def stall() -> None:
    """Hangs."""
    time.sleep(1000)


HANG_S = {"forward": 1.0, "loader": 1.0, "optimizer": 1.0, "leave": 30, "kill": 30, "stop": 30}
IN_FORWARD = {
    "forward": stall,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}  # fmt: skip


def _one_rank(rank: int, layout: str, fault: str, faulty: int, folder: str) -> None:
    """Trains three steps; the faulty rank has the fault in step 1, or before it."""
    sys.stderr = Path(folder, f"stderr{rank}").open("w", buffering=1)
    torch.set_num_threads(1)
    # A hang is older than a beat, and silence is longer than a beat.
    failure.BEAT_S, failure.DEAD_S, failure.GRACE_S = 0.1, 2.0, 0.2
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    job = mw.compile(Net(), plan_for(layout), optimizer="sgd", lr=0.1, hang_s=HANG_S[fault],
                     example_inputs=inputs())  # fmt: skip
    for step in range(3):
        if rank == faulty and step == 1:
            time.sleep(0.3)  # a beat says that step 0 is over
            _prepare(fault, job)
        job.step(inputs())
    os._exit(0)


def _prepare(fault: str, job: mw.Job) -> None:
    if fault == "loader":
        stall()
    elif fault == "leave":
        job.close()
        sys.exit(0)
    elif fault == "optimizer":
        job.optimizer.register_step_pre_hook(lambda *_: stall())
    else:
        stage = next(iter(job.parts.stages.values()))
        blocks: Any = stage.blocks
        blocks[0].register_forward_pre_hook(lambda *_: _strike(fault))


def _strike(fault: str) -> None:
    if fault != "forward":
        time.sleep(0.3)  # a beat says where it is
    IN_FORWARD[fault]()


def said_by_the_other(layout: str, fault: str, folder: Path, faulty: int = 1) -> str:
    """What the rank without the fault says when it leaves; AssertionError if it does not."""
    plan_for(layout)  # before the fork: made once
    context, other = multiprocessing.get_context("fork"), 1 - faulty
    ranks = [
        context.Process(target=_one_rank, args=(rank, layout, fault, faulty, str(folder)))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        ranks[other].join(timeout=40)
        assert ranks[other].exitcode not in (None, 0), f"rank {other} stays, or sees no failure"
        return Path(folder, f"stderr{other}").read_text()
    finally:
        for process in ranks:
            process.kill()
            process.join()


def cause(layout: str, fault: str, faulty: int) -> str:
    """What has to be said of a fault."""
    action = f"{faulty if layout == 'pp' else 0}F0"
    hangs = f"no progress for {HANG_S[fault]:g} s, in stall ("
    return (
        f"rank {faulty}"
        + {
            "forward": f", step 1, action {action} (running): {hangs}",
            "loader": f", outside a step, after step 0: {hangs}",
            "optimizer": f", step 1, action gradients (synchronising): {hangs}",
            "kill": f" died, step 1, action {action}",
            "stop": f" died or was stopped, step 1, action {action}: no sign of life for 2 s",
            "leave": " left the job, outside a step, after step 0, while others need it",
        }[fault]
    )
