"""Lets a job take a step that leaves no trace in it."""

import copy
import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.ir.heap import give_back_freed_memory, kept_apart
from meshwright.runtime.step.planned_updates import members_of

if TYPE_CHECKING:
    from meshwright.runtime.job.job import Job


@contextmanager
def undisturbed(job: "Job") -> Iterator[None]:
    """Inside, random ops give constants, precision is that of the parameters, and nothing is
    recorded. Afterwards tensors, optimizer, and counters are as they were."""
    tensors = [(x, x.detach().clone()) for x in _tensors(job)]
    optimizer = _Optimizer(job)
    stages = [(stage, stage.autocast) for stage in job.parts.stages.values()]
    states = [copy.deepcopy(dict(stage.sync.state())) for stage, _ in stages]
    policy, job.on_nonfinite = job.on_nonfinite, "ignore"
    scale, job.loss_scale = job.loss_scale, None
    for stage, _ in stages:
        stage.comm.still, stage.autocast = True, None
        stage.forget_recordings()
    try:
        with job.recorder.paused():
            yield
            job.parts.settle()
    finally:
        for (stage, autocast), state in zip(stages, states, strict=True):
            stage.sync.begin()
            stage.sync.load(state)
            stage.comm.still, stage.autocast = False, autocast
            stage.forget_recordings()
        with torch.no_grad():
            for x, kept in tensors:
                if x.shape == kept.shape:
                    x.data.copy_(kept)
                else:  # of a table, of which a form has other rows now
                    x.data = kept
            for stage, _ in stages:  # copies that nobody sees, as on the host, too
                stage.sync.written()
        job.parts.settle()
        optimizer.restore()
        for x in (*_tensors(job), *_read(job)):
            x.grad = None
        job.on_nonfinite, job.loss_scale = policy, scale
        _start_again(job)


def _start_again(job: "Job") -> None:
    job.state.step, job.grad_norm, job.accumulated = 0, None, 0
    job.state.samples = 0
    for stage in job.parts.stages.values():
        stage.comm.step = stage.comm.microbatch = stage.comm.sample_offset = 0
    job.progress.at(0, "start", "idle")
    job.records.forget()


def give_back(job: "Job") -> None:
    """Gives memory back that only the check took, once nothing of it is held any more; the job's
    peak counts from here."""
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(job.device)
    else:
        give_back_freed_memory()
    job.residence.started()


def _read(job: "Job") -> list[Tensor]:
    """What blocks read, also what has no memory between uses."""
    return [x for tensors in job.parts.tensors.values() for x in tensors.values()]


def _tensors(job: "Job") -> list[Tensor]:
    """All that a step may change, each once."""
    held: list[Tensor] = [h.tensor for h in job.parts.held]
    read = [x for x in _read(job) if x.untyped_storage().nbytes() or not x.numel()]
    return list({id(x): x for x in (*read, *held)}.values())


class _Optimizer:
    """What an optimizer holds besides parameters."""

    def __init__(self, job: "Job") -> None:
        self._optimizer = optimizer = job.optimizer
        self._memo: dict[int, Any] = {id(optimizer): optimizer}
        # States and groups of members are the job's own, which come back as they were.
        self._memo |= {id(member): member for member in members_of(optimizer)}
        self._memo |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self._kept = self._copy(vars(optimizer))

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value, dict(self._memo))

    def restore(self) -> None:
        now, kept = vars(self._optimizer), self._kept
        state, groups = now["state"], now["param_groups"]
        state.clear()
        state.update(kept.pop("state"))
        for group, before in zip(groups, kept.pop("param_groups"), strict=True):
            group.clear()
            group.update(before)
        now.clear()
        now.update(kept, state=state, param_groups=groups)


@contextmanager
def own_memory(device: torch.device) -> Iterator[None]:
    """What is made inside leaves no holes in the heap of a job that trains here."""
    with kept_apart() if device.type == "cpu" else nullcontext():
        yield


@contextmanager
def same_draws(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again afterwards, from all generators that a process has."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(drawn)
