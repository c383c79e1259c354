"""NVIDIA P100, PCIe."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import PCIE_3
from meshwright.ir.cluster.preset import Preset

# fmt: off
_COPY = 0.85 * 900 / 1.5 / 732
"""V100 delivers 1.5 times the bandwidth of P100, 900 GB/s against 732 at their peaks: Volta's
memory controller reaches more of it (NVIDIA WP-08608-001, 2017)."""
MATMUL = OpCurve(share=0.453, wide_share=0.937, floor_s=4.46e-06, depth=21.7, split_depth=1,
                 quantum=0.484, small_tile=0.975, droop=0.001, band=0.0365, source="fitted",
                 reference="200 GEMMs of DeepBench (da81ba7); cut to large products")
CONVOLUTION = OpCurve(share=0.85, wide_share=0.837, floor_s=3.69e-05, depth=0.1, split_depth=134,
                      quantum=0.25, small_tile=0.833, droop=0.001, band=0.475, source="fitted",
                      reference="252 kernels of DeepBench (da81ba7)")
PRESET = Preset(memory_gb=16, bandwidth_gb_s=732, fp64=4.7, fp32=9.3, half=18.7, bf16=9.3,
                processors=56, cache_mb=4, copy=_COPY, copy_source="datasheet",
                copy_from="two thirds of V100's copies: NVIDIA WP-08608-001 (2017), HBM2 section",
                reference="PCIe data sheet, from memory; no tensor cores", matmul=MATMUL,
                convolution=CONVOLUTION, link=PCIE_3, bus=PCIE_3, capability="6.0", reported="P100",
                accelerator="P100")
