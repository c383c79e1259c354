"""NVIDIA H100, PCIe."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import INFINIBAND_NDR, PCIE_5
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.h100_sxm import HOPPER_ROWS

# fmt: off
MATMUL = OpCurve(share=0.628, wide_share=0.774, floor_s=2.59e-06, depth=100, split_depth=618,
                 quantum=0.0211, small_tile=0.934, droop=0.0544, band=0.15, source="fitted",
                 reference="4 community figures of large products; form of another GPU's fit")
PRESET = Preset(memory_gb=80, bandwidth_gb_s=2000, fp64=26, fp32=51, half=756, tf32=378, fp8=1513,
                processors=114, cache_mb=50, copy=0.82, attention=0.35, rows=HOPPER_ROWS,
                reference="PCIe data sheet", matmul=MATMUL, link=PCIE_5, network=INFINIBAND_NDR,
                bus=PCIE_5, capability="9.0", reported="H100 PCIe")
