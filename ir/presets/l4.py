"""NVIDIA L4."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import ETHERNET_100G
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=0.575, wide_share=0.46, floor_s=1e-06, depth=135, split_depth=19.9,
                 quantum=0.702, small_tile=0.871, droop=0.001, band=0.15, source="fitted",
                 reference="4 community figures of large products; form of another GPU's fit")
PRESET = Preset(memory_gb=24, bandwidth_gb_s=300, fp64=0.5, fp32=30.3, half=121, tf32=60, fp8=242,
                processors=58, cache_mb=48, copy=0.78, matmul=MATMUL, network=ETHERNET_100G,
                capability="8.9", reported="L4", accelerator="L4")
