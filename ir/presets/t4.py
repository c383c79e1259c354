"""NVIDIA T4."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import PCIE_3
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=0.76, wide_share=0.619, floor_s=2.77e-06, depth=200, split_depth=836,
                 quantum=0.085, small_tile=0.937, droop=0.173, band=0.145, source="fitted",
                 reference="200 GEMMs of DeepBench (da81ba7)")
CONVOLUTION = OpCurve(share=0.506, wide_share=0.489, floor_s=1.19e-05, depth=35.6,
                      split_depth=3.91e03, quantum=0.427, small_tile=0.982, droop=0.001, band=0.486,
                      source="fitted", reference="483 kernels of DeepBench (da81ba7)")
PRESET = Preset(memory_gb=16, bandwidth_gb_s=320, fp64=0.25, fp32=8.1, half=65, bf16=8.1,
                processors=40, cache_mb=4, copy=0.75, reference="data sheet; no bf16 tensor cores",
                matmul=MATMUL, convolution=CONVOLUTION, link=PCIE_3, bus=PCIE_3,
                capability="7.5", reported="T4",
                accelerator="T4")
