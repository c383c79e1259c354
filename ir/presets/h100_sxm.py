"""NVIDIA H100, SXM5."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import (
    BESIDE,
    ENGINEERING,
    INFINIBAND_NDR,
    NCCL,
    PCIE_5,
    curve,
    link,
)
from meshwright.ir.cluster.preset import Preset

# fmt: off
HOPPER_ROWS = ((2, 1.15e14), (8, 1.5e14))
"""Odd rows: torch on H100 reached 0.71 to 1.15e14 FLOP/s, the latter in the largest product
(meta-pytorch/float8_experimental, pull request 145; its first shape is padded by the compiler).
Rows of 588 values: 9477 x 1152 x 588 in 130.6 us at 1200 MHz by one of Ampere's kernels, and 3.5
times as fast with rows of 592 (m87-labs/kestrel, pull request 143), taken to 1830 MHz."""
MATMUL = OpCurve(share=0.834, wide_share=0.818, floor_s=2.59e-06, depth=149, split_depth=921,
                 quantum=0.0211, small_tile=0.934, droop=0.0544, band=0.0742, source="fitted",
                 reference="486 GEMMs of aiconfigurator (095f58a)")
HOPPER_RUNS = ((2023, 1.375), (2025, 1.155))
NARROW_HOPPER_RUNS = ((2023, 1.375), (2025, 1.0))
"""What products and attention take in whole training runs over kernels timed alone, by runs that no
page reports: with torch's wheels of 2023 and 2024, of the 8-GPU row of dp_scaling (Ultra-Scale
Playbook, 40 150 tokens/s/GPU), which has no communication to speak of; with NVIDIA's containers of
2025, of which this curve's kernels are, of Llama 3.1 8B in bf16 on 8 H100 (the first row of dgxc).
Of 8-bit floats, Llama 3.1 70B and 8 layers of 405B (rows 16 and 28 of dgxc, of its calibration
part). Nemotron takes 7 % less than that in bf16, maybe because half of what its squared ReLU makes
is zeros, which draw less power: not modelled. Other parts whose power is limited at 500 W and more
are taken to be alike."""
NVLINK4_CURVES = (
    curve("all_gather", 2, (512, 5.23), (16384, 6.24), (4194304, 27.03), (33554432, 92.9),
          (536870912, 1039)),
    curve("all_gather", 4, (512, 7.07), (16384, 8.51), (2097152, 19.13), (4194304, 36.98),
          (536870912, 1267)),
    curve("all_gather", 8, (512, 10.14), (32768, 13.05), (4194304, 33.41),
          (134217728, 392.8), (536870912, 1402)),
    curve("all_reduce", 2, (512, 6.013), (8192, 6.77), (1048576, 14.74), (2097152, 27.86),
          (67108864, 254.6), (536870912, 1686)),
    curve("all_reduce", 4, (512, 9.385), (16384, 11.56), (131072, 11.56), (4194304, 42.16),
          (67108864, 330.4), (536870912, 2300)),
    curve("all_reduce", 8, (512, 15.59), (16384, 18.7), (524288, 20.13), (2097152, 38.18),
          (8388608, 78.91), (33554432, 199.8), (536870912, 2111)),
    curve("all_to_all", 2, (1024, 6.49), (131072, 11.96), (262144, 13.97), (4194304, 15.52),
          (33554432, 53.05), (1073741824, 958.9)),
    curve("all_to_all", 4, (2048, 6.48), (4096, 8.698), (131072, 8.83), (1048576, 14.35),
          (8388608, 17.41), (67108864, 68.93), (2147483648, 1397)),
    curve("all_to_all", 8, (4096, 7.44), (16384, 9.794), (65536, 9.794), (131072, 12.29),
          (268435456, 124.9), (4294967296, 1490)),
    curve("reduce_scatter", 2, (512, 5.459), (32768, 6.19), (4194304, 23.79),
          (67108864, 169.1), (536870912, 1078)),
    curve("reduce_scatter", 4, (512, 7.116), (16384, 7.91), (2097152, 17.54),
          (4194304, 32.88), (8388608, 38.51), (67108864, 194.6), (536870912, 1300)),
    curve("reduce_scatter", 8, (512, 10.24), (32768, 11.46), (2097152, 17.9),
          (4194304, 29.88), (16777216, 69.67), (536870912, 1399)),
)
NVLINK4 = link("nvlink4", 450, 6, efficiency=0.95, launch_s=4.3e-6, step_s=7.8e-7, source="fitted",
               p2p_gb_s=376, fit_error=0.04, **BESIDE,
               reference=f"{NCCL}; messages: {ENGINEERING}; overlap as on A100",
               curves=NVLINK4_CURVES)
# Attention: 335 TFLOP/s and more (Dao 2023); cuDNN's kernel, which newer torch prefers, half more.
PRESET = Preset(memory_gb=80, bandwidth_gb_s=3350, fp64=34, fp32=67, half=989, tf32=494.5, fp8=1979,
                processors=132, cache_mb=50, rows=HOPPER_ROWS, reference="SXM5 data sheet",
                in_runs=HOPPER_RUNS, narrow_in_runs=NARROW_HOPPER_RUNS,
                attention_in_runs=HOPPER_RUNS,
                attention=0.42, matmul=MATMUL, link=NVLINK4, network=INFINIBAND_NDR, bus=PCIE_5,
                capability="9.0", reported="H100", accelerator="H100")
