"""Jobs of one device against plain PyTorch on the same device, and against themselves."""

import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.runtime.checkpoint.export import full_state
from meshwright.testing.models import CASES
from meshwright.testing.plain import plain_step
from tests.gpu.devices import each_name, on_each
from tests.gpu.jobs import JOBS, RATE, JobCase, batches, job_of, model_of

BOUNDS = {"fp64": (1e-11, 1e-9), "fp32": (1e-5, 3e-3), "tf32": (3e-3, 5e-2), "bf16": (2e-3, 6e-2)}
"""Of the loss, relative, and of the way that parameters went, relative to its length. Where numbers
are rounded it is compared with what is not: plain PyTorch in float32."""


def plain(case: JobCase, device: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of plain PyTorch on the device, and parameters before and after."""
    model = model_of(case).to(device)
    start = {name: x.detach().clone() for name, x in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss_fn = CASES[case.model].loss_fn
    losses = [plain_step(model, loss_fn, optimizer, x) for x in batches(case, device)]
    return losses, start, {name: x.detach() for name, x in model.named_parameters()}


@dataclass(frozen=True)
class Apart:
    """How far a job is from plain PyTorch."""

    loss: float
    way: float
    worst: str
    checked: tuple[str, ...]
    device: str


def apart(name: str, device: str) -> Apart:
    """Trains both ways. The job is compared with PyTorch by itself, too, before it trains."""
    case = JOBS[name]
    losses, start, wanted = plain(case, device)
    job = job_of(case, device, check=True)
    where = {held.tensor.device.type for held in job.parts.held}
    found = [float(job.step(batch)) for batch in batches(case, device)]
    state = full_state(job)
    checked = job.checked
    assert checked is not None
    job.close()
    ways = {
        name: float((state[name].to(x) - x).norm() / (x - start[name]).norm())
        for name, x in wanted.items() if (x - start[name]).norm() > 1e-6 * x.norm()
    }  # fmt: skip
    assert len(ways) > len(wanted) / 2
    worst = max(ways, key=ways.__getitem__)
    loss = max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True))
    return Apart(loss, ways[worst], worst, checked.checked, "+".join(sorted(where)))


def again(name: str, device: str) -> float:
    """How far a job that goes on from a checkpoint is from the one that wrote it."""
    case = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        first = job_of(case, device, check=False)
        data = batches(case, device, 4)
        for batch in data[:2]:
            first.step(batch)
        first.save(folder)
        other = job_of(case, device, check=False)
        other.load(folder)
        losses = [[float(job.step(batch)) for batch in data[2:]] for job in (first, other)]
        states = [full_state(job) for job in (first, other)]
    far = max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])
    return max(far, *(abs(a - b) for a, b in zip(*losses, strict=True)))


AGAIN = ("gpt2 bf16", "gpt2 fp32", "on host")
"""Of these, checkpoints."""
LATER = "then from a checkpoint"
REHEARSED = (
    "gpt2 fp64",
    "gpt2 bf16 kernels",
    "recompute",
    "on host",
    "saved on host",
    "captured bf16",
)
"""On the CPU, where each takes seconds of one core, and most are tested elsewhere."""
NAMES = {
    "cpu": [*REHEARSED, f"{AGAIN[0]} {LATER}"],
    "cuda": [*JOBS, *(f"{name} {LATER}" for name in AGAIN)],
}


def _body(name: str, device: str) -> Any:
    if name.endswith(LATER):
        return again(name.removesuffix(LATER).strip(), device)
    return apart(name, device)


@cache
def _found(device: str) -> dict[str, Any]:
    """All at once: on a GPU the processes share it."""
    return on_each(device, _body, NAMES[device])


@pytest.mark.parametrize(("device", "name"), each_name(NAMES))
def test_a_job_trains_as_plain_pytorch_does(device: str, name: str) -> None:
    """Or, from a checkpoint, as the job that wrote it."""
    found = _found(device)[name]
    if name.endswith(LATER):
        assert found <= 1e-6
        return
    loss, way = BOUNDS[JOBS[name].precision]
    assert found.loss <= loss and found.way <= way, found
    assert any("one step of the plan" in text for text in found.checked), found
    on_host = "store" in JOBS[name].stage
    assert found.device == ("cpu" if on_host else device)
