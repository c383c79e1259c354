"""Jobs whose gathers go under the next forward, and the same in one process."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.testing.nets import graph_of

WORDS, WIDTH, BATCH = 11, 7, 8


class Words(nn.Module):
    """Sizes that four ranks cannot share evenly; a tied table, a scalar, layers that are frozen,
    that the loss does not reach, and that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.skipped = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = h + layer(h)
        h = self.frozen(h) * self.scale + self.skipped(h).detach()
        return nn.functional.cross_entropy((h @ self.table.weight.T).flatten(0, 1), y.flatten())


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(WORDS, (BATCH, 3), generator=generator) for _ in range(2))
    return x, y


def dear(plan: Plan, **settings: int) -> Plan:
    sync = FormChoice(form="dear", settings=settings)
    stages = tuple(replace(stage, sync=sync) for stage in plan.stages)
    return rehash(replace(plan, stages=stages))


def scheduled(model: nn.Module) -> tuple[Any, Any]:
    """An optimizer whose learning rate is another in every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


LIMIT = 0.4
"""Of the norm of gradients: most steps are clipped."""


def plain(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = Words()
    optimizer, scheduler = scheduled(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        parts = (2 * step, 2 * step + 1) if step % 3 == 2 else (2 * step,)
        for seed in parts:
            loss = model(*data(seed))
            (loss / len(parts)).backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        scheduler.step()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def take(job: Job, scheduler: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        if step % 3 == 2:
            losses += [float(job.accumulate(data(2 * step + i))) for i in range(2)]
            job.apply(0.5)
        else:
            losses.append(float(job.step(data(2 * step))))
        scheduler.step()
    return losses


def made(plan: Plan, **more: Any) -> tuple[Job, Any]:
    model = Words()
    optimizer, scheduler = scheduled(model)
    job = compile_job(
        model, plan, optimizer=optimizer, device="cpu", max_grad_norm=LIMIT, example_inputs=data(0),
        graph=graph_of(plan), **more,
    )  # fmt: skip
    return job, scheduler


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert len(found) >= 13
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12, msg=name)
