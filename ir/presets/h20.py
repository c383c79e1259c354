"""NVIDIA H20, SXM: Hopper with a seventh of an H100's products, and its memory and NVLink."""

from dataclasses import replace

from meshwright.ir.cluster.links import INFINIBAND_NDR, PCIE_5
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.h100_sxm import MATMUL as OF_H100
from meshwright.ir.presets.h200 import NVLINK4_H200

# fmt: off
MATMUL = replace(OF_H100, share=0.96, wide_share=0.96, droop=0.0, band=0.15,
                 reference="2 community figures of large products; form of H100's fit")
# In whole runs: as kernels alone (assumption), since products at a seventh of the rate leave the
# card below its power limit, which is what slows H100 down. Peaks and processors are from memory of
# its data sheet. Attention: assumption.
PRESET = Preset(memory_gb=96, bandwidth_gb_s=4000, fp64=1, fp32=44, half=148, tf32=74, fp8=296,
                processors=78, cache_mb=60, attention=0.7, matmul=MATMUL, link=NVLINK4_H200,
                network=INFINIBAND_NDR, bus=PCIE_5,
                capability="9.0", reported="H20", reference="SXM data sheet",
                accelerator="H20")
