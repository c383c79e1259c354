"""A GPU is never waited for within a step, as torch's own detector sees it, and losses are the same
whether a loop reads each of them or looks at all in the end."""

from typing import Any

import pytest
import torch

from tests.gpu.devices import DEVICES, on_each
from tests.gpu.jobs import JOBS, batches, job_of

NAMES = ["gpt2 fp32", "gpt2 bf16", "gpt2 bf16 kernels", "llama fp32 kernels", "recompute bf16"]
WARM, STEPS = 2, 4
"""Steps that make the optimizer's state, compile kernels and allocate pinned memory come first."""


def _both(name: str, device: str) -> tuple[list[float], list[float]]:
    """Losses that were read at the end, of steps that wait for nothing, and one by one."""
    with torch.device("cpu"):  # as a user's process has it
        case = JOBS[name]
        data: list[Any] = batches(case, "cpu", WARM + STEPS)
        first, late = job_of(case, device, check=False, max_grad_norm=1.0), []
        try:
            for number, x in enumerate(data):
                if number == WARM and device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                late.append(first.step(x, next_batch=data[(number + 1) % len(data)]))
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        other = job_of(case, device, check=False, max_grad_norm=1.0)
        return [float(x) for x in late], [float(other.step(x)) for x in data]


@pytest.mark.parametrize("device", DEVICES)
def test_steps_wait_for_nothing(device: str) -> None:
    for name, (late, read) in on_each(device, _both, NAMES).items():
        assert late == pytest.approx(read, rel=1e-5), name


def _refilled(name: str, device: str) -> tuple[list[float], list[float]]:
    """Losses of a loop that writes each batch over the one before, and of batches of their own."""
    with torch.device("cpu"):
        case = JOBS[name]
        data: list[Any] = batches(case, "cpu", STEPS)
        own = {key: x.clone() for key, x in data[0].items()}
        own = {key: x.pin_memory() for key, x in own.items()} if device == "cuda" else own
        first, late = job_of(case, device, check=False), []
        for batch in data:
            for key, x in batch.items():
                own[key].copy_(x)
            late.append(first.step(own))
        for x in own.values():
            x.zero_()
        other = job_of(case, device, check=False)
        return [float(x) for x in late], [float(other.step(x)) for x in data]


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_may_be_written_over_once_its_step_is_sent_off(device: str) -> None:
    ((late, read),) = on_each(device, _refilled, ["gpt2 fp32"]).values()
    assert late == pytest.approx(read, rel=1e-5)
