"""What late averages (DaSGD) cost on a slow wire, beside what is predicted.

python -m benchmarks.late_wire [--takes 0.5 1.5 2.5] [--rounds 30] [--width 256] [--layers 2]
    [--tokens 64]

Two Gloo processes train a GPT-2, each on its half of a batch, on a wire that is made to last
(meshwright.testing.slow_wire): an average of all parameters takes `takes` times what a step
computes. Gradients are summed in every step, or parameters are averaged after every fourth, and
taken in at once or 1 to 3 steps later. Jobs take turns, round by round of four steps. Exposed is
what ranks wait for messages, in a step on average; predicted is by how much a step is longer than
on a wire that takes no time.

How fast the machine computes meanwhile is measured in the same turns by a job on a wire that takes
no time: the wire, and what is predicted, are scaled by how much longer its steps take than they are
predicted to (`load`).
"""

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.costmodel.comm.comm import Levels, collective_time
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate_all
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.comm.collective import What
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.slow_wire import SlowWire, slowed
from meshwright.testing.spawn import run_ranks

BATCH, RANKS, EVERY = 8, 2, 4
NO_WIRE = 1e15
FREE = "no wire"
CASES: dict[str, FormChoice | None] = {
    "summed in every step": None,
    **{
        f"averaged, taken in {delay} later": FormChoice(
            form="dasgd", settings={"every": EVERY, "delay": delay}
        )
        for delay in range(EVERY)
    },
}


@dataclass(frozen=True)
class Size:
    """Of a GPT-2."""

    width: int
    layers: int
    tokens: int
    """Of a sequence."""


def build(size: Size) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=512, n_positions=size.tokens, n_embd=size.width, n_layer=size.layers,
            n_head=size.width // 64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )).train()  # fmt: skip


def batch(size: Size) -> dict[str, Tensor]:
    ids = torch.randint(2, 512, (BATCH, size.tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def with_wire(machine: Cluster, bandwidth: float) -> Cluster:
    """The machine with a wire of its own between processes, which needs nothing of the cores."""
    wire = replace(
        machine.nodes[0].link, name="slow wire", bandwidth_bytes_per_s=bandwidth, latency_s=0.0,
        launch_s=0.0, efficiency=1.0, curves=(), beside=(), overlap_compute_slowdown=1.0,
    )  # fmt: skip
    return replace(machine, nodes=(replace(machine.nodes[0], link=wire),))


def predicted(graph: Graph, cluster: Cluster) -> dict[str, tuple[Plan, float]]:
    """Plans of all cases, and seconds of their steps."""
    problem = make_problem(graph, cluster, precision="fp32", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=RANKS), predict=False)
    found = {}
    for name, sync in CASES.items():
        own = replace(plan, stages=(replace(plan.stages[0], sync=sync),))
        said = estimate_all(graph, cluster, own, problem.tables).prediction
        found[name] = own, said.step_s
    return found


def bandwidth_for(graph: Graph, machine: Cluster, takes: float) -> float:
    """At which an average takes so many steps without messages."""
    nbytes = graph.parameter_bytes
    ((_, step_s), *_) = predicted(graph, with_wire(machine, NO_WIRE)).values()
    return 2 * (RANKS - 1) / RANKS * nbytes / (takes * step_s)


@dataclass
class OwnTime:
    """Time that stands still while other jobs have their turn: what is under way waits, too."""

    ended: float = 0.0
    others: float = 0.0

    def begin(self) -> None:
        self.others += time.perf_counter() - self.ended

    def end(self) -> None:
        self.ended = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.others


@dataclass
class Turns:
    """Jobs that take turns, and how fast the machine is meanwhile."""

    jobs: dict[str, tuple[Any, SlowWire, "OwnTime"]]
    data: dict[str, Tensor]
    free_s: float
    """Predicted, of a step of the job without a wire."""
    load: float = 1.0
    """By how much longer its steps take."""

    def round(self) -> dict[str, tuple[float, float]]:
        """Of each case, seconds of a step and what of them was waited, of four steps."""
        found = {}
        for name, (job, wire, own) in self.jobs.items():
            wire.waited.clear()
            dist.barrier()  # who is done with its turn does not wait for the other in the next job
            own.begin()
            begun = own.now()
            for _ in range(EVERY):
                job.step(self.data)
            took = own.now() - begun
            own.end()
            found[name] = took / EVERY, sum(wire.waited) / EVERY
        slowest = torch.tensor(found[FREE][0] / self.free_s)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.load = float(slowest)
        return found


def timed(
    size: Size, graph: Graph, plans: Mapping[str, Plan], levels: Levels, free_s: float, rounds: int
) -> list[tuple[float, dict[str, tuple[float, float]]]]:
    """Round by round, the load for which the wire was made and what `Turns.round` says."""
    torch.set_num_threads(1)
    turns = Turns({}, batch(size), free_s)

    def seconds(what: What) -> float:
        return turns.load * collective_time(Primitive(what.primitive), what.nbytes, levels)

    with ExitStack() as stack:
        for name, plan in {FREE: next(iter(plans.values())), **plans}.items():
            job = compile_job(
                build(size), plan, optimizer="sgd", lr=1e-4, device="cpu", graph=graph, check=False
            )
            own = OwnTime()
            wire = SlowWire((lambda _: 0.0) if name == FREE else seconds, own.now)
            turns.jobs[name] = job, stack.enter_context(slowed(job, wire)), own
        turns.round()
        found = []
        for _ in range(rounds):
            load = turns.load
            found.append((load, turns.round()))
        for job, *_ in turns.jobs.values():
            job.close()
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--takes", type=float, nargs="+", default=[0.5, 1.5, 2.5])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    size = Size(given.width, given.layers, given.tokens)
    machine = measure_local(RANKS)
    graph = trace(build(size), batch(size))
    table = Table("takes", "plan", "step, ms", "predicted, ms", "exposed, ms", "predicted, ms")
    free = predicted(graph, with_wire(machine, NO_WIRE))
    loads = []
    for takes in given.takes:
        cluster = with_wire(machine, bandwidth_for(graph, machine, takes))
        said = predicted(graph, cluster)
        levels = CostTables(graph, cluster, "fp32").levels(tuple(range(RANKS)))
        plans = {name: plan for name, (plan, _) in said.items()}
        free_s = next(iter(free.values()))[1]
        args = size, graph, plans, levels, free_s, given.rounds
        rounds = list(zip(*run_ranks(RANKS, timed, *args, timeout_s=900), strict=True))
        loads += [load for (load, _), _ in rounds]
        for name, (_, step_s) in said.items():
            took = median([max(a[name][0], b[name][0]) for (_, a), (_, b) in rounds])
            waited = median([(a[name][1] + b[name][1]) / 2 for (_, a), (_, b) in rounds])
            load = median([load for (load, _), _ in rounds])
            cells = (took, load * step_s, waited, load * (step_s - free[name][1]))
            table.add_row(f"{takes:g}", name, *(f"{1e3 * x:.0f}" for x in cells))
    Console(width=110).print(table)
    print(f"load {min(loads):.2f} to {max(loads):.2f}, median {median(loads):.2f}")


if __name__ == "__main__":
    main()
