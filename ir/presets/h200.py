"""NVIDIA H200, SXM."""

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
from meshwright.ir.presets.h100_sxm import HOPPER_ROWS, HOPPER_RUNS, NARROW_HOPPER_RUNS

# fmt: off
MATMUL = OpCurve(share=0.827, wide_share=0.799, floor_s=2.74e-06, depth=121, split_depth=373,
                 quantum=0.0401, small_tile=0.982, droop=0.0422, band=0.0605, source="fitted",
                 reference="486 GEMMs of aiconfigurator (095f58a)")
NVLINK4_H200_CURVES = (
    curve("all_gather", 2, (512, 5.189), (16384, 6.083), (4194304, 26.4), (33554432, 90.23),
          (536870912, 1042)),
    curve("all_gather", 4, (512, 7.455), (16384, 8.57), (2097152, 18.73), (4194304, 35.94),
          (536870912, 1272)),
    curve("all_gather", 8, (512, 11.21), (32768, 13.9), (1048576, 16.96), (4194304, 41.31),
          (8388608, 43.17), (33554432, 123.4), (536870912, 1395)),
    curve("all_reduce", 2, (512, 6.03), (4096, 6.69), (1048576, 14.26), (2097152, 26.84),
          (67108864, 248.3), (536870912, 1704)),
    curve("all_reduce", 4, (512, 9.49), (16384, 10.87), (4194304, 39.79), (67108864, 323.3),
          (536870912, 2311)),
    curve("all_reduce", 8, (512, 16.01), (65536, 19.89), (8388608, 78.3), (33554432, 197.3),
          (536870912, 2040)),
    curve("all_to_all", 2, (1024, 6.35), (131072, 11.48), (262144, 13.05), (4194304, 15.01),
          (33554432, 51.84), (1073741824, 901.7)),
    curve("all_to_all", 4, (2048, 7.532), (131072, 8.13), (262144, 10.76), (1048576, 14.33),
          (8388608, 16.5), (67108864, 64.78), (2147483648, 1262)),
    curve("all_to_all", 8, (4096, 8.596), (2097152, 14.09), (4194304, 14.2),
          (268435456, 124.1), (4294967296, 1510)),
    curve("reduce_scatter", 2, (512, 5.21), (16384, 6.01), (4194304, 23.38),
          (134217728, 305), (536870912, 1083)),
    curve("reduce_scatter", 4, (512, 7.224), (16384, 7.895), (1048576, 11.68),
          (4194304, 32.83), (536870912, 1294)),
    curve("reduce_scatter", 8, (512, 11.01), (8192, 12.42), (1048576, 14.41),
          (4194304, 30.43), (16777216, 69.45), (536870912, 1393)),
)
NVLINK4_H200 = link("nvlink4-h200", 450, 6, efficiency=0.95, launch_s=4.3e-6, step_s=7.8e-7,
                    source="fitted", p2p_gb_s=376, fit_error=0.05, **BESIDE,
                    reference=f"{NCCL}; messages as on H100: {ENGINEERING}; overlap as on A100",
                    curves=NVLINK4_H200_CURVES)
PRESET = Preset(memory_gb=141, bandwidth_gb_s=4800, fp64=34, fp32=67, half=989, tf32=494.5,
                in_runs=HOPPER_RUNS, narrow_in_runs=NARROW_HOPPER_RUNS,
                attention_in_runs=HOPPER_RUNS,
                fp8=1979, processors=132, cache_mb=50, attention=0.42, rows=HOPPER_ROWS,
                reference="SXM data sheet", matmul=MATMUL, link=NVLINK4_H200,
                network=INFINIBAND_NDR, bus=PCIE_5,
                capability="9.0", reported="H200", accelerator="H200")
