"""Optimizer steps of our kernel are torch's, over several steps; and what it has no step for."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir import launch
from meshwright.ir.errors import PlanError
from meshwright.ir.kernels import bucket_update
from meshwright.runtime.step.updates import FormOptimizer, stepped_by_kernel

SHAPES = ((7, 5), (1,), (), (3, 700), (0, 6), (1025,), (48, 64))
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.2, "betas": (0.5, 0.7), "eps": 1e-3}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
]
DTYPES = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}


def difference(index: int, dtype: torch.dtype, exact: torch.dtype = torch.float64) -> float:
    """Of three steps, in which one tensor has no gradient at first, from torch's in float64. Every
    other tensor's new values are to lie where its gradient lay, as they are."""
    torch.manual_seed(index)
    kind, settings = OPTIMIZERS[index]
    start = [torch.randn(shape).to(dtype) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(x.to(t, copy=True)) for x in start] for t in (dtype, exact))
    made = stepped_by_kernel(kind(ours, **settings))
    wanted = kind(theirs, **settings, foreach=False)
    assert isinstance(made, FormOptimizer)
    made.over = frozenset(id(p) for p in ours[::2])
    worst = 0.0
    for step in range(3):
        factor = (1.0, 0.25, 3.0)[step]
        made.factor = torch.tensor(factor, dtype=torch.float64)
        for number, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            gradient = torch.randn(p.shape).to(dtype)
            absent = number == 3 and step == 0
            p.grad = None if absent else gradient
            q.grad = None if absent else gradient.to(exact) * factor
        before = [None if p.grad is None else p.grad.clone() for p in ours]
        made.step()
        wanted.step()
        for p, gradient in zip(ours, before, strict=True):
            if p.grad is not None and gradient is not None:
                lies = p.detach() if id(p) in made.over else gradient
                worst = max(worst, 0.0 if torch.equal(p.grad, lies) else float("inf"))
        for p, q in zip(ours, theirs, strict=True):
            worst = max(worst, _far(p.detach(), q.detach()))
            # What is rounded when it is kept is where the next step goes on from.
            q.data.copy_(p.data)
            for key, value in wanted.state[q].items():
                worst = max(worst, _far(made.state[p][key], value) / 10)
                value.copy_(made.state[p][key])
    return worst


def _far(found: Tensor, wanted: Tensor) -> float:
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    far = (found.double() - wanted.double()).abs().max().item() / scale if found.numel() else 0.0
    return far if far == far else float("inf")


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)))
def test_by_torch(index):
    for dtype, bound in DTYPES.items():
        assert difference(index, getattr(torch, dtype)) <= bound


def test_by_triton():
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.codegen.kernels.test_bucket_update"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    taken, found = json.loads(ran.stdout)
    assert taken["triton"] and not taken["torch"] and len(found) == 3
    for dtype, errors in found.items():
        assert len(errors) == len(OPTIMIZERS) and max(errors) <= DTYPES[dtype], (dtype, errors)


def test_torchs_state_and_settings_are_kept():
    p = nn.Parameter(torch.ones(3))
    made = stepped_by_kernel(torch.optim.AdamW([{"params": [p], "lr": 0.5}], weight_decay=0.1))
    assert isinstance(made, torch.optim.AdamW)
    assert made.param_groups[0]["lr"] == 0.5 and made.defaults["weight_decay"] == 0.1
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.1)
    p.grad = torch.ones(3)
    made.step()
    scheduler.step()
    assert made.param_groups[0]["lr"] == pytest.approx(0.05)
    assert made.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), "which has no amsgrad: Adam is given"),
        (lambda p: torch.optim.RMSprop(p), "which steps Adam, AdamW, SGD, not RMSprop"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "which has no differentiable"),
    ],
)
def test_what_it_has_no_step_for(made, why):
    with pytest.raises(PlanError, match=why):
        stepped_by_kernel(made([nn.Parameter(torch.ones(3))]))


def test_torch_sees_through_it():
    p, g, m, v = (torch.rand(5) for _ in range(4))
    rows = bucket_update.table([5])
    numbers = bucket_update.adam_numbers(1, 0.1, (0.9, 0.99), 1e-8, 0.0, False, 1.0)
    given = ([p], [g], [m], [v], rows, numbers, torch.ones(()))
    torch.library.opcheck(bucket_update.adam_update, given)
    numbers = bucket_update.sgd_numbers(True, 0.1, 0.9, 0.0, 0.0, False, 1.0)
    given = ([p], [g], [m], rows, numbers, torch.ones(()))
    torch.library.opcheck(bucket_update.sgd_update, given)


def main() -> None:
    """Prints which ways were taken and how far each case is off, as JSON."""
    found = {
        dtype: [difference(i, getattr(torch, dtype)) for i in range(len(OPTIMIZERS))]
        for dtype in ("float64", "float32", "bfloat16")
    }
    whys = [(why, n) for (kernel, why), n in launch.TAKEN.items() if kernel == "bucket_update"]
    taken = {"triton": sum(n for why, n in whys if not why), "torch": sum(n for w, n in whys if w)}
    print(json.dumps([taken, found]))


if __name__ == "__main__":
    main()
