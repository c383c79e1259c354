"""Tokens per second of `job.step` against DDP, FSDP2 and torch.distributed.pipelining.

The same model (the demo's GPT-2, untied), layout, processes and fused AdamW; steps are taken in
turn (ours, theirs, ours, ...), so that a drifting machine hits both, and all losses must be equal.
Printed are the medians of the ratios of pairs, theirs by ours: by the clock, and by the processor
time of all ranks together, which what else runs on the machine changes less; of these, the middle
half of the pairs, too. `--same` compares torch with itself: what is not 1 there is the machine's.

Ours has the kernels that a search puts in (`--kernels auto`, the default of `search`); with
`--kernels none` both run the same operators, and what is left is what each engine does around them.

    python -m benchmarks.vs_torch [--ranks 2 4] [--pairs 12] [--only DDP] [--same] [--device cuda]
        [--kernels auto]

The device is the GPU if this machine has one; there NCCL takes the place of Gloo.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.kernels import AUTO, kernels_for
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job

BATCH, SEQUENCE, MICROBATCHES, LR, LAYERS = 8, 64, 4, 1e-4, 8
ROUNDING = 1e-3
"""How far losses of the two may lie apart, as a share: steps of Adam magnify rounding."""
WARM = 2
"""Pairs that count nowhere: both make their states."""
Step = Callable[[Tensor], Tensor]
"""Takes a step on the whole batch; returns the loss, the same on every rank."""


def build() -> GPT2LMHeadModel:
    """The same weights every time."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=SEQUENCE, n_embd=320, n_layer=LAYERS, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


class StageOfGPT2(nn.Module):
    """An equal share of the layers of GPT-2, split by hand for torch's pipeline."""

    def __init__(self, model: GPT2LMHeadModel, stage: int, stages: int):
        super().__init__()
        per = LAYERS // stages
        self.blocks = nn.ModuleList(model.transformer.h[stage * per : (stage + 1) * per])
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.wte, self.wpe = model.transformer.wte, model.transformer.wpe
        if self.last:
            self.ln_f, self.head = model.transformer.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(self.ln_f(x)) if self.last else x


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As GPT2LMHeadModel has it."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1))


def torch_dp(device: torch.device, *, shard: bool) -> Step:
    """DDP, or FSDP2."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = build().to(device)
    if shard:
        mesh = init_device_mesh(device.type, (world,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    wrapped = model if shard else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(ids: Tensor) -> Tensor:
        local = ids.chunk(world)[rank]
        loss = wrapped(input_ids=local, labels=local).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        return mean

    return step


def torch_pipeline(device: torch.device) -> Step:
    """1F1B of torch.distributed.pipelining."""
    world, rank = dist.get_world_size(), dist.get_rank()
    module = StageOfGPT2(build(), rank, world).to(device)
    stage = PipelineStage(module, rank, world, device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=shifted_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def step(ids: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        elif rank == world - 1:
            schedule.step(target=ids, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        dist.all_reduce(mean)
        return mean

    return step


def ours(device: torch.device, *, kernels: str = AUTO, prefetch: int = 0, **choice: Any) -> Step:
    """A job under the plan of these meshes; parameters are gathered so many blocks ahead."""
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    cluster = Cluster.detect() if device.type == "cuda" else Cluster.local(dist.get_world_size())
    names, wins = kernels_for([cluster], kernels)
    graph = trace(build(), {"input_ids": ids, "labels": ids}, kernels=names, wins=wins)
    problem = make_problem(graph, cluster, precision="fp32", optimizer="adamw")
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    plan = replace(plan, stages=tuple(replace(s, prefetch=prefetch) for s in plan.stages))
    job = compile_job(
        build(), plan, graph=graph, optimizer="adamw", lr=LR, device=device, check=False
    )
    return lambda ids: job.step({"input_ids": ids, "labels": ids})


class Took(NamedTuple):
    """One step."""

    clock_s: float
    processor_s: float
    """Of all ranks together."""
    loss: float


def timed(step: Step, ids: Tensor) -> Took:
    """Every rank calls it; all have the same clock within a barrier."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    loss = step(ids)
    if ids.is_cuda:
        torch.cuda.synchronize()
    processor = torch.tensor(time.process_time() - busy, device=ids.device)
    dist.barrier()
    clock_s = time.perf_counter() - start
    dist.all_reduce(processor)
    return Took(clock_s, float(processor), float(loss.detach()))


def compare(name: str, mine: Step, theirs: Step, pairs: int, device: torch.device) -> None:
    """Prints a line on rank 0; ValueError if two losses differ."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(WARM + pairs):
        ids = torch.randint(0, 256, (BATCH, SEQUENCE), generator=generator).to(device)
        a, b = timed(mine, ids), timed(theirs, ids)
        if abs(a.loss - b.loss) > ROUNDING * abs(b.loss):
            raise ValueError(f"{name}, step {number}: our loss is {a.loss}, torch's {b.loss}")
        rows.append((a, b))
    del rows[:WARM]
    if dist.get_rank() == 0:
        print(line(name, dist.get_world_size(), rows), flush=True)


def line(name: str, ranks: int, rows: Sequence[tuple[Took, Took]]) -> str:
    """What is printed of an engine: pairs of our steps and its."""
    tokens = BATCH * SEQUENCE
    mine_s, theirs_s = (statistics.median(x.clock_s for x in c) for c in zip(*rows, strict=True))
    clock = statistics.median(b.clock_s / a.clock_s for a, b in rows)
    ratios = [b.processor_s / a.processor_s for a, b in rows]
    low, busy, high = statistics.quantiles(ratios * 2, n=4, method="inclusive")
    return (
        f"{ranks} ranks  {name:22s} meshwright {tokens / mine_s:7.0f} tokens/s"
        f"   torch {tokens / theirs_s:7.0f} tokens/s   ratio {clock:.3f}"
        f"   of processor time {busy:.3f} ({low:.3f} to {high:.3f})"
    )


def worker(pairs: int, kind: str, only: str, kernels: str, *, same: bool) -> None:
    """What each rank does. `same`: torch's engines stand in for ours."""
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    world = dist.get_world_size()
    each = LAYERS // world
    cuts = [1 + each * stage for stage in range(1, world)]  # block 0 is the embedding
    pipe = {"pp": world, "num_microbatches": MICROBATCHES, "cuts": cuts}
    engines: dict[str, tuple[dict[str, Any], Callable[[], Step]]] = {
        "DDP": ({"dp_replicate": world}, lambda: torch_dp(device, shard=False)),
        # FSDP2 gathers one block ahead, too.
        "FSDP2": (
            {"dp_shard": world, "zero": 3, "prefetch": 1},
            lambda: torch_dp(device, shard=True),
        ),
        "torch pipelining 1F1B": (pipe, lambda: torch_pipeline(device)),
    }
    for name, (choice, theirs) in engines.items():
        if only in name:
            mine = theirs() if same else ours(device, kernels=kernels, **choice)
            compare(name, mine, theirs(), pairs, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--only", default="", help="part of an engine's name")
    parser.add_argument("--same", action="store_true", help="torch against itself")
    parser.add_argument("--kernels", default=AUTO, help="of ours, as of `search`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options.pairs, options.device, options.only, options.kernels, same=options.same)
    else:
        for ranks in options.ranks:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(ranks), str(Path(__file__)), *sys.argv[1:]]
            if code := subprocess.run(launch).returncode:
                raise SystemExit(code)
