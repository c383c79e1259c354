"""Speed of copies and products, and every fused kernel beside torch.compile and plain torch."""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.claim import Claim, Number, banded, fact, fixed, ratio
from benchmarks.gpu.step import Fact, Facts, Place, Step, guarded

LARGE = 8192
"""Rows, columns and depth of a large product."""
COPY_BYTES = 2**30
_SPARE_S = 8.0
"""Left of the step where no compilation begins any more."""


def run(place: Place) -> Iterator[Fact]:
    """Yields bandwidth and FLOP/s, then kernels' times; torch.compile's last, as it is slow."""
    from benchmarks.gpu.kernel_cases import cases

    yield from _machine(place)
    bandwidth = yield from _copies(place)
    made = []
    for name, make in cases(place.rehearsal, place.device):
        if make is None:
            yield f"{name}/why", "no inputs known: add them to benchmarks/gpu/kernel_cases.py"
        else:
            made.append((name, make))
            yield from guarded(name, _timed(name, make, place, bandwidth))
    for name, make in made:
        if place.left_s < place.of(int(_SPARE_S), 0):
            yield f"{name}/why", "not compiled: no time was left"
        elif not place.rehearsal or name.startswith("rms_norm"):
            yield from guarded(name, _compiled(name, make, place))


def seconds_of(call: Callable[[], object], place: Place) -> float:
    """Returns the middle one of many calls, each on a cold cache; of one on a CPU."""
    import time

    if place.device == "cuda":
        from triton.testing import do_bench

        found: float = do_bench(call, warmup=10, rep=40, return_mode="median")
        return found / 1e3
    call()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _machine(place: Place) -> Iterator[Fact]:
    """Yields the rate of a large product beside what the preset says of it."""
    import torch

    from meshwright.costmodel.ops.formulas import Gemm, KernelWork, kernel_s
    from meshwright.ir.cluster.device import OpClass

    size = place.of(LARGE, 64)
    a, b = (torch.randn(size, size, device=place.device).bfloat16() for _ in range(2))
    took = seconds_of(lambda: a @ b, place)
    work = KernelWork(OpClass.MATMUL, "bfloat16", 2.0 * size**3, 6.0 * size**2,
                      (Gemm(1, size, size, size),))  # fmt: skip
    (device,) = place.cluster().device_types
    yield "product/measured_s", took
    yield "product/predicted_s", kernel_s(work, device)
    yield "product/band", device.curves[OpClass.MATMUL].band if device.curves else 1.0
    yield "product/flops_per_s", 2.0 * size**3 / took


def _copies(place: Place) -> Iterator[Any]:
    """Yields the bandwidth of a large copy, read and written, and the preset's; returns it."""
    import torch

    from meshwright.costmodel.ops.formulas import KernelWork, kernel_s
    from meshwright.ir.cluster.device import OpClass

    nbytes = place.of(COPY_BYTES, 2**20)
    a, b = (torch.zeros(nbytes, dtype=torch.uint8, device=place.device) for _ in range(2))
    took = seconds_of(lambda: b.copy_(a), place)
    (device,) = place.cluster().device_types
    yield "copy/measured_s", took
    yield (
        "copy/predicted_s",
        kernel_s(KernelWork(OpClass.COPY, "float32", 0.0, 2.0 * nbytes), device),
    )
    yield "copy/band", device.curves[OpClass.COPY].band if device.curves else 1.0
    yield "copy/bytes_per_s", 2.0 * nbytes / took
    return 2.0 * nbytes / took


def _timed(name: str, make: Any, place: Place, bandwidth: float) -> Iterator[Fact]:
    case = make()
    ours, plain = seconds_of(case.ours, place), seconds_of(case.plain, place)
    yield f"{name}/ours_s", ours
    yield f"{name}/eager_s", plain
    if case.nbytes:
        yield f"{name}/share_of_copy", case.nbytes / ours / bandwidth


def _compiled(name: str, make: Any, place: Place) -> Iterator[Fact]:
    """Forward alone: torch.compile of a backward needs its forward compiled as well."""
    import torch

    if name.endswith("backward") or name in ("adam", "bucket pack", "bucket unpack"):
        return
    case = make()
    torch._dynamo.reset()  # else calls of one place in the code are compiled eight times at most
    yield f"{name}/compiled_s", seconds_of(torch.compile(case.plain, fullgraph=True), place)


def _least_share(facts: Facts) -> float:
    """What machine code was counted to reach at least."""
    from meshwright.testing.copy_share import LEAST

    return LEAST


def _worst(key: str) -> Number:
    """The smallest value of a column."""

    def read(facts: Facts) -> float | None:
        found = (fact(name)(facts) for name in facts if name.endswith(f"/{key}"))
        return min((x for x in found if x is not None), default=None)

    return read


def _slowest(facts: Facts) -> float | None:
    """The largest time of ours over plain torch's."""
    rows = [key.removesuffix("/ours_s") for key in facts if key.endswith("/ours_s")]
    found = [ratio(f"{row}/ours_s", f"{row}/eager_s")(facts) for row in rows]
    return max((x for x in found if x is not None), default=None)


STEP = Step(
    name="kernels", does="copies, products, and each fused kernel beside compiled and plain torch",
    order=30, limit_s=50, least_s=20, run=run,
    claims=(
        Claim(text="a large copy takes what the preset says", page="results/devices.md", unit="s",
              low=banded(fact("copy/predicted_s"), "copy/band", -1),
              high=banded(fact("copy/predicted_s"), "copy/band", 1),
              measured=fact("copy/measured_s")),
        Claim(text="a large product in bfloat16 takes what the preset says", unit="s",
              page="results/devices.md",
              low=banded(fact("product/predicted_s"), "product/band", -1),
              high=banded(fact("product/predicted_s"), "product/band", 1),
              measured=fact("product/measured_s")),
        Claim(text="the memory-bound kernel that comes off worst reaches the counted share of a "
                   "copy", page="results/kernel_code.md", low=_least_share, high=fixed(2.0),
              measured=_worst("share_of_copy"), unit="share"),
        Claim(text="no kernel takes longer than the plain operators that it stands for",
              page="kernels.md", low=fixed(0.0), high=fixed(1.0), measured=_slowest),
    ),
)  # fmt: skip
