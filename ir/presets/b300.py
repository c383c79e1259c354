"""NVIDIA B300 (Blackwell Ultra), SXM, in boards of eight."""

from dataclasses import replace

from meshwright.ir.cluster.links import INFINIBAND_XDR, PCIE_5
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.b200 import MATMUL as OF_B200
from meshwright.ir.presets.b200 import NVLINK5
from meshwright.ir.presets.h100_sxm import HOPPER_RUNS, NARROW_HOPPER_RUNS

# fmt: off
# Nobody has told us what its products reach: the share of the peak is B200's, an assumption.
# Attention: assumption, as B200's, though its exponentials are twice as fast. Its bus is PCIe 6;
# what copies reach there nobody has told us either, so that of PCIe 5 stands.
MATMUL = replace(OF_B200, source="assumption", band=0.2, reference="as B200's")
PRESET = Preset(memory_gb=270, bandwidth_gb_s=8000, fp64=1.25, fp32=75, half=2250, tf32=1125,
                fp8=4500, processors=148, cache_mb=126, attention=0.35,
                in_runs=HOPPER_RUNS, narrow_in_runs=NARROW_HOPPER_RUNS,
                attention_in_runs=HOPPER_RUNS, matmul=MATMUL,
                link=NVLINK5, network=INFINIBAND_XDR, bus=PCIE_5,
                capability="10.3", reported="B300",
                reference="glennklockwood.com/garden/processors/B300 and "
                          "verda.com/blog/gb300-nvl72-architecture, of NVIDIA's data sheet")
