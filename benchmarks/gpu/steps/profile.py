"""`meshwright profile` of this device, and how far the preset's curves are from it."""

from collections.abc import Iterator

from benchmarks.gpu.claim import Claim, banded, fact, fixed
from benchmarks.gpu.results import PROFILE
from benchmarks.gpu.step import Fact, Place, Step
from meshwright.ir.cluster.device import OpClass

_REHEARSED_S = 5.0
_SPARE_S = 12.0
"""For tracing before it, and the comparison after."""


def run(place: Place) -> Iterator[Fact]:
    """Yields how much was measured, then per curve the preset's times over the measured ones."""
    from contextlib import nullcontext
    from unittest.mock import patch

    from benchmarks.gpu.evidence import curve_rows, link_rows
    from benchmarks.gpu.recipe import PLAIN
    from benchmarks.gpu.workloads import PRECISION, WORKLOADS
    from meshwright.profiling.profiling import profile
    from meshwright.profiling.run import ProfilingRun

    cluster = place.cluster()
    graph = WORKLOADS["gpt2-medium"].graph(place.rehearsal)
    path = place.out / PROFILE
    path.unlink(missing_ok=True)
    seconds = _REHEARSED_S if place.rehearsal else max(1.0, place.left_s - _SPARE_S)
    # On CPUs the heap is measured for 15 s, which no GPU has.
    with patch.object(ProfilingRun, "memory") if place.rehearsal else nullcontext():
        found = profile(
            graph, cluster, precision=PRECISION, path=path, constraints=PLAIN, progress=False,
            minutes=seconds / 60,
        )  # fmt: skip
    yield "machine", str(found.machine)
    yield "fingerprint", found.fingerprint
    for kind in ("blocks", "ops", "copies", "optimizers", "memory"):
        yield kind, len(getattr(found, kind))
    (device,) = cluster.device_types
    for row in (*curve_rows(found, device), *link_rows(found, device)):
        yield from row.facts()


STEP = Step(
    name="profile", does="a profile of the device, and the preset beside it", order=40, limit_s=90,
    least_s=30, run=run,
    claims=tuple(
        Claim(
            text=f"{kind}: the preset's curve gives what ops take, at the median, within its band",
            page="results/devices.md", low=banded(fixed(1), f"{kind}/band", -1),
            high=banded(fixed(1), f"{kind}/band", 1),
            measured=fact(f"{kind}/preset_over_measured"),
        )
        for kind in OpClass
        if kind is not OpClass.VIEW
    ),
)  # fmt: skip
