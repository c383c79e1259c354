"""Constants of common devices and networks, each with where it comes from.

`datasheet` figures are vendor peaks as collected by stas00/ml-engineering (commit 744d01e),
cli99/llm-analysis (d841e40) and ai-dynamo/aiconfigurator (095f58a). `fitted` figures were fitted to
measurements published there. float64 peaks are from memory of the vendors' data sheets.
"""

from dataclasses import replace

from meshwright.ir.device import DeviceType, Link, OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.preset_devices import DEVICES as DEVICES

# Shares of memory bandwidth of a CPU process; assumptions.
_MEMORY = {
    OpClass.NORMALIZATION: 0.6,
    OpClass.REDUCTION: 0.6,
    OpClass.ELEMENTWISE: 0.8,
    OpClass.TRANSCENDENTAL: 0.8,
    OpClass.GATHER: 0.4,
    OpClass.COPY: 0.8,
}


def _link(name: str, gb_s: float, latency_us: float, **rest: object) -> Link:
    values: dict[str, object] = {"source": "datasheet", **rest}
    return Link(
        name=name,
        bandwidth_bytes_per_s=gb_s * 1e9,
        latency_s=latency_us * 1e-6,
        **values,  # type: ignore[arg-type]  # checked by Link itself
    )


# Efficiency, launch and step of the NVLinks: fitted to the NCCL timings of aiconfigurator (four
# collectives, 2-8 GPUs, 512 B to 512 MiB), mean error 16 %. Point-to-point latency: assumption.
LINKS = {
    link.name: link
    for link in (
        _link("nvlink2", 150, 8, efficiency=0.55, launch_s=1e-5, step_s=1e-6,
              reference="data sheet; 135 GB/s bus bandwidth measured by vTrain at 1 GiB"),
        _link("nvlink3", 300, 8, efficiency=0.52, launch_s=1e-5, step_s=1e-6, source="fitted",
              reference="300 GB/s data sheet; NCCL fit"),
        _link("nvlink4", 450, 6, efficiency=0.56, launch_s=6e-6, step_s=7.5e-7, source="fitted",
              reference="450 GB/s data sheet; NCCL fit"),
        _link("nvlink5", 900, 6, efficiency=0.50, launch_s=8e-6, step_s=1.25e-6, source="fitted",
              reference="900 GB/s data sheet; NCCL fit"),
        _link("pcie4", 31, 12, efficiency=0.5, launch_s=1e-5, step_s=4e-6,
              reference="data sheet; efficiency an assumption: no peer-to-peer, copies go by host"),
        # Per device: one network card each, or the node's card divided among its devices.
        _link("infiniband-edr", 6.25, 6, efficiency=0.8, launch_s=1.5e-5, step_s=5e-6,
              reference="DGX-1: 4 x 100 Gb/s for 8 GPUs; the rest assumptions"),
        _link("infiniband-hdr", 25, 6, efficiency=0.8, launch_s=1.5e-5, step_s=5e-6,
              reference="DGX A100: 8 x 200 Gb/s; the rest assumptions"),
        _link("infiniband-ndr", 50, 6, efficiency=0.8, launch_s=1.5e-5, step_s=5e-6,
              reference="DGX H100: 8 x 400 Gb/s; the rest assumptions"),
        _link("ethernet-25g", 3.125, 40, efficiency=0.7, launch_s=4e-5, step_s=3e-5,
              reference="25 Gb/s a node; the rest assumptions (TCP)"),
        _link("ethernet-100g", 12.5, 30, efficiency=0.7, launch_s=4e-5, step_s=2e-5,
              reference="100 Gb/s a node; the rest assumptions (TCP)"),
        # Processes of one machine over Gloo; costmodel.measure replaces these by measurements.
        _link("loopback", 2, 150, launch_s=1e-4, step_s=2e-4, source="assumption",
              reference="Gloo over TCP on one machine; order of magnitude"),
    )
}  # fmt: skip

# Device -> link inside a node, network between nodes.
MACHINES = {
    "v100-16": ("nvlink2", "infiniband-edr"),
    "v100-32": ("nvlink2", "infiniband-edr"),
    "a100-40": ("nvlink3", "infiniband-hdr"),
    "a100-80": ("nvlink3", "infiniband-hdr"),
    "h100-sxm": ("nvlink4", "infiniband-ndr"),
    "h200": ("nvlink4", "infiniband-ndr"),
    "b200": ("nvlink5", "infiniband-ndr"),
    "h100-pcie": ("pcie4", "infiniband-ndr"),
    "h100-hbm2e": ("nvlink4", "infiniband-ndr"),
    "l4": ("pcie4", "ethernet-100g"),
    "l40s": ("pcie4", "ethernet-100g"),
    "a10": ("pcie4", "ethernet-100g"),
    "mi300x": ("nvlink4", "infiniband-ndr"),
    "rtx-a6000": ("pcie4", "ethernet-25g"),
    "rtx3090": ("pcie4", "ethernet-25g"),
    "rtx4090": ("pcie4", "ethernet-25g"),
    "t4": ("pcie4", "ethernet-25g"),
    "p100": ("pcie4", "ethernet-25g"),
}
NETWORKS = tuple(name for name in LINKS if name.startswith(("infiniband", "ethernet")))


def device(name: str) -> DeviceType:
    """The device type of a preset; PlanError lists the names."""
    if name not in DEVICES:
        raise PlanError(f"no preset {name!r}; the presets are {', '.join(DEVICES)}")
    return DEVICES[name]


def network(name: str, devices_per_node: int) -> Link:
    """The network of that name, its bandwidth as what each device of a node gets."""
    if name not in NETWORKS:
        raise PlanError(f"no network {name!r}; the networks are {', '.join(NETWORKS)}")
    link = LINKS[name]
    if name.startswith("infiniband"):
        return link
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / devices_per_node)


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
