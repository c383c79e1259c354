"""NVIDIA A10."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import ETHERNET_100G
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=0.451, wide_share=0.457, floor_s=1e-06, depth=88.6, split_depth=13.1,
                 quantum=0.702, small_tile=0.871, droop=0.001, band=0.15, source="fitted",
                 reference="2 community figures of large products; form of another GPU's fit")
PRESET = Preset(memory_gb=24, bandwidth_gb_s=600, fp64=0.5, fp32=31.2, half=125, tf32=62.5,
                processors=72, cache_mb=6, copy=0.78, matmul=MATMUL, network=ETHERNET_100G,
                capability="8.6", reported="A10", accelerator="A10")
