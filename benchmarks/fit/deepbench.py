"""Single kernels that Baidu's DeepBench timed on P100, V100 and T4, as samples for fits.

tables/deepbench_*.csv have them, with their source.
"""

import csv
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from meshwright.costmodel.fit.fit_compute import KernelTiming
from meshwright.costmodel.ops.formulas import Gemm, KernelWork
from meshwright.costmodel.ops.kernel_work import forward_work, input_work, weight_work
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.ir.cluster.device import OpClass

TABLES = Path(__file__).parents[1] / "tables"
BYTES = {"float32": 4, "float16": 2}
NARROW = 64
"""Products with fewer rows or columns are those of inference and of recurrent cells."""
LAUNCH_S = 5e-6
"""Of every time: the CPU launches one kernel after the other; assumption."""
_LONG_S = 40e-6
"""Of shorter convolutions little is left beside it."""
_COLOURS = 3
_TEXT = ("gpu", "dtype")


def _rows(name: str) -> Iterator[dict[str, Any]]:
    with (TABLES / f"deepbench_{name}s.csv").open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            whole = {k: int(v) for k, v in row.items() if k not in _TEXT and not k.endswith("us")}
            yield {**row, **whole}


def products(gpu: str) -> list[KernelTiming]:
    """In the order of their shapes."""
    found = []
    for row in _rows("product"):
        m, n, k, dtype = row["m"], row["n"], row["k"], row["dtype"]
        if row["gpu"] != gpu or min(m, n) < NARROW:
            continue
        moved = BYTES[dtype] * (m * k + k * n + m * n)
        work = KernelWork(OpClass.MATMUL, dtype, 2.0 * m * n * k, moved, (Gemm(1, m, n, k),))
        found.append(KernelTiming(work, float(row["us"]) * 1e-6, LAUNCH_S))
    return sorted(found, key=lambda s: (s.work.dtype, s.work.gemms[0].m, s.work.flops))


def convolutions(gpu: str) -> list[KernelTiming]:
    """Forward, gradient of the image and of the weight, of layers after the first."""
    found = []
    for row in _rows("convolution"):
        if row["gpu"] != gpu or row["channels"] <= _COLOURS:
            continue
        op = _convolution(row)
        for name, work in (("forward", forward_work(op)), ("input", input_work(op)),
                           ("weight", weight_work(op))):  # fmt: skip
            us = row[f"{name}_us"]
            if us and work and float(us) * 1e-6 > _LONG_S:
                found.append(KernelTiming(work, float(us) * 1e-6, LAUNCH_S))
    return found


def _convolution(row: dict[str, Any]) -> LocalOp:
    """Its time is the kernel's, with images as that wants them."""

    def size(dim: str) -> int:
        free = row[dim] + 2 * row[f"pad_{dim}"] - row[f"filter_{dim}"]
        return int(free // row[f"stride_{dim}"] + 1)

    each = BYTES[row["dtype"]]
    image = (row["batch"], row["channels"], row["height"], row["width"])
    weight = (row["filters"], row["channels"], row["filter_height"], row["filter_width"])
    result = (row["batch"], row["filters"], size("height"), size("width"))
    return LocalOp(
        target="aten.conv2d.default",
        op_class=OpClass.CONVOLUTION,
        dtype=row["dtype"],
        flops=2.0 * prod(result) * prod(weight[1:]),
        inputs=(
            LocalInput(image, each * prod(image), True, False, channels_last=True),
            LocalInput(weight, each * prod(weight), True, True),
        ),
        outputs=(result,),
        output_bytes=each * prod(result),
        differentiable=True,
        channels_last=True,
    )
