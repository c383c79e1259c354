"""NVIDIA B300 (Blackwell Ultra), SXM, in boards of eight."""

from dataclasses import replace

from meshwright.ir.cluster.links import INFINIBAND_XDR
from meshwright.ir.presets.b200 import PRESET as B200

# fmt: off
# What is not named is B200's. Of its attention that is an assumption, as its exponentials are twice
# as fast, and of what its products reach; its bus is PCIe 6, of which nobody has told us more.
MATMUL = replace(B200.matmul, source="assumption", band=0.2, reference="as B200's")
PRESET = replace(B200, memory_gb=270, fp64=1.25, fp32=75, matmul=MATMUL, other_links=(),
                 network=INFINIBAND_XDR, capability="10.3", reported="B300", accelerator="",
                 reference="glennklockwood.com/garden/processors/B300 and "
                           "verda.com/blog/gb300-nvl72-architecture, of NVIDIA's data sheet")
