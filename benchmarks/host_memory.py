"""The largest model and the largest batch on one device, with parameters and optimizer on the host.

python -m benchmarks.host_memory sizes [--device v100-32]
python -m benchmarks.host_memory batches [--device v100-32] [--models "GPT-2 large"]
python -m benchmarks.host_memory run [--rounds 20] [--link 300MB/s] [--memory 60MB]

`sizes`: by prediction, the largest GPT-2 of a ladder of shapes that fits a GPU at 8 sequences of
1,024 tokens, and what a step takes. `batches`: the largest batch without micro-batches of known
shapes. `run`: on this machine one process with so much memory for tensors (its arena: the bytes of
live tensors are counted), over a link to the host that is made as slow as said; the largest number
of layers and the largest batch that a search finds a plan for are trained, and their memory and
steps are set beside the prediction. Jobs take turns of some steps, round by round. `at most`: the
bytes of tensors where copies to the host end as late as the job lets them, which must fit. `least`:
the shortest step; `busy`: processor time of the thread that trains, in the median step.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.forms.host_link import shaped
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import HostShare, parse_quantity
from meshwright.ir.errors import Infeasible
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.by_stage import layers
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.finish import changed
from meshwright.planner.search.search import search_problem
from meshwright.profiling.measure_local import measure_local
from meshwright.runtime.job.compile import compile as compile_job

STORES = {"device alone": "zero", "update on the host": "update_on_host",
          "gradients summed there": "sums_on_host",
          "parameters on the host too": "on_host"}  # fmt: skip
SHAPES = ((12, 768), (24, 1024), (36, 1280), (48, 1600), (32, 2560), (32, 3072), (32, 3584),
          (32, 4096), (36, 4608), (40, 5120), (44, 5632), (44, 6144), (48, 7168), (56, 8192),
          (64, 9216))  # fmt: skip
"""Layers and width."""
KNOWN = {
    "GPT-2 small": (12, 768), "GPT-2 medium": (24, 1024), "GPT-2 large": (36, 1280),
    "GPT-2 XL": (48, 1600),
}  # fmt: skip
SEQUENCES, TOKENS = 8, 1024
PRECISION = "fp16"
"""A V100 has tensor cores for it, and the published runs have it."""
STEPS = 3
"""That are counted of a turn on this machine."""
KEEPS = ("recompute=none", "saved=none")


def gpt2(layers: int, width: int, tokens: int, vocabulary: int = 50257) -> nn.Module:
    """Makes a GPT-2 on the device that is the default one."""
    config: Any = GPT2Config(
        vocab_size=vocabulary, n_positions=tokens, n_embd=width, n_layer=layers,
        n_head=max(1, width // 64), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def batch_of(sequences: int, tokens: int, vocabulary: int = 50257) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (sequences, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@cache
def traced(layers: int, width: int, sequences: int) -> Graph:
    """Without memory for the model."""
    with torch.device("meta"):
        model = gpt2(layers, width, TOKENS)
    return trace(model, batch_of(sequences, TOKENS), precision=PRECISION)


def found(graph: Graph, cluster: Cluster, store: str, **more: Any) -> Plan | None:
    """The fastest plan with a store; None if nothing fits."""
    pins = (f"store={store}", *more.pop("constraints", ()))
    problem = make_problem(graph, cluster, constraints=pins, **more)
    try:
        return search_problem(problem, time_limit_s=60)
    except Infeasible:
        return None


def largest(fits: Callable[[int], Any], most: int) -> tuple[int, Any]:
    """The largest number for which there is something, and that; what fits at one is taken to fit
    at smaller ones."""
    low, high, best = 0, most + 1, None
    step = 1
    while low + step <= most and (got := fits(low + step)) is not None:
        low, best, step = low + step, got, 2 * step
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        got = fits(middle)
        low, best, high = (middle, got, high) if got is not None else (low, best, middle)
    return low, best


def sizes(device: str) -> Table:
    """The largest shape, store by store."""
    cluster = Cluster.preset(device, devices_per_node=1)
    table = _table("kept", "largest", "parameters, 10^9", "beside the device alone",
                   "device, GB", "host, GB", "step, s", "TFLOP/s")  # fmt: skip
    alone = 0.0
    for name, store in STORES.items():
        number, plan = largest(
            lambda n, store=store: found(  # type: ignore[misc]
                traced(*SHAPES[n - 1], SEQUENCES), cluster, store, precision=PRECISION
            ),
            len(SHAPES),
        )
        assert plan is not None and plan.predicted is not None
        layers, width = SHAPES[number - 1]
        count, memory = plan.model.num_parameters, plan.predicted.stages[0].memory
        alone = alone or count
        flops = 6.0 * count * SEQUENCES * TOKENS / plan.predicted.step_s
        table.add_row(
            name, f"{layers} x {width}", f"{count / 1e9:.2f}", f"{count / alone:.1f}",
            f"{memory.used_bytes / 1e9:.1f}", f"{memory.host_bytes / 1e9:.1f}",
            f"{plan.predicted.step_s:.2f}", f"{flops / 1e12:.1f}",
        )  # fmt: skip
    return table


def batches(device: str, models: Sequence[str]) -> Table:
    """The largest batch in one piece, store by store: where blocks keep what their backward needs,
    and where each runs again. A plan's bytes grow with the batch by the same amount a sequence, but
    for small steps of what is worked with: so two small batches, on a device that has room, say
    about where it ends, and the batches beside that are planned."""
    cluster = Cluster.preset(device, devices_per_node=1)
    limit = cluster.device_types[0].usable_bytes
    table = _table("model", "kept", "batch, all kept", "ratio", "batch, all made again", "ratio",
                   "step, s", "sequences/s")  # fmt: skip
    for model in models:
        first: list[int] = []
        for name, store in STORES.items():
            cells: list[str] = []
            plan = None
            for place, again in enumerate((False, True)):
                number, plan = _last(
                    lambda n, again=again, store=store, shape=KNOWN[model]: _planned(  # type: ignore[misc]
                        traced(*shape, n), cluster, store, again=again
                    ),
                    limit,
                )
                first += [number] if len(first) <= place else []
                cells += [str(number), f"{number / first[place]:.2f}" if first[place] else "-"]
            step_s = plan.predicted.step_s if plan is not None and plan.predicted else 0.0
            rate = f"{number / step_s:.1f}" if step_s else "-"
            table.add_row(model, name, *cells, f"{step_s:.2f}", rate)
            print(model, name, *cells, f"{step_s:.2f}", rate, sep=" | ", flush=True)
        traced.cache_clear()
    return table


def _planned(graph: Graph, cluster: Cluster, store: str, *, again: bool) -> Plan:
    """One micro-batch on one device that has room for all; `again`: each layer runs twice."""
    (kind,) = cluster.device_types
    roomy = replace(cluster, device_types=(replace(kind, memory_bytes=2**44),))
    pins = (f"store={store}", "num_microbatches=1", *KEEPS)
    problem = make_problem(graph, roomy, constraints=pins, precision=PRECISION)
    plan = search_problem(problem, time_limit_s=60)
    if not again:
        return plan
    (stage,) = plan.stages
    return changed(
        problem,
        plan,
        stages=(replace(stage, recompute=dict.fromkeys(layers(plan, graph, 0), "full")),),
    )


def _last(plan_of: Callable[[int], Plan], limit: int) -> tuple[int, Plan | None]:
    """The largest batch whose plan takes no more than `limit`, and that; 0 if one is too large."""

    plan_at = cache(plan_of)

    def used(n: int) -> int:
        predicted = plan_at(n).predicted
        assert predicted is not None
        return predicted.stages[0].memory.used_bytes

    low, high = used(2), used(6)
    n = max(1, 2 + int(4 * (limit - low) / (high - low)))
    while n and used(n) > limit:
        n -= 1
    while used(n + 1) <= limit:
        n += 1
    return n, plan_at(n) if n else None


class _Turn:
    """A job on this machine."""

    def __init__(self, name: str, model: nn.Module, plan: Plan, sequences: int) -> None:
        self.name, self.plan, self.sequences = name, plan, sequences
        self.batch = batch_of(sequences, 64, 512)
        self.job = compile_job(
            model, plan, optimizer="adamw", device="cpu", check=False,
            example_inputs=self.batch,
        )  # fmt: skip
        self.seconds: list[float] = []
        self.busy_s: list[float] = []
        for _ in range(2):
            self.job.step(self.batch)
        self.job.track_memory(self.batch)
        assert self.job.tensor_memory is not None
        self.bytes = self.job.tensor_memory.peak_bytes

    def step(self) -> None:
        """A turn: steps one after another, as in training, where values that come back from the
        host do so under the next forward. The first one has none before it and is not counted."""
        for number in range(1 + STEPS):
            begun, busy = time.perf_counter(), time.thread_time()
            self.job.step(self.batch)
            if number:
                self.seconds.append(time.perf_counter() - begun)
                self.busy_s.append(time.thread_time() - busy)
        self.job.settle()


def run(rounds: int, link: float, memory_bytes: int) -> Table:
    """Largest depth and largest batch on this machine, store by store."""
    torch.set_num_threads(1)
    (device,) = measure_local(1).device_types
    share = HostShare(
        memory_bytes=2**36, link_bytes_per_s=link, reference="shaped",
        update_bytes_per_s=device.memory_bandwidth_bytes_per_s,
    )  # fmt: skip
    limited = replace(device, host=share, memory_bytes=max(memory_bytes, 2**26))
    cluster = replace(Cluster.local(1), device_types=(limited,))
    cap = (f"memory<={memory_bytes}B", "num_microbatches=1")

    def plan_of(model: nn.Module, sequences: int, store: str) -> Plan | None:
        graph = trace(model, batch_of(sequences, 64, 512))
        return found(graph, cluster, store, precision="fp32", constraints=cap)

    turns = []
    with shaped(link):
        for name, store in STORES.items():
            for what in ("layers", "sequences"):
                number, plan = largest(
                    lambda n, what=what, store=store: plan_of(  # type: ignore[misc]
                        *((_small(n), 4) if what == "layers" else (_small(2), n)), store
                    ),
                    64,
                )
                if plan is None:
                    print(f"{name}: nothing fits ({what})")
                    continue
                depth, count = (number, 4) if what == "layers" else (2, number)
                turns.append(_Turn(f"{name}: {number} {what}", _small(depth), plan, count))
        for _ in range(rounds):
            for turn in turns:
                turn.step()
    table = _table("kept: largest", "tensors, MB", "predicted, MB", "at most", "step, ms",
                   "least", "busy", "predicted, ms", "copies unhidden and update, predicted, ms",
                   "made again or moved")  # fmt: skip
    for turn in turns:
        predicted = turn.plan.predicted
        assert predicted is not None and predicted.breakdown is not None
        memory = predicted.stages[0].memory
        told = predicted.breakdown
        beside = told.gradients_s + told.gather_s + told.offload_s + told.optimizer_s
        table.add_row(
            turn.name, f"{turn.bytes / 1e6:.1f}",
            f"{memory.tensor_bytes / 1e6:.1f} ({memory.tensor_bytes / turn.bytes - 1:+.2%})",
            f"{(memory.tensor_bytes + memory.late_copies_bytes) / 1e6:.1f}",
            f"{1e3 * median(turn.seconds):.0f}", f"{1e3 * min(turn.seconds):.0f}",
            f"{1e3 * median(turn.busy_s):.0f}", f"{1e3 * predicted.step_s:.0f}",
            f"{1e3 * beside:.0f}", str(_lighter(turn.plan)),
        )  # fmt: skip
    return table


def _lighter(plan: Plan) -> int:
    """Blocks that make something again, or move it."""
    (stage,) = plan.stages
    return len(stage.recompute) + len(stage.saved)


def _small(layers: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return gpt2(layers, 256, 64, 512)


def _table(*columns: str) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sizes", "batches", "run"))
    parser.add_argument("--device", default="v100-32")
    parser.add_argument("--models", nargs="+", default=list(KNOWN), choices=list(KNOWN))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--link", default="300MB/s")
    parser.add_argument("--memory", default="60MB")
    given = parser.parse_args()
    if given.what == "run":
        link, memory = parse_quantity(given.link, "rate"), parse_quantity(given.memory, "bytes")
        assert isinstance(link, float) and isinstance(memory, int)
        table = run(given.rounds, link, memory)
    else:
        table = (
            sizes(given.device) if given.what == "sizes" else batches(given.device, given.models)
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
