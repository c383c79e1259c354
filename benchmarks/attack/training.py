"""Training as the user wrote it: random optimizers, schedules and layouts.

Jobs train beside plain PyTorch, with the check of `compile`; it must catch those made wrong.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from benchmarks.attack.result import Result
from meshwright.forms.running import Held
from meshwright.ir.errors import CheckFailed, MeshwrightError
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.runtime.step import step_end
from meshwright.testing.nets import CHOICES, Net, data, plan_for
from meshwright.testing.spawn import run_ranks

CASES, STEPS, BOUND = 60, 5, 1e-8
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.02, weight_decay=0.3),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.02, amsgrad=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "decaying": lambda ps: torch.optim.SGD(ps, lr=0.05, weight_decay=0.4),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
}
SCHEDULERS: dict[str, Callable[..., Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.05, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
}
BREAKS = ("a gradient lost", "a gradient doubled", "a parameter not stepped")


class Setting:
    """One way to train."""

    def __init__(self, draw: random.Random) -> None:
        self.layout = draw.choice(list(CHOICES))
        self.optimizer, self.scheduler = (
            draw.choice(list(OPTIMIZERS)),
            draw.choice(list(SCHEDULERS)),
        )
        self.limit = draw.choice([None, 0.1])
        self.batches = draw.choice([1, 2])
        self.late = draw.random() < 0.5
        self.broken = draw.choice(BREAKS) if draw.random() < 0.3 else ""

    def __str__(self) -> str:
        clipped = "" if self.limit is None else ", clipped"
        wrong = f", {self.broken}" if self.broken else ""
        return f"{self.layout}, {self.optimizer}, {self.scheduler}, {self.batches}{clipped}{wrong}"


def attacks(size: int, seed: int) -> Iterator[Result]:
    """Each setting in two processes."""
    draw = random.Random(seed)
    for _ in range(max(1, CASES * size // 100)):
        setting, start = Setting(draw), time.perf_counter()
        plan = plan_for(Net, 2, **CHOICES[setting.layout])
        what, state = run_ranks(2, _by_job, plan, setting)[0]
        held = bool(what) == bool(setting.broken)
        if not what:
            off = run_ranks(1, _plain, setting, state)[0]
            held, what = held and off <= BOUND, f"off by {off:.1g}"
        yield Result(str(setting), held, what, time.perf_counter() - start)


def _plain(setting: Setting, found: dict[str, Tensor]) -> float:
    """How far plain training ends from the job."""
    model = Net()
    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    scheduler = SCHEDULERS[setting.scheduler](optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(setting.batches):
            (model(*data(2 * number + part)) / setting.batches).backward()
        if setting.limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), setting.limit)
        optimizer.step()
        scheduler.step()
    return max(float((p.detach() - found[n]).abs().max()) for n, p in model.named_parameters())


def _by_job(plan: Any, setting: Setting) -> tuple[str, dict[str, Tensor]]:
    """What compile says against it, and the weights in the end."""
    model = Net()
    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    scheduler = None if setting.late else SCHEDULERS[setting.scheduler](optimizer)
    try:
        with _broken(setting.broken):
            job = compile_job(
                model, plan, optimizer=optimizer, max_grad_norm=setting.limit, check=True,
                example_inputs=data(),
            )  # fmt: skip
    except CheckFailed as error:
        return str(error), {}
    except MeshwrightError as error:
        return f"refused: {error}", {}
    scheduler = scheduler or SCHEDULERS[setting.scheduler](optimizer)
    for number in range(STEPS):
        for part in range(setting.batches):
            job.accumulate(data(2 * number + part))
        job.apply(1 / setting.batches)
        scheduler.step()
    job.close(sync=True)
    return "", {name: p.detach() for name, p in model.named_parameters()}


def _broken(how: str) -> Any:
    """Makes what a job does wrong, on one rank."""
    if how == "a parameter not stepped":
        return patch.object(Job, "update", _forgetful(Job.update))
    factors = {"a gradient lost": 0.0, "a gradient doubled": 2.0}
    return patch.object(step_end, "sum_ties", _scaling(factors.get(how, 1.0)))


def _scaling(factor: float) -> Callable[..., None]:
    def change(ties: Any, held: tuple[Held, ...], groups: Any, rank: int) -> None:
        for h in held if rank == 1 else ():
            if h.tensor.grad is not None and h.tensor.numel():
                h.tensor.grad.mul_(factor)

    return change


def _forgetful(update: Callable[[Job], None]) -> Callable[[Job], None]:
    def forget(job: Job) -> None:
        held = next(h for h in job.parts.held if h.param.requires_grad and h.tensor.numel())
        before = held.tensor.detach().clone()
        update(job)
        held.tensor.data.copy_(before)

    return forget
