"""NVIDIA A10G, AWS's version of the A10 (g5 machines)."""

from dataclasses import replace

from meshwright.ir.cluster.links import ETHERNET_100G
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.a10 import MATMUL as OF_A10

# fmt: off
# A10's large products reach 56 TFLOP/s; taken for A10G's too, whose peak is 70
# (cli99/llm-analysis).
MATMUL = replace(OF_A10, share=0.8, wide_share=0.8,
                 reference="A10's rate of large products, an assumption; form of another GPU's fit")
PRESET = Preset(memory_gb=24, bandwidth_gb_s=600, fp64=0.55, fp32=35, half=70, tf32=35,
                processors=80, cache_mb=6, copy=0.78, matmul=MATMUL, network=ETHERNET_100G,
                capability="8.6", reported="A10G", accelerator="A10G")
