"""AMD MI300X."""

from meshwright.ir.cluster.device import OpCurve
from meshwright.ir.cluster.links import BESIDE, INFINIBAND_NDR, PCIE_5, link, mesh
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.presets.h100_sxm import HOPPER_RUNS, NARROW_HOPPER_RUNS

# fmt: off
FP8_SHARE = 0.8
"""990 against 620 TFLOP/s in shapes of Llama 70B (SemiAnalysis, MI300X vs H100 vs H200, December
2024), where H100 has 1280 against 720: 0.795 and 0.89 of twice the rate."""
MATMUL = OpCurve(share=0.546, floor_s=1e-06, depth=255, split_depth=37.7, quantum=0.702,
                 small_tile=0.871, droop=0.001, band=0.15, source="fitted",
                 reference="1 community figures of large products; form of another GPU's fit")
XGMI_MI300X = link("xgmi-mi300x", 7 * 48, 8, p2p_gb_s=48, launch_s=1e-5, step_s=1e-6, **BESIDE,
                   curves=mesh(48, 8, 11),
                   reference="7 wires of 64 GB/s, 48 after protocol and checks: ROCm blog (2 March "
                             "2025), ROCm/rccl issue 1210; latencies assumptions; overlap as "
                             "on A100")
# Attention: 310-355 TFLOP/s forward, 194-207 backward: ROCm/flash-attention, issue 142.
PRESET = Preset(memory_gb=192, bandwidth_gb_s=5300, fp64=81.7, fp32=163.4, half=1300, tf32=653.7,
                fp8=2610, fp8_share=FP8_SHARE, processors=304, cache_mb=256, attention_backward=1.7,
                in_runs=HOPPER_RUNS, narrow_in_runs=NARROW_HOPPER_RUNS,
                attention_in_runs=HOPPER_RUNS,
                attention=0.26, matmul=MATMUL, link=XGMI_MI300X, network=INFINIBAND_NDR, bus=PCIE_5,
                capability="gfx942", reported="MI300X", accelerator="MI300X")
