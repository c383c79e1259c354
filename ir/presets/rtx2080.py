"""NVIDIA GeForce RTX 2080."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import PCIE_3
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=0.8, wide_share=0.85, floor_s=2.77e-06, depth=200, split_depth=836,
                 quantum=0.085, small_tile=0.937, droop=0.001, band=0.3, source="assumption",
                 reference="form of T4's fit, which is of the same architecture")
PRESET = Preset(memory_gb=8, bandwidth_gb_s=448, fp64=0.31, fp32=10.1, half=40.3, bf16=10.1,
                processors=46, cache_mb=4,
                reference="data sheet, with fp32 accumulation; no bf16 tensor cores",
                matmul=MATMUL, link=PCIE_3, bus=PCIE_3, capability="7.5", reported="RTX 2080")
