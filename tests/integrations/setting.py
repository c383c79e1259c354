"""A tiny model, its plan for two processes, and the weights after a plain job loop."""

from functools import cache
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import meshwright as mw
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem

BATCH, STEPS, LR = 4, 3, 1e-2


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=8, vocab_size=32,
                        bos_token_id=0, eos_token_id=0, use_cache=False, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(config).double()


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """As many samples as the steps need."""

    def __init__(self, count: int = BATCH * STEPS) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 32, (count, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def batches(count: int = STEPS) -> list[dict[str, torch.Tensor]]:
    tokens = Tokens(BATCH * count).tokens.split(BATCH)
    return [{"input_ids": part, "labels": part} for part in tokens]


@cache
def plan() -> Plan:
    """Two stages, one process each."""
    tokens = torch.zeros(BATCH, 8, dtype=torch.int64)
    graph = mw.trace(model(), {"input_ids": tokens, "labels": tokens})
    problem = make_problem(graph, mw.Cluster.local(2), precision="fp64")
    return build_plan(problem, uniform_choice(problem, pp=2, num_microbatches=2))


def weights_of(job: mw.Job) -> dict[str, list[float]]:
    """What this rank's optimizer holds."""
    return {
        f"{h.param.fqn}/{h.stage}": h.tensor.detach().double().flatten().tolist()
        for h in job.parts.held
    }


def plain_loop(
    accumulate: int = 1, max_grad_norm: float | None = None, same: bool = False
) -> dict[str, Any]:
    """Losses and weights of the loop that the README shows, with a schedule. `same`: the first
    batch in every step."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    job = mw.compile(net, plan(), optimizer=optimizer, max_grad_norm=max_grad_norm, device="cpu")
    schedule = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda step: 1 - step / 8)
    losses = []
    read = batches(1) * STEPS if same else batches(STEPS * accumulate)
    for index, batch in enumerate(read, start=1):
        losses.append(float(job.accumulate(batch)))
        if index % accumulate == 0:
            job.apply(1 / accumulate)
            schedule.step()
    found = {"losses": losses, "weights": weights_of(job)}
    job.close()
    return found
