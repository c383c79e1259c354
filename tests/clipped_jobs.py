"""Jobs with clipped gradients that check themselves, save and go on under another plan."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.testing.equality import LEARNING_RATE
from meshwright.testing.models import ModelCase
from meshwright.testing.spawn import alone, run_ranks

CLIPPED = 0.05
"""Well below the norm of the first steps' gradients."""
Trained = tuple[list[float], dict[str, Tensor]]


def plain(model: nn.Module, batches: list[Any]) -> Trained:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        assert norm > 2 * CLIPPED
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Jobs:
    """What all jobs are given."""

    model: nn.Module
    graph: Graph
    batches: list[Any]
    folder: str

    def job(self, plan: Plan, *, check: bool) -> Job:
        return compile_job(
            copy.deepcopy(self.model), plan, optimizer="adam", lr=LEARNING_RATE, graph=self.graph,
            max_grad_norm=CLIPPED, check=check,
        )  # fmt: skip


def go_on(jobs: Jobs, plans: dict[str, Plan]) -> dict[str, Trained]:
    """Two steps under each plan, which checks itself, then one under the next, by a checkpoint, in
    which ranks are given their own samples alone."""
    found, names = {}, list(plans)
    for name, following in zip(names, (*names[1:], names[0]), strict=True):
        job = jobs.job(plans[name], check=True)
        assert job.checked and "update" in str(job.checked), f"{name}: {job.checked}"
        losses = [float(job.step(batch)) for batch in jobs.batches[:2]]
        job.save(f"{jobs.folder}/{name}")
        job.close()
        job = jobs.job(plans[following], check=False)
        job.load(f"{jobs.folder}/{name}")
        losses += [float(job.step(job.shard(x), sharded=True)) for x in jobs.batches[2:]]
        found[name] = losses, full_state(job)
        job.close()
    return found


def check_each_goes_on(case: ModelCase, plans: dict[str, Plan], graph: Graph, folder: Path) -> None:
    """Asserts that each plan, and then the next, trains as one process does."""
    batches = [case.batch(8, torch.Generator().manual_seed(i)) for i in range(3)]
    wanted_losses, wanted = alone(plain, case.model(), batches)
    jobs = Jobs(case.model(), graph, batches, str(folder))
    (world,) = {plan.world_size for plan in plans.values()}
    for name, (losses, state) in run_ranks(world, go_on, jobs, plans)[0].items():
        assert losses == pytest.approx(wanted_losses, rel=1e-9), name
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-9, msg=f"{name} {key}")
