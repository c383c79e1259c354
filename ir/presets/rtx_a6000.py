"""NVIDIA RTX A6000."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=0.809, wide_share=0.632, floor_s=1e-06, depth=166, split_depth=24.6,
                 quantum=0.702, small_tile=0.871, droop=0.001, band=0.15, source="fitted",
                 reference="3 community figures of large products; form of another GPU's fit")
PRESET = Preset(memory_gb=48, bandwidth_gb_s=768, fp64=0.6, fp32=38.7, half=154.8, tf32=77.4,
                processors=84, cache_mb=6, matmul=MATMUL, capability="8.6", reported="RTX A6000",
                accelerator="RTXA6000")
