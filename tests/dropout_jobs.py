"""Jobs with dropout."""

from dataclasses import replace
from functools import cache

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.exact import exact


def build():
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, use_cache=False,
        resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return exact(GPT2LMHeadModel(config).double().train())


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@cache
def graph():
    return trace(build(), batch(0))


def plan_for(world: int, overlap="none", **choice):
    problem = make_problem(graph(), Cluster.local(world), precision="fp64", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, **choice), predict=False)
    return replace(plan, stages=tuple(replace(s, overlap=overlap) for s in plan.stages))


def losses(plan, seed: int) -> list[float]:
    job = compile_job(build(), plan, graph=graph(), optimizer="sgd", lr=0.1, seed=seed)
    found = [float(job.step(batch(i))) for i in range(3)]
    job.close()
    return found


@cache
def alone(seed: int = 0) -> list[float]:
    return losses(plan_for(1), seed)
