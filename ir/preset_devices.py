"""Constants of common accelerators, each with where it comes from.

Peaks, memory and bandwidth are the vendors' as collected by stas00/ml-engineering (commit 744d01e),
cli99/llm-analysis (d841e40) and ai-dynamo/aiconfigurator (095f58a). float64 peaks, counts of
multiprocessors and cache sizes are from memory of the vendors' architecture papers.
"""

from dataclasses import dataclass, replace

from meshwright.ir.device import DeviceType, OpClass, OpCurve, Source
from meshwright.ir.preset_products import CONVOLUTION, MATMUL

_MIB = 2**20
_KERNEL_S = 2.5e-6
"""A kernel between others on a GPU: the floor that fits to H100, H200 and B200 matmuls find."""
_DISPATCH_S = 6e-6
"""Assumption: eager PyTorch dispatches 100k-200k ops a second."""
_RESERVED = round(1.5 * 2**30)
"""Assumption: CUDA context, NCCL, cuBLAS."""
_COPY_SHARE = 0.82
"""Of the bandwidth: copies reach 0.73 (A100) to 0.90 (RTX 4090) in device-benchmarks (commit
7ccc883); the median, for devices that it does not list."""
_P100_COPY = 0.85 * 900 / 1.5 / 732
"""V100 delivers 1.5 times the bandwidth of P100, 900 GB/s against 732 at their peaks: Volta's
memory controller reaches more of it (NVIDIA WP-08608-001, 2017)."""
_CACHE_GAIN = 2.0
"""Assumption: values that fit into the cache move twice as fast."""
_FP8_SHARE = 0.88
"""Float8 products reach less of their peak than bf16 ones do: 71 against 80 % on H100 SXM (maximum
achievable matmul, stas00/ml-engineering); H200 and B200 lie close. Curves hold bf16's share."""
_FP8_SHARE_MI300X = 0.8
"""990 against 620 TFLOP/s in shapes of Llama 70B (SemiAnalysis, MI300X vs H100 vs H200, December
2024), where H100 has 1280 against 720: 0.795 and 0.89 of twice the rate."""
_OF_COPY = {
    OpClass.ELEMENTWISE: 1.0,
    OpClass.TRANSCENDENTAL: 1.0,
    OpClass.COPY: 1.0,
    OpClass.NORMALIZATION: 0.8,
    OpClass.REDUCTION: 0.8,
    OpClass.GATHER: 0.5,
}
"""Bandwidth of a class relative to copies; all but copies are assumptions."""


Rates = tuple[tuple[int, float], ...]
_HOPPER_ROWS: Rates = ((2, 1.15e14), (8, 1.5e14))
"""Odd rows: torch on H100 reached 0.71 to 1.15e14 FLOP/s, the latter in the largest product
(meta-pytorch/float8_experimental, pull request 145; its first shape is padded by the compiler).
Rows of 588 values: 9477 x 1152 x 588 in 130.6 us at 1200 MHz by one of Ampere's kernels, and 3.5
times as fast with rows of 592 (m87-labs/kestrel, pull request 143), taken to 1830 MHz."""
_AMPERE_ROWS: Rates = tuple((n, rate * 108 * 1410 / (132 * 1830)) for n, rate in _HOPPER_ROWS)
"""Assumption: as fast as the same kernels on Hopper per multiprocessor and clock. nanoGPT of 124M
on A100 became 25 % faster with a vocabulary of 50304 instead of 50257 (Karpathy, February 2023)."""
_AMPERE_BATCHES: Rates = ((8, 9.6e12),)
"""BLOOM's layers of 13824 with 128 heads (rows of 108) against those with 64 (216): four pairs of
its table give 9.4 to 10.0e12 (bigscience, train/tr11-176B-ml, chronicles-prequel.md), about half of
what there is without tensor cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """A line of the table: GB, GB/s, dense TFLOP/s, multiprocessors, MB of last-level cache."""

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    fp64: float
    fp32: float
    half: float
    processors: int
    cache_mb: float
    bf16: float | None = None
    tf32: float | None = None
    fp8: float = 0.0
    fp8_share: float = _FP8_SHARE
    copy: float | None = None
    """Share of the bandwidth that copies reach."""
    copy_from: str = "copies measured by device-benchmarks"
    copy_source: Source = "fitted"
    attention: float = 0.0
    """Share of the half-precision peak; 0: half of what matmuls reach."""
    rows: Rates = ()
    """FLOP/s of products whose rows are not aligned; empty: not known, taken for aligned."""
    batches: Rates = ()
    attention_backward: float = 1.15
    """Of its 5 products over the 2 of the forward, which run at a higher rate: figure 5 there."""
    reference: str = "data sheet"


WINOGRAD = 2.25
"""In tiles of 2 x 2 (Lavin and Gray 2016), as cuDNN does it for PyTorch. XLA's runs of Wide-ResNet
on V100 show none of it (benchmarks.published_wresnet)."""
_CONVOLUTION = 0.88
"""Of a matmul's share: V100 reaches 0.78 in convolutions alone and 0.89 in products alone."""
_IN_TRAINING = 0.76
"""Float32 convolutions in PyTorch's training over those timed alone: over the layers of ResNet-50
and VGG-16 on V100 in PipeDream's profiles (msr-fiddle/pipedream) forward is then 9 % too fast
and backward 7 % too slow."""
_TURNING = 1.2
"""ResNet-18, 50 and 101, ResNeXt-101, VGG-19 and MobileNetV2 in mixed precision on RTX 3090 (timm,
results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv): NCHW takes 0.9 to 1.9 times longer
than copying explains, 1.2 times at the median."""

# Attention: shares at long sequences of FlashAttention 2 (Dao 2023, figures 4 to 7; from memory):
# 190-230 TFLOP/s on A100, 335 and more on H100, where cuDNN's kernel, which newer torch prefers,
# reaches half as much again. B200: assumption. MI300X: 310-355 TFLOP/s forward, 194-207 backward
# (ROCm/flash-attention, issue 142, ROCm 6.3.2, 16k keys, head dim 128).
_SPECS = (
    _Spec(name="p100", memory_gb=16, bandwidth_gb_s=732, fp64=4.7, fp32=9.3, half=18.7, bf16=9.3,
          processors=56, cache_mb=4, copy=_P100_COPY, copy_source="datasheet",
          copy_from="two thirds of V100's copies: NVIDIA WP-08608-001 (2017), HBM2 section",
          reference="PCIe data sheet, from memory; no tensor cores"),
    _Spec(name="v100-16", memory_gb=16, bandwidth_gb_s=900, fp64=7.8, fp32=15.7, half=125,
          bf16=15.7, processors=80, cache_mb=6, copy=0.85,
          reference="SXM2 data sheet; no bf16 tensor cores: 9.4-10.3 TFLOP/s measured"),
    _Spec(name="v100-32", memory_gb=32, bandwidth_gb_s=900, fp64=7.8, fp32=15.7, half=125,
          bf16=15.7, processors=80, cache_mb=6, copy=0.85, reference="as v100-16"),
    _Spec(name="t4", memory_gb=16, bandwidth_gb_s=320, fp64=0.25, fp32=8.1, half=65, bf16=8.1,
          processors=40, cache_mb=4, copy=0.75, reference="data sheet; no bf16 tensor cores"),
    _Spec(name="a100-40", memory_gb=40, bandwidth_gb_s=1555, fp64=9.7, fp32=19.5, half=312,
          tf32=156, processors=108, cache_mb=40, copy=0.73, attention=0.62, rows=_AMPERE_ROWS,
          batches=_AMPERE_BATCHES, reference="SXM4 data sheet"),
    _Spec(name="a100-80", memory_gb=80, bandwidth_gb_s=2039, fp64=9.7, fp32=19.5, half=312,
          tf32=156, processors=108, cache_mb=40, copy=0.73, attention=0.62, rows=_AMPERE_ROWS,
          batches=_AMPERE_BATCHES, reference="SXM4 data sheet"),
    _Spec(name="h100-sxm", memory_gb=80, bandwidth_gb_s=3350, fp64=34, fp32=67, half=989,
          tf32=494.5, fp8=1979, processors=132, cache_mb=50, attention=0.42,
          rows=_HOPPER_ROWS, reference="SXM5 data sheet"),
    _Spec(name="h100-pcie", memory_gb=80, bandwidth_gb_s=2000, fp64=26, fp32=51, half=756,
          tf32=378, fp8=1513, processors=114, cache_mb=50, copy=0.82, attention=0.35,
          rows=_HOPPER_ROWS, reference="PCIe data sheet"),
    _Spec(name="h100-hbm2e", memory_gb=96, bandwidth_gb_s=2400, fp64=34, fp32=67, half=989,
          tf32=494.5, fp8=1979, processors=132, cache_mb=50, attention=0.36,
          rows=_HOPPER_ROWS,
          reference="H100 SXM of 96 GB HBM2e and 500 W, not sold freely: six stacks of HBM2e at "
          "the 400 GB/s each that H100 PCIe has; peaks of the SXM5, shares cut by its power"),
    _Spec(name="h200", memory_gb=141, bandwidth_gb_s=4800, fp64=34, fp32=67, half=989,
          tf32=494.5, fp8=1979, processors=132, cache_mb=50, attention=0.42,
          rows=_HOPPER_ROWS, reference="SXM data sheet"),
    _Spec(name="b200", memory_gb=180, bandwidth_gb_s=8000, fp64=40, fp32=80, half=2250,
          tf32=1125, fp8=4500, processors=148, cache_mb=126, attention=0.35,
          reference="SXM data sheet"),
    _Spec(name="l4", memory_gb=24, bandwidth_gb_s=300, fp64=0.5, fp32=30.3, half=121, tf32=60,
          fp8=242, processors=58, cache_mb=48, copy=0.78),
    _Spec(name="l40s", memory_gb=48, bandwidth_gb_s=864, fp64=1.4, fp32=91.6, half=362, tf32=183,
          fp8=733, processors=142, cache_mb=96),
    _Spec(name="a10", memory_gb=24, bandwidth_gb_s=600, fp64=0.5, fp32=31.2, half=125, tf32=62.5,
          processors=72, cache_mb=6, copy=0.78),
    _Spec(name="rtx-a6000", memory_gb=48, bandwidth_gb_s=768, fp64=0.6, fp32=38.7, half=154.8,
          tf32=77.4, processors=84, cache_mb=6),
    _Spec(name="rtx3090", memory_gb=24, bandwidth_gb_s=936, fp64=0.56, fp32=35.6, half=71,
          tf32=35.6, processors=82, cache_mb=6, copy=0.89),
    _Spec(name="rtx4090", memory_gb=24, bandwidth_gb_s=1008, fp64=1.3, fp32=82.6, half=165.2,
          tf32=82.6, fp8=330.3, processors=128, cache_mb=72, copy=0.90,
          reference="data sheet, with fp32 accumulation"),
    _Spec(name="mi300x", memory_gb=192, bandwidth_gb_s=5300, fp64=81.7, fp32=163.4, half=1300,
          tf32=653.7, fp8=2610, fp8_share=_FP8_SHARE_MI300X, processors=304, cache_mb=256,
          attention=0.26, attention_backward=1.7),
)  # fmt: skip


def _memory_curves(spec: _Spec) -> dict[OpClass, OpCurve]:
    copy = spec.copy or _COPY_SHARE
    return {
        op_class: OpCurve(
            share=copy * part,
            cache_share=_CACHE_GAIN * copy * part,
            # Half of it: what is read and written competes with what came before.
            cache_bytes=round(spec.cache_mb * _MIB / 2),
            floor_s=_KERNEL_S,
            band=0.15 if spec.copy and part == 1.0 else 0.3,
            source=spec.copy_source if spec.copy and part == 1.0 else "assumption",
            reference=spec.copy_from if spec.copy else "",
        )
        for op_class, part in _OF_COPY.items()
    }


def _compute_curves(spec: _Spec) -> dict[OpClass, OpCurve]:
    matmul = replace(MATMUL[spec.name], row_rates=spec.rows, batched_row_rates=spec.batches)
    share = spec.attention or 0.5 * matmul.share
    return {
        OpClass.MATMUL: matmul,
        OpClass.ATTENTION: OpCurve(
            share=share,
            # Without tensor cores' formats the unfused kernels run, as far from the peak.
            wide_share=0.5 * (matmul.wide_share or matmul.share),
            floor_s=2 * _KERNEL_S,
            depth=200.0,  # half the rate at 200 keys: figure 4 there, 512 against 16k
            backward=spec.attention_backward,
            band=0.3,
            reference="FlashAttention 2; see above" if spec.attention else "",
        ),
        OpClass.CONVOLUTION: _convolution(spec, matmul),
        OpClass.RECURRENT: OpCurve(
            share=0.3 * matmul.share,
            wide_share=0.3 * (matmul.wide_share or matmul.share),
            floor_s=1e-4,
            band=0.6,
        ),
    }


def _convolution(spec: _Spec, matmul: OpCurve) -> OpCurve:
    timed = CONVOLUTION.get(spec.name)
    if timed is None:
        share = _CONVOLUTION * matmul.share
        timed = replace(CONVOLUTION["v100-16"], share=share, wide_share=share, source="assumption",
                        reference="V100's, as far from its products")  # fmt: skip
    assert timed.wide_share is not None
    wide = timed.wide_share * (1.0 if spec.tf32 else _IN_TRAINING)
    cores = spec.tf32 is not None or spec.half > 4 * spec.fp32
    return replace(
        timed,
        # Without tensor cores half precision is a format of storage.
        share=timed.share if cores else wide * spec.fp32 / spec.half,
        wide_share=wide,
        winograd=WINOGRAD,
        turning=_TURNING if cores else 0.0,
    )


def _device(spec: _Spec) -> DeviceType:
    peaks = {"float64": spec.fp64, "float32": spec.fp32, "float16": spec.half,
             "bfloat16": spec.bf16 or spec.half, "tf32": spec.tf32 or spec.fp32}  # fmt: skip
    if spec.fp8:
        peaks["float8_e4m3fn"] = spec.fp8_share * spec.fp8
    curves = _compute_curves(spec) | _memory_curves(spec)
    return DeviceType(
        name=spec.name,
        kind="cuda",
        memory_bytes=round(spec.memory_gb * 2**30),  # marketed GB are GiB on these parts
        memory_bandwidth_bytes_per_s=spec.bandwidth_gb_s * 1e9,
        peak_flops={dtype: value * 1e12 for dtype, value in peaks.items()},
        efficiency={op_class: min(1.0, curve.share) for op_class, curve in curves.items()},
        curves=curves,
        processors=spec.processors,
        overhead_s=_DISPATCH_S,
        reserved_bytes=_RESERVED,
        source="datasheet",
        reference=spec.reference,
    )


DEVICES = {spec.name: _device(spec) for spec in _SPECS}
