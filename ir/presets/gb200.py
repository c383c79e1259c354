"""NVIDIA GB200: its Blackwell GPUs, up to 72 of which share one NVLink domain (`gb200:1x72`)."""

from dataclasses import replace

from meshwright.ir.cluster.links import INFINIBAND_NDR, PCIE_5
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.b200 import MATMUL as OF_B200
from meshwright.ir.presets.b200 import NVLINK5_NVL72
from meshwright.ir.presets.h100_sxm import HOPPER_RUNS, NARROW_HOPPER_RUNS

# fmt: off
# Its largest product reaches 72.9 % of 2,500 TFLOP/s where B200's reaches 77.6 % of 2,250; the form
# of smaller ones is B200's.
MATMUL = replace(OF_B200, share=round(OF_B200.share * 0.729 / 0.776, 3), band=0.15,
                 reference="maximum achievable matmul, stas00/ml-engineering; form of B200's fit")
# Attention: assumption, as B200's. The link to the CPU is NVLink-C2C; what copies reach there
# nobody has told us, so that of PCIe 5 stands.
PRESET = Preset(memory_gb=186, bandwidth_gb_s=8000, fp64=40, fp32=80, half=2500, tf32=1250,
                fp8=5000, processors=148, cache_mb=126, attention=0.35,
                in_runs=HOPPER_RUNS, narrow_in_runs=NARROW_HOPPER_RUNS,
                attention_in_runs=HOPPER_RUNS, matmul=MATMUL,
                link=NVLINK5_NVL72, network=INFINIBAND_NDR, bus=PCIE_5,
                capability="10.0", reported="GB200",
                reference="NVL72 data sheet", accelerator="GB200")
