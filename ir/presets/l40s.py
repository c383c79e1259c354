"""NVIDIA L40S."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import ETHERNET_100G, NCCL, curve, link
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=0.824, wide_share=0.739, floor_s=1e-06, depth=222, split_depth=260,
                 quantum=0.786, small_tile=0.872, droop=0.415, band=0.132, source="fitted",
                 reference="486 GEMMs of aiconfigurator (095f58a)")
PCIE4_NO_P2P_CURVES = (
    curve("all_gather", 2, (512, 5.295), (1024, 5.295), (2048, 7.549), (16384, 7.549),
          (262144, 18.31), (524288, 35.37), (4194304, 121.8), (536870912, 1.37e+04)),
    curve("all_gather", 4, (512, 8.63), (1024, 9.621), (16384, 10.55), (262144, 66.63),
          (1048576, 154.6), (536870912, 8.496e+04)),
    curve("all_gather", 8, (512, 13.76), (4096, 15.12), (8192, 21.81), (16384, 23.32),
          (65536, 86), (524288, 562.2), (1048576, 562.2), (134217728, 9.932e+04),
          (268435456, 1.155e+05), (536870912, 4.002e+05)),
    curve("all_reduce", 2, (512, 6.585), (262144, 30.67), (536870912, 2.67e+04)),
    curve("all_reduce", 4, (512, 11.89), (32768, 20.07), (262144, 109.7), (1048576, 268.3),
          (2097152, 622.1), (536870912, 1.56e+05)),
    curve("all_reduce", 8, (512, 22.51), (16384, 41.68), (32768, 90.3), (131072, 279.9),
          (1048576, 863.2), (2097152, 2618), (33554432, 3.885e+04), (67108864, 5.541e+04),
          (134217728, 1.625e+05), (536870912, 6.495e+05)),
    curve("all_to_all", 2, (1024, 7.09), (4096, 9.07), (16384, 10.34), (131072, 11.5),
          (262144, 17.2), (2097152, 43.39), (1073741824, 1.204e+04)),
    curve("all_to_all", 4, (2048, 9.47), (32768, 9.972), (524288, 53.65), (1048576, 54.9),
          (2147483648, 8.865e+04)),
    curve("all_to_all", 8, (4096, 11.74), (32768, 12.84), (262144, 62.55), (524288, 82.51),
          (2097152, 513.5), (4194304, 513.5), (268435456, 2.428e+04),
          (1073741824, 5.782e+04), (4294967296, 2.381e+05)),
    curve("reduce_scatter", 2, (512, 5.31), (4096, 6.7), (262144, 18.18), (524288, 33.88),
          (536870912, 1.418e+04)),
    curve("reduce_scatter", 4, (512, 8.48), (8192, 9.06), (262144, 67.37),
          (536870912, 8.099e+04)),
    curve("reduce_scatter", 8, (512, 13.15), (16384, 24.77), (65536, 98.37), (524288, 583.1),
          (1048576, 583.1), (8388608, 5054), (536870912, 2.842e+05)),
)
PCIE4_NO_P2P = link("pcie4-no-p2p", 2.5, 20, efficiency=0.5, launch_s=1e-5, step_s=4e-6,
                    source="fitted", fit_error=0.1,
                    reference=f"{NCCL}: L40S with peer-to-peer off, far below PCIe; "
                               "a trap, not a rule",
                    curves=PCIE4_NO_P2P_CURVES)
PRESET = Preset(memory_gb=48, bandwidth_gb_s=864, fp64=1.4, fp32=91.6, half=362, tf32=183, fp8=733,
                processors=142, cache_mb=96, matmul=MATMUL, other_links=(PCIE4_NO_P2P,),
                network=ETHERNET_100G, capability="8.9", reported="L40S", accelerator="L40S")
