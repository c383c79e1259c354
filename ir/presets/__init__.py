"""Well-known devices: one file each, whose name with dashes is the preset's.

A file has `PRESET`, an `ir.cluster.preset.Preset`. MESHWRIGHT_PRESETS names folders with more.
"""

import sys

from meshwright.ir.cluster.device import DeviceType, Link, OpClass
from meshwright.ir.cluster.links import INSIDE
from meshwright.ir.cluster.links import NETWORKS as SHARED
from meshwright.ir.cluster.preset import Preset
from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders

add_folders("MESHWRIGHT_PRESETS", __path__)
_FILES = Files(sys.modules[__name__], "preset", dashed=True)
PRESETS: dict[str, Preset] = {name: _FILES.load(name).PRESET for name in _FILES.names}


def _devices() -> dict[str, DeviceType]:
    from meshwright.ir.presets.v100_16 import CONVOLUTION  # our path has just been completed

    return {name: preset.device(name, CONVOLUTION) for name, preset in PRESETS.items()}


def _links() -> dict[str, Link]:
    found = {link.name: link for link in (*INSIDE, *(network.link for network in SHARED))}
    for name, preset in PRESETS.items():
        for link in (preset.link, *preset.other_links, preset.network.link, preset.bus):
            if found.setdefault(link.name, link) != link:
                raise PlanError(
                    f"preset {name}: a link {link.name!r} is described otherwise already; give it "
                    "another name"
                )
    return found


DEVICES = _devices()
LINKS = _links()
NETWORKS = {n.link.name: n for n in (*SHARED, *(p.network for p in PRESETS.values()))}
MACHINES = {name: (p.link.name, p.network.link.name) for name, p in PRESETS.items()}
"""Device -> link inside a node, network between nodes."""
_MEMORY = {
    OpClass.NORMALIZATION: 0.6,
    OpClass.REDUCTION: 0.6,
    OpClass.ELEMENTWISE: 0.8,
    OpClass.TRANSCENDENTAL: 0.8,
    OpClass.GATHER: 0.4,
    OpClass.COPY: 0.8,
}
"""Shares of memory bandwidth of a CPU process; assumptions."""


def device(name: str, *also: str) -> DeviceType:
    """The device type of a preset; PlanError lists the names, and what is legal `also`."""
    _FILES.check(name, *also)
    return DEVICES[name]


def network(name: str, devices_per_node: int, num_nodes: int = 2) -> Link:
    """The tier that a network is between nodes; PlanError lists the names."""
    if name not in NETWORKS:
        raise PlanError(f"no network {name!r}; the networks are {', '.join(NETWORKS)}")
    return NETWORKS[name].between(devices_per_node, num_nodes)


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
        reference="one core of a server CPU; mw.measure_local measures it",
    )
