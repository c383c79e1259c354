"""NVIDIA GeForce RTX 3090."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=1.09, wide_share=0.701, floor_s=1e-06, depth=108, split_depth=15.9,
                 quantum=0.702, small_tile=0.871, droop=0.001, band=0.15, source="fitted",
                 reference="6 community figures of large products; form of another GPU's fit")
PRESET = Preset(memory_gb=24, bandwidth_gb_s=936, fp64=0.56, fp32=35.6, half=71, tf32=35.6,
                processors=82, cache_mb=6, copy=0.89, matmul=MATMUL,
                capability="8.6", reported="RTX 3090",
                accelerator="RTX3090")
