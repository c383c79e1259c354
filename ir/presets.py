"""Constants of common devices and networks, each with where it comes from.

`datasheet` figures are vendor peaks as collected by stas00/ml-engineering (commit 744d01e),
cli99/llm-analysis (d841e40) and ai-dynamo/aiconfigurator (095f58a). `fitted` figures were fitted to
measurements published there. float64 peaks are from memory of the vendors' data sheets.
"""

from meshwright.ir.device import DeviceType, OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.preset_devices import DEVICES as DEVICES
from meshwright.ir.preset_links import LINKS as LINKS
from meshwright.ir.preset_links import NETWORKS as NETWORKS
from meshwright.ir.preset_links import network as network

# Shares of memory bandwidth of a CPU process; assumptions.
_MEMORY = {
    OpClass.NORMALIZATION: 0.6,
    OpClass.REDUCTION: 0.6,
    OpClass.ELEMENTWISE: 0.8,
    OpClass.TRANSCENDENTAL: 0.8,
    OpClass.GATHER: 0.4,
    OpClass.COPY: 0.8,
}


# Device -> link inside a node, network between nodes.
MACHINES = {
    "v100-16": ("nvlink2", "infiniband-edr"),
    "v100-32": ("nvlink2", "infiniband-edr"),
    "a100-40": ("nvlink3", "infiniband-hdr"),
    "a100-80": ("nvlink3", "infiniband-hdr"),
    "h100-sxm": ("nvlink4", "infiniband-ndr"),
    "h200": ("nvlink4-h200", "infiniband-ndr"),
    "b200": ("nvlink5", "infiniband-ndr"),
    "h100-pcie": ("pcie5", "infiniband-ndr"),
    "h100-hbm2e": ("nvlink4", "infiniband-ndr"),
    "l4": ("pcie4", "ethernet-100g"),
    "l40s": ("pcie4", "ethernet-100g"),
    "a10": ("pcie4", "ethernet-100g"),
    "mi300x": ("xgmi-mi300x", "infiniband-ndr"),
    "rtx-a6000": ("pcie4", "ethernet-25g"),
    "rtx3090": ("pcie4", "ethernet-25g"),
    "rtx4090": ("pcie4", "ethernet-25g"),
    "t4": ("pcie3", "ethernet-25g"),
    "p100": ("pcie3", "ethernet-25g"),
}


def device(name: str) -> DeviceType:
    """The device type of a preset; PlanError lists the names."""
    if name not in DEVICES:
        raise PlanError(f"no preset {name!r}; the presets are {', '.join(DEVICES)}")
    return DEVICES[name]


def cpu_process(memory_bytes: int) -> DeviceType:
    """One CPU process with a core to itself; assumptions until measured."""
    compute = {OpClass.MATMUL: 0.7, OpClass.ATTENTION: 0.35, OpClass.CONVOLUTION: 0.4,
               OpClass.RECURRENT: 0.3}  # fmt: skip
    return DeviceType(
        name="cpu",
        kind="cpu",
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=8e9,
        # One core with 256-bit vectors: 2 FMA units x 8 floats x 2 x 3 GHz.
        peak_flops={"float64": 48e9, "float32": 96e9, "float16": 10e9, "bfloat16": 24e9},
        efficiency=compute | _MEMORY | {OpClass.TRANSCENDENTAL: 0.3},
        overhead_s=8e-6,
        reserved_bytes=0,
        source="assumption",
        reference="one core of a server CPU; costmodel.measure.measure_local measures it",
    )
