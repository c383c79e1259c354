"""NVIDIA A100 of 80 GB, SXM4."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import BESIDE, ENGINEERING, INFINIBAND_HDR, NCCL, curve, link
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.h100_sxm import HOPPER_ROWS

# fmt: off
AMPERE_ROWS = tuple((n, rate * 108 * 1410 / (132 * 1830)) for n, rate in HOPPER_ROWS)
"""Assumption: as fast as the same kernels on Hopper per multiprocessor and clock. nanoGPT of 124M
on A100 became 25 % faster with a vocabulary of 50304 instead of 50257 (Karpathy, February 2023)."""
AMPERE_BATCHES = ((8, 9.6e12),)
"""BLOOM's layers of 13824 with 128 heads (rows of 108) against those with 64 (216): four pairs of
its table give 9.4 to 10.0e12 (bigscience, train/tr11-176B-ml, chronicles-prequel.md), about half of
what there is without tensor cores."""
AMPERE_RUNS = ((2020, 1.08),)
"""Products in whole runs over this curve's kernels, of an inference library, which reach 266
TFLOP/s at 8192; five PyTorch tests of A100 SXM find 230, 237, 246, 265 and 271: their median."""
MATMUL = OpCurve(share=0.883, wide_share=0.986, floor_s=1e-06, depth=285, split_depth=42.1,
                 quantum=0.702, small_tile=0.871, droop=0.001, band=0.0924, source="fitted",
                 reference="405 GEMMs of aiconfigurator (095f58a); cut to large products")
NVLINK3_CURVES = (
    curve("all_gather", 2, (512, 8.98), (16384, 11.43), (1048576, 19.95), (2097152, 38.1),
          (134217728, 496.4), (536870912, 1790)),
    curve("all_gather", 4, (512, 10.76), (32768, 15.08), (1048576, 22.53), (2097152, 52.93),
          (536870912, 2102)),
    curve("all_gather", 8, (512, 14.91), (8192, 14.91), (32768, 19.51), (16777216, 135),
          (536870912, 2288)),
    curve("all_reduce", 2, (512, 9.98), (16384, 12.75), (131072, 13.45), (524288, 19.37),
          (1048576, 40.84), (33554432, 224.2), (536870912, 2781)),
    curve("all_reduce", 4, (512, 14.19), (32768, 17.37), (262144, 18.15), (2097152, 46.22),
          (16777216, 183.5), (536870912, 3716)),
    curve("all_reduce", 8, (512, 21.71), (65536, 27.66), (262144, 27.66), (2097152, 53.7),
          (16777216, 216.5), (536870912, 4226)),
    curve("all_to_all", 2, (1024, 10.52), (65536, 13.87), (4194304, 28.62),
          (33554432, 98.31), (1073741824, 1635)),
    curve("all_to_all", 4, (2048, 12.41), (131072, 14.11), (8388608, 36.15),
          (268435456, 312), (2147483648, 2066)),
    curve("all_to_all", 8, (4096, 13.74), (33554432, 64.34), (67108864, 67.84),
          (536870912, 347.6), (4294967296, 2314)),
    curve("reduce_scatter", 2, (512, 8.9), (16384, 11.23), (1048576, 19.4), (2097152, 34.87),
          (536870912, 1612)),
    curve("reduce_scatter", 4, (512, 10.75), (32768, 13.7), (1048576, 21.08),
          (2097152, 48.69), (536870912, 1982)),
    curve("reduce_scatter", 8, (512, 15), (65536, 18.04), (524288, 19.08), (4194304, 52.03),
          (33554432, 210), (536870912, 2207)),
)
NVLINK3 = link("nvlink3", 300, 8, efficiency=0.74, launch_s=7.7e-6, step_s=1.1e-6, source="fitted",
               p2p_gb_s=274, fit_error=0.04, **BESIDE,
               reference=f"{NCCL}; messages: {ENGINEERING}; overlap: Hetu-Galvatron (cea12ff)",
               curves=NVLINK3_CURVES)
# Attention: 190-230 TFLOP/s (Dao 2023, figures 4 to 7; from memory).
PRESET = Preset(memory_gb=80, bandwidth_gb_s=2039, fp64=9.7, fp32=19.5, half=312, tf32=156,
                processors=108, cache_mb=40, copy=0.73, rows=AMPERE_ROWS, batches=AMPERE_BATCHES,
                reference="SXM4 data sheet", attention=0.62, matmul=MATMUL, link=NVLINK3,
                in_runs=AMPERE_RUNS, network=INFINIBAND_HDR, capability="8.0", reported="A100",
                accelerator="A100-80GB")
