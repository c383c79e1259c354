"""Cases of optimizer steps by our kernel, and how far they are from torch's."""

import json
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.ir import launch
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
