"""Remakes the curves of kernels in `ir/presets` from published timings and reports the error held
out.

python -m benchmarks.fit.devices CALIBRATE_DIR [-o docs/results/devices.md] [--presets]

CALIBRATE_DIR holds gemm_bf16_aiconfigurator.json and matmul_measured.json; older GPUs are of
`benchmarks.fit.deepbench`. A fit on every other shape is judged on the rest; the constants that
ship are fitted to all.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.fit import deepbench
from benchmarks.fit.preset_text import call, put
from meshwright.costmodel.fit.fit_compute import KernelTiming, fit_curve
from meshwright.costmodel.ops.formulas import Gemm, KernelWork, kernel_s
from meshwright.ir.cluster.device import DeviceType, OpClass, OpCurve
from meshwright.ir.cluster.preset import WINOGRAD
from meshwright.ir.presets import DEVICES

GRIDS = {
    "A100-SXM4-80GB": "a100-80",
    "H100-SXM5-80GB": "h100-sxm",
    "H200-SXM-141GB": "h200",
    "B200-SXM-180GB": "b200",
    "L40S-48GB": "l40s",
}
"""GPUs with timings over a grid of shapes, and their presets."""
OLDER = {"P100": ("p100",), "V100": ("v100-16", "v100-32"), "T4": ("t4",)}
"""Those of DeepBench."""
POINTS = {
    "p100": r"P100", "v100-16": r"V100(?!S)", "v100-32": r"V100(?!S)", "t4": r"\bT4\b",
    "a100-40": r"A100[ -](PCIE-)?40GB", "a100-80": r"A[18]00 SXM4 80GB",
    "h100-pcie": r"H100[ -]PCIe",
    "h100-sxm": r"H100 80GB HBM3", "h200": r"NVIDIA H200$", "b200": r"NVIDIA B200 180GB",
    "l4": r"\bL4\b", "l40s": r"L40S", "a10": r"\bA10\b", "rtx-a6000": r"RTX A6000",
    "rtx3090": r"3090(?! Ti)", "rtx4090": r"4090(?!D)", "mi300x": r"MI300X",
}  # fmt: skip
"""Presets and the names of their GPUs in the table of single large products."""
LIKE = {"h100-hbm2e": "h100-sxm", "h100-pcie": "h100-sxm"}
"""Whose shape constants a GPU without a grid borrows; otherwise A100's."""
POWER_CUT = {"h100-hbm2e": 0.86}
"""Clock under load of 500 W against 700 W: (350 W / 550 W)^(1/3), with 150 W that do not depend on
the clock, and power as its cube; assumption."""
START = OpCurve(share=0.85, depth=100.0, quantum=0.3, small_tile=0.9, split_depth=200.0,
                floor_s=2.5e-6, droop=0.02)  # fmt: skip
LARGE = Gemm(1, 8192, 8192, 8192)
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Error:
    """Of one shape that was held out."""

    gemm: Gemm
    relative: float


def samples(rows: Iterable[dict[str, float]]) -> list[KernelTiming]:
    """The timings of one GPU, in the order of their shapes."""
    shapes = sorted((int(r["m"]), int(r["n"]), int(r["k"]), r["latency_us"]) for r in rows)
    return [KernelTiming(work(Gemm(1, m, n, k)), us * 1e-6) for m, n, k, us in shapes]


def work(g: Gemm, dtype: str = "bfloat16") -> KernelWork:
    size = 4 if dtype == "float32" else 2
    moved = size * (g.m * g.k + g.k * g.n + g.m * g.n)
    return KernelWork(OpClass.MATMUL, dtype, 2.0 * g.m * g.n * g.k, moved, (g,))


def fitted(measured: Sequence[KernelTiming], device: DeviceType) -> OpCurve:
    wide = any(s.work.dtype == "float32" for s in measured)
    source = "DeepBench (da81ba7)" if wide else "aiconfigurator (095f58a)"
    start = replace(START, wide_share=START.share) if wide else START
    note = f"{len(measured)} GEMMs of {source}"
    return fit_curve(OpClass.MATMUL, measured, device, start, reference=note)


def fitted_convolution(measured: Sequence[KernelTiming], device: DeviceType) -> OpCurve:
    """Their images are in the layout that kernels take, and some are Winograd's: what the presets
    say of both stays theirs."""
    note = f"{len(measured)} kernels of DeepBench (da81ba7)"
    start = replace(START, wide_share=START.share, winograd=WINOGRAD)
    found = fit_curve(OpClass.CONVOLUTION, measured, device, start, reference=note)
    return replace(found, winograd=1.0)


def convolution_errors(
    measured: Sequence[KernelTiming], device: DeviceType, dtype: str
) -> list[float]:
    """Of every other kernel by a fit to the rest."""
    curve = replace(fitted_convolution(measured[::2], device), winograd=WINOGRAD)
    scene = replace(device, curves={**device.curves, OpClass.CONVOLUTION: curve})
    held = [s for s in measured[1::2] if s.work.dtype == dtype]
    return [(kernel_s(s.work, scene) + s.dispatch_s) / s.seconds - 1 for s in held]


def errors(held: Sequence[KernelTiming], device: DeviceType, curve: OpCurve) -> list[Error]:
    scene = with_matmul(device, curve)
    return [
        Error(s.work.gemms[0], (kernel_s(s.work, scene) + s.dispatch_s) / s.seconds - 1)
        for s in held
    ]


def with_matmul(device: DeviceType, curve: OpCurve) -> DeviceType:
    return replace(device, curves={**device.curves, OpClass.MATMUL: curve})


def share_of(device: DeviceType, curve: OpCurve, dtype: str, tflops: float) -> float:
    """The share with which the curve gives this rate for a large product."""
    whole = replace(curve, share=1.0, wide_share=None)
    rate = work(LARGE).flops / kernel_s(work(LARGE, dtype), with_matmul(device, whole))
    return min(1.5, tflops * 1e12 / rate)


def community(rows: Sequence[dict[str, object]], name: str, key: str) -> list[float]:
    """TFLOP/s that people measured with one large product."""
    pattern = re.compile(POINTS.get(name, r"\Z."))
    found = [r.get(key) for r in rows if pattern.search(str(r["gpu"])) and key in r]
    return [float(value) for value in found if isinstance(value, int | float)]


def _rate(name: str, curve: OpCurve) -> float:
    """FLOP/s per multiprocessor of a large product."""
    device = with_matmul(DEVICES[name], curve)
    return work(LARGE).flops / kernel_s(work(LARGE, "float16"), device) / device.processors


def borrowed(name: str, shape: OpCurve, rows: Sequence[dict[str, object]]) -> OpCurve:
    """A curve of another GPU's form with the rate measured on this one.

    Starting a product takes as long on both: 7 to 11 us by the fits of P100, V100, T4, A100 and
    L40S, whose multiprocessors are up to 17 times as fast as others of these.
    """
    device = DEVICES[name]
    cut = POWER_CUT.get(name)
    if cut is not None:
        return replace(shape, share=cut * shape.share, band=0.2, source="assumption",
                       reference="h100-sxm, its clock cut by power")  # fmt: skip
    # bf16 and fp16 where both have tensor cores.
    tensor = device.peak("bfloat16") == device.peak("float16")
    half = community(rows, name, "fp16_tflops")
    half += community(rows, name, "bf16_tflops") if tensor else []
    # The best over shapes, where nothing else is known.
    half = half or community([r for r in rows if r.get("precision") == "bf16"], name, "best_tflops")
    spread = (max(half) - min(half)) / median(half) / 2
    steps = median(half) * 1e12 / device.processors / _rate(LIKE.get(name, "a100-80"), shape)
    shape = replace(shape, depth=steps * shape.depth, split_depth=steps * shape.split_depth)
    return replace(
        shape,
        share=share_of(device, shape, "float16", median(half)),
        wide_share=None,
        band=max(0.15, spread),
        reference=f"{len(half)} community figures of large products; form of another GPU's fit",
    )


def with_wide(name: str, curve: OpCurve, rows: Sequence[dict[str, object]]) -> OpCurve:
    """The share in float32, from large products."""
    wide = community(rows, name, "fp32_tflops")
    if not wide:
        return curve
    share, device = 1.0, DEVICES[name]
    for _ in range(_ROUNDS):
        # What starting a product costs depends on the rate.
        whole = with_matmul(device, replace(curve, wide_share=share))
        rate = work(LARGE).flops / kernel_s(work(LARGE, "float32"), whole)
        share = min(1.5, share * median(wide) * 1e12 / rate)
    return replace(curve, wide_share=share)


def sustained(name: str, curve: OpCurve, rows: Sequence[dict[str, object]]) -> OpCurve:
    """The grids are of short kernels on cool cards: no faster than PyTorch's large products."""
    tensor = DEVICES[name].peak("bfloat16") == DEVICES[name].peak("float16")
    dtype = "bfloat16" if tensor else "float16"
    found = community(rows, name, "bf16_tflops" if tensor else "fp16_tflops")
    share = share_of(DEVICES[name], curve, dtype, median(found))
    if share >= curve.share:
        return curve
    note = f"{curve.reference}; cut to large products"
    return replace(curve, share=share, reference=note)


def curves(
    grids: dict[str, list[KernelTiming]], rows: Sequence[dict[str, object]]
) -> dict[str, OpCurve]:
    """Preset -> curve, fitted to all that is there."""
    made = {name: fitted(grid, DEVICES[name]) for name, grid in grids.items()}
    made = {name: sustained(name, curve, rows) for name, curve in made.items()}
    made = {name: with_wide(name, curve, rows) for name, curve in made.items()}
    for name in DEVICES:
        if name not in made:
            shape = made[LIKE.get(name, "a100-80")]
            made[name] = with_wide(name, borrowed(name, shape, rows), rows)
    return {name: made[name] for name in DEVICES}


def literal(name: str, curve: OpCurve) -> str:
    """The assignment of a curve as source code, to three digits."""
    parts = []
    for field in curve.__dataclass_fields__.values():
        value = getattr(curve, field.name)
        if value != field.default:
            text = json.dumps(value) if isinstance(value, str) else f"{value:.3g}"
            parts.append(f"{field.name}={text}")
    return call(f"{name} = OpCurve(", parts)


def write(made: dict[str, OpCurve], convolutions: dict[str, OpCurve]) -> None:
    """Puts the curves into their devices' files; one without is made from another's file."""
    for word, found in (("MATMUL", made), ("CONVOLUTION", convolutions)):
        for name, curve in found.items():
            put(word, literal(word, curve), name)


def row(label: str, found: Sequence[float]) -> str:
    sizes = sorted(map(abs, found))
    p90 = quantiles(sizes, n=10)[-1]
    bias = median(found)
    return (f"| {label} | {len(found)} | {median(sizes):.1%} | {p90:.1%} | {sizes[-1]:.1%} | "
            f"{bias:+.1%} |")  # fmt: skip


REGIMES = {
    "all": lambda g: True,
    "under 20 GFLOP": lambda g: g.m * g.n * g.k < 1e10,
    "20-200 GFLOP": lambda g: 1e10 <= g.m * g.n * g.k < 1e11,
    "over 200 GFLOP": lambda g: g.m * g.n * g.k >= 1e11,
    "m = 512": lambda g: g.m == 512,
    "k >= 8192": lambda g: g.k >= 8192,
}


HEAD = """# Matmul formulas against published timings

`python -m benchmarks.fit.devices CALIBRATE_DIR`, {today}. Fitted to every other shape of
aiconfigurator's bf16 grids (m 512-16384, n and k 1024-16384), for P100, V100 and T4 of DeepBench's
float32 and float16 products, and judged on the rest. Aiconfigurator's timings are of repeated
kernels in CUDA graphs with a warm cache, so they hold neither dispatch nor the clock of a card that
is hot from hours of work. Where PyTorch's large products (matmul_measured) are slower, the
constants below, which are fitted to all shapes, are cut to their rate.
"""
LAYERS = """## Experts of one layer on 8 H100

Formula: the experts' products alone. Measured (Megatron-Core's baselines): the whole layer, with
routing, permutation and two all-to-alls each way, so the formula must lie below.

| layer, dispatcher | forward, formula ms | measured | backward, formula ms | measured |
|---|---|---|---|---|"""
CONVOLUTIONS = """## Convolutions

Forward and both gradients, fitted to every other kernel of DeepBench and judged on the rest.

| device, format | n | median | p90 | worst | bias |
|---|---|---|---|---|---|"""
TABLE = """## Constants

Rate: TFLOP/s of an 8192 cube in float16.

| preset | rate | share of peak | float32 share | band | source |
|---|---|---|---|---|---|"""


def report(grids: dict[str, list[KernelTiming]], made: dict[str, OpCurve]) -> str:
    lines = [HEAD.format(today=date.today())]
    for name, grid in grids.items():
        device = DEVICES[name]
        held = errors(grid[1::2], device, fitted(grid[::2], device))
        lines += [f"## {name}", "", "| held-out shapes | n | median | p90 | worst | bias |",
                  "|---|---|---|---|---|---|"]  # fmt: skip
        for label, inside in REGIMES.items():
            some = [e for e in held if inside(e.gemm)]
            if len(some) > 1:
                lines.append(row(label, [e.relative for e in some]))
        lines.append("")
    lines += [CONVOLUTIONS, *(convolution_rows(gpu, names[0]) for gpu, names in OLDER.items()), ""]
    lines.append(TABLE)
    lines += [constants(name, curve) for name, curve in made.items()]
    return "\n".join([*lines, ""])


def convolution_rows(gpu: str, name: str) -> str:
    """A row for each format that was fitted."""
    measured = convolutions(gpu)
    dtypes = sorted({s.work.dtype for s in measured})
    return "\n".join(
        row(f"{name}, {dtype}", convolution_errors(measured, DEVICES[name], dtype))
        for dtype in dtypes
    )


def convolutions(gpu: str) -> list[KernelTiming]:
    """P100's were computed in float32 in either format."""
    found = deepbench.convolutions(gpu)
    return [s for s in found if gpu != "P100" or s.work.dtype == "float32"]


def constants(name: str, curve: OpCurve) -> str:
    device = with_matmul(DEVICES[name], curve)
    rate = work(LARGE).flops / kernel_s(work(LARGE, "float16"), device) / 1e12
    wide = f"{curve.wide_share:.2f}" if curve.wide_share else "as half"
    return (f"| {name} | {rate:.0f} | {curve.share:.2f} | {wide} | {curve.band:.0%} | "
            f"{curve.source}: {curve.reference} |")  # fmt: skip


def expert_products(model: dict[str, int], tokens: int, shards: int) -> tuple[Gemm, ...]:
    """Gate and up, then down, of a rank's experts under balanced routing; of a shared one too."""
    hidden, inner = model["hidden"], model["moe_ffn"]
    count = model["experts"] // shards
    rows = tokens * model["topk"] // count
    made = [Gemm(count, rows, 2 * inner, hidden), Gemm(count, rows, hidden, inner)]
    if shared := model.get("shared_ffn"):
        made += [Gemm(1, tokens, 2 * shared, hidden), Gemm(1, tokens, hidden, shared)]
    return tuple(made)


def layers(rows: Sequence[dict[str, Any]], device: DeviceType) -> list[str]:
    """Products by the formula beside whole measured layers: what no fit has seen."""
    lines = [LAYERS]
    for r in rows:
        if r["precision"] != "bf16":
            continue
        tokens = r["batch"]["mbs"] * r["batch"]["seq"]
        forward = expert_products(r["model"], tokens, r["parallel"]["ep"])
        inputs = [Gemm(g.batch, g.m, g.k, g.n) for g in forward]
        weights = [Gemm(g.batch, g.n, g.k, g.m) for g in forward]
        says = [1e3 * sum(kernel_s(work(g), device) for g in made)
                for made in (forward, [*inputs, *weights])]  # fmt: skip
        seen = r["measured"]
        lines.append(
            f"| {r['model']['name']}, {r['parallel']['dispatcher']} | {says[0]:.2f} | "
            f"{seen['forward_ms']:.2f} | {says[1]:.2f} | {seen['backward_ms']:.2f} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--presets", action="store_true", help="write the curves into their files")
    args = parser.parse_args()
    files = [args.folder / f"{n}.json" for n in ("gemm_bf16_aiconfigurator", "matmul_measured")]
    if missing := [str(f) for f in files if not f.exists()]:
        sys.exit(f"{', '.join(missing)} missing: give the folder of published calibration tables")
    table, points = (json.loads(f.read_text())["rows"] for f in files)
    grids = {name: samples(r for r in table if r["gpu"] == gpu) for gpu, name in GRIDS.items()}
    grids |= {name: deepbench.products(gpu) for gpu, names in OLDER.items() for name in names}
    made = curves(grids, points)
    slides = {
        name: fitted_convolution(convolutions(gpu), with_matmul(DEVICES[name], made[name]))
        for gpu, names in OLDER.items()
        for name in names
    }
    text = report(grids, made)
    layer = args.folder / "megatron_moe_layer_h100.json"
    if layer.exists():
        rows = json.loads(layer.read_text())["rows"]
        device = with_matmul(DEVICES["h100-sxm"], made["h100-sxm"])
        text = "\n".join([text, *layers(rows, device)])
    else:
        print(f"{layer} is missing: no check against whole layers", file=sys.stderr)
    print(text)
    if args.output:
        args.output.write_text(text)
    if args.presets:
        write(made, slides)


if __name__ == "__main__":
    main()
