"""NVIDIA GB300: Blackwell Ultra GPUs, up to 72 of which share one NVLink domain (`gb300:1x72`)."""

from dataclasses import replace

from meshwright.ir.cluster.links import INFINIBAND_XDR, PCIE_5
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.b200 import NVLINK5_NVL72
from meshwright.ir.presets.gb200 import MATMUL as OF_GB200
from meshwright.ir.presets.h100_sxm import HOPPER_RUNS, NARROW_HOPPER_RUNS

# fmt: off
# Nobody has told us what its products reach. Peaks are GB200's, and large products on Blackwell are
# limited by power, of which it has 1.4 kW for 1.2: the share grows by that, an assumption (with
# GB200's own, a calibration row, Llama 3 8B on 8 of them, was 10 % too slow). Its float64 is a
# thirtieth of GB200's. Attention: assumption, as B200's, though its exponentials are twice as fast.
# The link to the CPU is NVLink-C2C; that of PCIe 5 stands, as on GB200.
MATMUL = replace(OF_GB200, share=round(OF_GB200.share * 1.4 / 1.2, 3), source="assumption",
                 band=0.2, reference="GB200's, by the power of both")
PRESET = Preset(memory_gb=278, bandwidth_gb_s=8000, fp64=1.3, fp32=80, half=2500, tf32=1250,
                fp8=5000, processors=160, cache_mb=126, attention=0.35,
                in_runs=HOPPER_RUNS, narrow_in_runs=NARROW_HOPPER_RUNS,
                attention_in_runs=HOPPER_RUNS, matmul=MATMUL,
                link=NVLINK5_NVL72, network=INFINIBAND_XDR, bus=PCIE_5,
                capability="10.3", reported="GB300",
                reference="verda.com/blog/gb300-nvl72-architecture, of NVIDIA's data sheet")
