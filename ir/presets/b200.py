"""NVIDIA B200, SXM."""

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
from meshwright.ir.presets.h100_sxm import HOPPER_RUNS, NARROW_HOPPER_RUNS

# fmt: off
MATMUL = OpCurve(share=0.687, wide_share=0.843, floor_s=2.79e-06, depth=0.1, split_depth=936,
                 quantum=0.103, small_tile=0.98, droop=0.0181, band=0.099, source="fitted",
                 reference="486 GEMMs of aiconfigurator (095f58a)")
NVLINK5_CURVES = (
    curve("all_gather", 2, (512, 8.793), (16384, 9.8), (4194304, 23.21), (536870912, 612.3)),
    curve("all_gather", 4, (512, 11.13), (65536, 14.37), (1048576, 15.01), (4194304, 25.25),
          (8388608, 50.94), (33554432, 71.02), (536870912, 710.6)),
    curve("all_gather", 8, (512, 16.06), (16384, 19.13), (1048576, 19.13), (8388608, 44.18),
          (16777216, 103.9), (134217728, 206.7), (536870912, 761.4)),
    curve("all_reduce", 2, (512, 10.21), (16384, 10.93), (2097152, 18.89), (4194304, 36.83),
          (16777216, 53.36), (536870912, 1005)),
    curve("all_reduce", 4, (512, 15.05), (32768, 16.87), (524288, 17.23), (4194304, 35.83),
          (8388608, 84.91), (67108864, 181.8), (536870912, 1271)),
    curve("all_reduce", 8, (512, 25.09), (65536, 28.47), (2097152, 32.08), (4194304, 53.37),
          (33554432, 167.8), (536870912, 1335)),
    curve("all_to_all", 2, (1024, 9.143), (131072, 13.57), (262144, 15.62),
          (1073741824, 810)),
    curve("all_to_all", 4, (2048, 10.22), (524288, 15.85), (1048576, 17.27),
          (134217728, 73.72), (2147483648, 825.2)),
    curve("all_to_all", 8, (4096, 10.65), (16384, 11.98), (2097152, 17.46),
          (268435456, 88.8), (4294967296, 834.2)),
    curve("reduce_scatter", 2, (512, 8.56), (16384, 9.789), (8388608, 28.1),
          (536870912, 651)),
    curve("reduce_scatter", 4, (512, 11.13), (2048, 12.43), (4194304, 24.42),
          (8388608, 48.05), (33554432, 70.04), (536870912, 728.8)),
    curve("reduce_scatter", 8, (512, 16.13), (65536, 18.81), (2097152, 20.99),
          (8388608, 43.64), (16777216, 96.99), (134217728, 208), (536870912, 766.5)),
)
NVLINK5 = link("nvlink5", 900, 6, efficiency=0.8, launch_s=8e-6, step_s=1.25e-6, source="fitted",
               p2p_gb_s=746, fit_error=0.04, **BESIDE,
               reference=f"{NCCL}; messages as on GB200: {ENGINEERING}; overlap as on A100",
               curves=NVLINK5_CURVES)
NVLINK5_NVL72_CURVES = (
    curve("all_gather", 2, (512, 9.36), (8192, 10.02), (4194304, 23.89), (536870912, 614.5)),
    curve("all_gather", 4, (512, 11.65), (32768, 13.16), (524288, 13.59), (4194304, 25.92),
          (8388608, 52.57), (33554432, 71.86), (536870912, 714.5)),
    curve("all_reduce", 2, (512, 10.88), (16384, 11.61), (524288, 12.71), (2097152, 19.34),
          (4194304, 38.28), (16777216, 53.88), (536870912, 1013)),
    curve("all_reduce", 4, (512, 15.63), (32768, 17.25), (524288, 17.67), (4194304, 36.49),
          (8388608, 87.93), (67108864, 182.4), (536870912, 1282)),
    curve("all_to_all", 2, (1024, 9.82), (131072, 14.56), (524288, 17.3), (8388608, 21.58),
          (134217728, 127.4), (1073741824, 807.6)),
    curve("all_to_all", 4, (2048, 10.68), (524288, 15.6), (67108864, 46.66),
          (2147483648, 825.4)),
    curve("reduce_scatter", 2, (512, 9.385), (8192, 9.83), (4194304, 22.52),
          (536870912, 656.9)),
    curve("reduce_scatter", 4, (512, 11.81), (32768, 12.71), (1048576, 14.62),
          (4194304, 25.03), (8388608, 49.22), (67108864, 108.2), (536870912, 733.3)),
)
NVLINK5_NVL72 = link("nvlink5-nvl72", 900, 6, efficiency=0.8, launch_s=8e-6, step_s=1.25e-6,
                     source="fitted", p2p_gb_s=746, fit_error=0.03, **BESIDE,
                     reference=f"{NCCL} (GB200, 2 and 4 GPUs); messages: {ENGINEERING}; "
                               "overlap as A100",
                     curves=NVLINK5_NVL72_CURVES)
# Attention: assumption.
PRESET = Preset(memory_gb=180, bandwidth_gb_s=8000, fp64=40, fp32=80, half=2250, tf32=1125,
                fp8=4500, processors=148, cache_mb=126, reference="SXM data sheet", attention=0.35,
                in_runs=HOPPER_RUNS, narrow_in_runs=NARROW_HOPPER_RUNS,
                attention_in_runs=HOPPER_RUNS,
                matmul=MATMUL, link=NVLINK5, other_links=(NVLINK5_NVL72,), network=INFINIBAND_NDR,
                bus=PCIE_5, capability="10.0", reported="B200", accelerator="B200")
