"""Tokens per second of `job.step` against DDP, FSDP2 and torch.distributed.pipelining.

Same model (the demo's GPT-2, untied), same layout, same processes, steps taken in turn
(ours, theirs, ours, ...), so that a drifting machine hits both. Prints the median ratio of pairs.

    python benchmarks/vs_torch.py [--ranks 2] [--pairs 12]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.search.search import search
from meshwright.runtime.job.compile import compile as compile_job

BATCH, SEQUENCE, MICROBATCHES, LR = 8, 256, 4, 1e-4


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=SEQUENCE, n_embd=320, n_layer=8, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


class Half(nn.Module):
    """Half of the GPT-2, split by hand for torch's pipeline."""

    def __init__(self, model: GPT2LMHeadModel, stage: int, stages: int):
        super().__init__()
        per = len(model.transformer.h) // stages
        self.blocks = nn.ModuleList(model.transformer.h[stage * per : (stage + 1) * per])
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.wte, self.wpe = model.transformer.wte, model.transformer.wpe
        if self.last:
            self.ln_f, self.head = model.transformer.ln_f, model.lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(self.ln_f(x)) if self.last else x


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1))


def torch_dp(world: int, rank: int, *, shard: bool):
    model = build()
    if shard:
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    wrapped = model if shard else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(ids: torch.Tensor) -> None:
        local = ids.chunk(world)[rank]
        wrapped(input_ids=local, labels=local).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_pipeline(world: int, rank: int):
    module = Half(build(), rank, world)
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=shifted_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)

    def step(ids: torch.Tensor) -> None:
        if rank == 0:
            schedule.step(ids)
        elif rank == world - 1:
            schedule.step(target=ids, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(world: int, constraints: tuple[str, ...]):
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    plan = search(
        build(), Cluster.local(world), global_batch_size=BATCH, precision="fp32",
        example_inputs={"input_ids": ids, "labels": ids}, constraints=constraints, progress=False,
    )  # fmt: skip
    job = compile_job(build(), plan, optimizer="adamw", lr=LR)

    def step(ids: torch.Tensor) -> None:
        job.step({"input_ids": ids, "labels": ids})

    return step


def seconds(step, ids: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    step(ids)
    dist.barrier()
    return time.perf_counter() - start


def compare(name: str, mine, theirs, pairs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (BATCH, SEQUENCE), generator=generator)
    for _ in range(2):
        seconds(mine, ids), seconds(theirs, ids)
    rows = [(seconds(mine, ids), seconds(theirs, ids)) for _ in range(pairs)]
    if dist.get_rank() == 0:
        mine_s, theirs_s = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(b / a for a, b in rows)
        tokens = BATCH * SEQUENCE
        print(
            f"{name:22s} meshwright {tokens / mine_s:7.0f} tokens/s   "
            f"torch {tokens / theirs_s:7.0f} tokens/s   ratio {ratio:.3f}",
            flush=True,
        )


def worker(pairs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    pins = ("tp=1", "recompute=none")
    dp = (*pins, "pp=1", "num_microbatches=1")
    ddp = (*dp, f"dp_replicate={world}", "dp_shard=1", "zero=0")
    fsdp = (*dp, f"dp_shard={world}", "zero=3")
    pipe = (*pins, f"pp={world}", f"num_microbatches={MICROBATCHES}", "schedule=one_f_one_b")
    compare("DDP", ours(world, ddp), torch_dp(world, rank, shard=False), pairs)
    compare("FSDP2", ours(world, fsdp), torch_dp(world, rank, shard=True), pairs)
    compare("torch pipelining 1F1B", ours(world, pipe), torch_pipeline(world, rank), pairs)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12)
    options = parser.parse_args()
    if "RANK" in os.environ:
        worker(options.pairs)
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(options.ranks), str(Path(__file__)), *sys.argv[1:]]
        raise SystemExit(subprocess.run(launch).returncode)
