"""NVIDIA A100 of 40 GB, SXM4."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import INFINIBAND_HDR
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.a100_80 import AMPERE_BATCHES, AMPERE_ROWS, AMPERE_RUNS, NVLINK3

# fmt: off
MATMUL = OpCurve(share=0.809, wide_share=0.919, floor_s=1e-06, depth=262, split_depth=38.7,
                 quantum=0.702, small_tile=0.871, droop=0.001, band=0.15, source="fitted",
                 reference="4 community figures of large products; form of another GPU's fit")
# Attention: as A100 of 80 GB.
PRESET = Preset(memory_gb=40, bandwidth_gb_s=1555, fp64=9.7, fp32=19.5, half=312, tf32=156,
                processors=108, cache_mb=40, copy=0.73, rows=AMPERE_ROWS, batches=AMPERE_BATCHES,
                reference="SXM4 data sheet", attention=0.62, matmul=MATMUL, link=NVLINK3,
                in_runs=AMPERE_RUNS, network=INFINIBAND_HDR,
                capability="8.0", reported="A100", accelerator="A100")
