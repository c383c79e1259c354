"""NVIDIA GB300: Blackwell Ultra GPUs, up to 72 of which share one NVLink domain (`gb300:1x72`)."""

from dataclasses import replace

from meshwright.ir.cluster.links import INFINIBAND_XDR
from meshwright.ir.presets.gb200 import PRESET as GB200

# fmt: off
# What is not named is GB200's; of its attention that is an assumption, as its exponentials are
# twice as fast. Nobody has told us what its products reach. Peaks are GB200's, and large products
# on Blackwell are limited by power, of which it has 1.4 kW for 1.2: the share grows by that, an
# assumption (with GB200's own, a calibration row, Llama 3 8B on 8 of them, was 10 % too slow).
MATMUL = replace(GB200.matmul, share=round(GB200.matmul.share * 1.4 / 1.2, 3), source="assumption",
                 band=0.2, reference="GB200's, by the power of both")
PRESET = replace(GB200, memory_gb=278, fp64=1.3, processors=160, matmul=MATMUL,
                 network=INFINIBAND_XDR, capability="10.3", reported="GB300", accelerator="",
                 reference="verda.com/blog/gb300-nvl72-architecture, of NVIDIA's data sheet")
