"""NVIDIA GeForce RTX 4090."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.preset import Preset

# fmt: off
MATMUL = OpCurve(share=1.02, wide_share=0.666, floor_s=1e-06, depth=150, split_depth=22.2,
                 quantum=0.702, small_tile=0.871, droop=0.001, band=0.15, source="fitted",
                 reference="21 community figures of large products; form of another GPU's fit")
PRESET = Preset(memory_gb=24, bandwidth_gb_s=1008, fp64=1.3, fp32=82.6, half=165.2, tf32=82.6,
                fp8=330.3, processors=128, cache_mb=72, copy=0.90,
                reference="data sheet, with fp32 accumulation", matmul=MATMUL,
                capability="8.9", reported="RTX 4090",
                accelerator="RTX4090")
