"""NVIDIA H100 of 96 GB HBM2e and 500 W."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import INFINIBAND_NDR, PCIE_5
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.h100_sxm import HOPPER_ROWS, HOPPER_RUNS, NARROW_HOPPER_RUNS, NVLINK4

# fmt: off
MATMUL = OpCurve(share=0.717, wide_share=0.818, floor_s=2.59e-06, depth=149, split_depth=921,
                 quantum=0.0211, small_tile=0.934, droop=0.0544, band=0.2,
                 reference="h100-sxm, its clock cut by power")
PRESET = Preset(memory_gb=96, bandwidth_gb_s=2400, fp64=34, fp32=67, half=989, tf32=494.5, fp8=1979,
                in_runs=HOPPER_RUNS, narrow_in_runs=NARROW_HOPPER_RUNS,
                attention_in_runs=HOPPER_RUNS,
                processors=132, cache_mb=50, attention=0.36, rows=HOPPER_ROWS,
                reference="H100 SXM of 96 GB HBM2e and 500 W, not sold freely: six stacks of HBM2e "
                          "at the 400 GB/s each that H100 PCIe has; peaks of the SXM5, shares cut "
                          "by its power",
                matmul=MATMUL, link=NVLINK4, network=INFINIBAND_NDR, bus=PCIE_5,
                capability="9.0", reported="H100")
