"""One step under torch's profiler: the host's part, kernels, gaps between them, waits."""

import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.claim import Claim, banded, fact, fixed
from benchmarks.gpu.recipe import Recipe
from benchmarks.gpu.step import Fact, Place, Step

if TYPE_CHECKING:
    from benchmarks.gpu.workloads import Batch
    from meshwright.runtime.job.job import Job

WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of the driver by which the host waits."""
_OPERATORS = ("aten::", "meshwright::")
_LISTED = 12
"""Operators that are listed, those first that take the host most."""
RECIPE = Recipe(name="gpt2-medium", workload="gpt2-medium")
"""That of the models: its plan is prepared once."""


def run(place: Place) -> Iterator[Fact]:
    """Yields counts and seconds of one step of GPT-2-medium."""
    from benchmarks.gpu.measured import wait
    from benchmarks.gpu.planned import batch_of, job_of, planned

    found = planned(place, RECIPE)
    (device,) = place.cluster().device_types
    yield "dispatch_preset_s", device.overhead_s
    yield "dispatch_band", 0.5
    yield "context_preset_bytes", device.reserved_bytes
    batch = batch_of(found, place)
    job = job_of(found, place)
    for _ in range(place.of(4, 2)):
        job.step(batch)
    wait(place.device)
    yield "host_s", _host_s(job, batch)
    wait(place.device)
    if place.device == "cuda":
        yield from _on_gpu(job, batch)
    yield from _profiled(job, batch, place)
    job.close()


def _host_s(job: "Job", batch: "Batch") -> float:
    """What the host computes for a step, without waiting: processor time of its threads."""
    begun = time.process_time()
    job.step(batch)
    return time.process_time() - begun


def _on_gpu(job: "Job", batch: "Batch") -> Iterator[Fact]:
    """Yields waits that torch warns of, and what the process holds beyond its tensors."""
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        job.step(batch)
    torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in found if "synchroniz" in str(one.message)]
    yield "sync_warnings", len(waits)
    for one in waits[:8]:
        yield f"{one.filename.rpartition('/')[2]}:{one.lineno}/waits", str(one.message)[:200]
    free, total = torch.cuda.mem_get_info()
    yield "context_bytes", total - free - torch.cuda.memory_reserved()


def _profiled(job: "Job", batch: "Batch", place: Place) -> Iterator[Fact]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.gpu.measured import wait

    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if place.device == "cuda" else []
    with profile(activities=kinds) as seen:
        job.step(batch)
        wait(place.device)
    # Named ranges, such as the optimizer's step, are shown on the device, too, and are no kernels.
    events: Any = [e for e in seen.events() or () if not getattr(e, "is_user_annotation", False)]
    cuda = torch.autograd.DeviceType.CUDA
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type == cuda)
    yield from kernel_facts(spans)
    names = [e.name for e in events if e.device_type != cuda]
    yield "launches", sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
    # One wait is our own, after the step.
    waits = sum(name in WAITS for name in names)
    yield "waits", max(0, waits - (place.device == "cuda"))
    yield "operators", sum(_is_outer(e) for e in events)
    averages: Any = seen.key_averages()
    busiest = sorted(averages, key=lambda one: one.self_cpu_time_total, reverse=True)[:_LISTED]
    for one in busiest:
        yield f"{one.key.replace('/', ' ')[:90]}/calls", one.count
        yield f"{one.key.replace('/', ' ')[:90]}/host_s", one.self_cpu_time_total / 1e6


def _is_outer(event: Any) -> bool:
    """Whether it is an operator that no other one calls."""
    above = event.cpu_parent
    return event.name.startswith(_OPERATORS) and not (
        above is not None and above.name.startswith(_OPERATORS)
    )


def kernel_facts(spans: Sequence[tuple[float, float]]) -> Iterator[Fact]:
    """Yields how long kernels ran and where none did; `spans`, ascending, are their begins and ends
    in microseconds."""
    yield "kernels", len(spans)
    if not spans:
        return
    busy, until = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    span = until - spans[0][0]
    yield "busy_s", busy / 1e6
    yield "span_s", span / 1e6
    yield "idle_share", 1 - busy / span if span else 0.0


def _per_operator(facts: Any) -> float | None:
    host, count = fact("host_s")(facts), fact("operators")(facts)
    return host / count if host is not None and count else None


STEP = Step(
    name="host_time", does="one step under the profiler: host, kernels, gaps, waits", order=60,
    limit_s=25, least_s=12, run=run, recipes=(RECIPE,),
    claims=(
        Claim(text="an operator takes the host what the preset says of dispatch",
              page="concepts.md", unit="s", measured=_per_operator,
              low=banded(fact("dispatch_preset_s"), "dispatch_band", -1),
              high=banded(fact("dispatch_preset_s"), "dispatch_band", 1)),
        Claim(text="what a process holds beside its tensors is no more than the preset keeps free",
              page="concepts.md", unit="bytes", measured=fact("context_bytes"), low=fixed(0),
              high=fact("context_preset_bytes")),
        Claim(text="no call of a step waits for the device (a bar of the day)",
              page="results/gpu.md", measured=fact("sync_warnings"), low=fixed(0),
              high=fixed(0)),
    ),
)  # fmt: skip
