"""Constants of links and networks, each with where it comes from.

Curves are fitted by benchmarks/fit_links.py to published NCCL timings, as are efficiencies,
launches and steps where the source says fitted. The rest is what data sheets say, or an assumption.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.ir.device import Curve, Link
from meshwright.ir.errors import PlanError
from meshwright.ir.preset_curves import CURVES

_NCCL = "NCCL timings collected by ai-dynamo/aiconfigurator (095f58a), 2-8 GPUs"
_ENGINEERING = "stas00/ml-engineering (744d01e)"


def _link(name: str, gb_s: float, latency_us: float, **rest: Any) -> Link:
    """`p2p_gb_s`: what one message reaches, where that is known apart from the data sheet."""
    rate = rest.pop("p2p_gb_s", None)
    curves = (*CURVES.get(name, ()), *rest.pop("curves", ()))
    if rate is not None:
        first, nbytes = latency_us * 1e-6, 2.0**30
        points = ((0.0, first), (nbytes, first + nbytes / (rate * 1e9)))
        curves = (*curves, Curve(operation="send", size=2, points=points))
    values: Mapping[str, Any] = {"source": "datasheet", **rest}
    return Link(
        name=name,
        bandwidth_bytes_per_s=gb_s * 1e9,
        latency_s=latency_us * 1e-6,
        curves=curves,
        **values,
    )


# NCCL's kernels take multiprocessors and memory bandwidth from computation: measured on A100.
_BESIDE: Mapping[str, Any] = {"overlap_compute_slowdown": 1.13}


def _mesh(wire_gb_s: float, devices: int, launch_us: float) -> tuple[Curve, ...]:
    """Each two devices have a wire of their own, so that a group of few reaches a part of the whole
    rate: two of eight a seventh."""
    found = []
    for size in range(2, devices + 1):
        of_value = {"all_gather": 1 / size, "all_reduce": 2 / size, "all_to_all": 1 / size**2}
        for operation, share in of_value.items():
            first, nbytes = launch_us * 1e-6, 2.0**30
            points = ((0.0, first), (nbytes, first + share * nbytes / (wire_gb_s * 1e9)))
            found.append(Curve(operation=operation, size=size, points=points))
    return tuple(found)


# NVLink, AMD's mesh and PCIe. `fit_error`: median error of the half that the fit has not seen.
# Latencies of messages are assumptions.
_INSIDE = (
    _link("nvlink2", 150, 8, efficiency=0.89, launch_s=2e-5, step_s=2e-6, source="fitted",
          fit_error=0.1, **_BESIDE,
          reference="all-reduce of 2-8 GPUs from 1 MiB on: vTrain (f8dda84); below an assumption"),
    _link("nvlink3", 300, 8, efficiency=0.74, launch_s=7.7e-6, step_s=1.1e-6, source="fitted",
          p2p_gb_s=274, fit_error=0.04, **_BESIDE,
          reference=f"{_NCCL}; messages: {_ENGINEERING}; overlap: Hetu-Galvatron (cea12ff)"),
    _link("nvlink4", 450, 6, efficiency=0.95, launch_s=4.3e-6, step_s=7.8e-7, source="fitted",
          p2p_gb_s=376, fit_error=0.04, **_BESIDE,
          reference=f"{_NCCL}; messages: {_ENGINEERING}; overlap as on A100"),
    _link("nvlink4-h200", 450, 6, efficiency=0.95, launch_s=4.3e-6, step_s=7.8e-7,
          source="fitted", p2p_gb_s=376, fit_error=0.05, **_BESIDE,
          reference=f"{_NCCL}; messages as on H100: {_ENGINEERING}; overlap as on A100"),
    _link("nvlink5", 900, 6, efficiency=0.8, launch_s=8e-6, step_s=1.25e-6, source="fitted",
          p2p_gb_s=746, fit_error=0.04, **_BESIDE,
          reference=f"{_NCCL}; messages as on GB200: {_ENGINEERING}; overlap as on A100"),
    _link("nvlink5-nvl72", 900, 6, efficiency=0.8, launch_s=8e-6, step_s=1.25e-6,
          source="fitted", p2p_gb_s=746, fit_error=0.03, **_BESIDE,
          reference=f"{_NCCL} (GB200, 2 and 4 GPUs); messages: {_ENGINEERING}; overlap as A100"),
    _link("xgmi-mi300x", 7 * 48, 8, p2p_gb_s=48, launch_s=1e-5, step_s=1e-6, **_BESIDE,
          curves=_mesh(48, 8, 11),
          reference="7 wires of 64 GB/s, 48 after protocol and checks: ROCm blog (2 March 2025), "
                    "ROCm/rccl issue 1210; latencies assumptions; overlap as on A100"),
    _link("pcie3", 15.8, 12, efficiency=0.5, launch_s=1e-5, step_s=4e-6,
          reference="data sheet; efficiency an assumption: copies go through the host"),
    _link("pcie4", 31, 12, efficiency=0.5, launch_s=1e-5, step_s=4e-6,
          reference="data sheet; efficiency an assumption: no peer-to-peer, copies go by host"),
    _link("pcie5", 63, 10, efficiency=0.5, launch_s=1e-5, step_s=4e-6,
          reference="data sheet; efficiency an assumption: copies go through the host"),
    _link("pcie4-no-p2p", 2.5, 20, efficiency=0.5, launch_s=1e-5, step_s=4e-6, source="fitted",
          fit_error=0.1,
          reference=f"{_NCCL}: L40S with peer-to-peer off, far below PCIe; a trap, not a rule"),
    # Processes of one machine over Gloo; profiles replace these by measurements.
    _link("loopback", 2, 150, launch_s=1e-4, step_s=2e-4, source="assumption",
          reference="Gloo over TCP on one machine; order of magnitude"),
)  # fmt: skip

# Per device when all devices of a node of 8 send at once. An efficiency of 0.92 is what 32 GPUs on
# 4 nodes with 100 Gb/s a GPU reach with large messages in a table of stas00/ml-engineering, and
# launch and step are those of its small ones.
_FABRIC: Mapping[str, Any] = {
    "efficiency": 0.92, "launch_s": 1.5e-5, "step_s": 7e-6, "source": "fitted", "fit_error": 0.25
}  # fmt: skip
_EFA: Mapping[str, Any] = {
    "efficiency": 0.9, "launch_s": 1e-4, "step_s": 5e-5, "source": "fitted",
}  # fmt: skip
_NETWORKS = (
    _link("infiniband-edr", 6.25, 6, shared_by=2, **_FABRIC,
          reference=f"DGX-1: 4 x 100 Gb/s for 8 GPUs; the rest as a fabric of {_ENGINEERING}"),
    _link("infiniband-hdr", 25, 6, **_FABRIC,
          reference=f"DGX A100: 8 x 200 Gb/s; the rest as a fabric of {_ENGINEERING}"),
    _link("infiniband-ndr", 50, 6, **_FABRIC,
          reference=f"DGX H100: 8 x 400 Gb/s; the rest as a fabric of {_ENGINEERING}"),
    _link("roce-4x100g", 6.25, 10, shared_by=2, **_FABRIC,
          reference="4 x 100 Gb/s for 8 GPUs; the rest as InfiniBand, an assumption"),
    _link("roce-8x100g", 12.5, 10, **_FABRIC,
          reference="8 x 100 Gb/s for 8 GPUs; the rest as InfiniBand, an assumption"),
    _link("roce-8x200g", 25, 10, **_FABRIC,
          reference="8 x 200 Gb/s; the rest as InfiniBand, an assumption"),
    _link("efa-p4d", 6.25, 30, shared_by=2, **_EFA, fit_error=0.5,
          reference="AWS p4d: 4 x 100 Gb/s for 8 GPUs; the rest as efa-p6"),
    # Few bytes take 70 us on two nodes (aws-k8s-tester, pull requests 503 and 585), of which a node
    # alone takes 13: a message each way.
    _link("efa-p5", 50, 28, efficiency=0.9, launch_s=1.3e-5, step_s=2.8e-5, source="fitted",
          fit_error=0.1,
          reference="AWS p5, 2-32 nodes, 32 MiB to 8 GiB: nccl-tests of crazyguitar/"
                    "aws-gpu-communication-benchmark (October 2025)"),
    _link("efa-p6", 50, 30, **_EFA, fit_error=0.15,
          reference=f"AWS p6-b200, 4 nodes, 256 KiB to 16 GiB: {_ENGINEERING}"),
    # One port a node, bandwidth given for the node; `network` divides it.
    _link("ethernet-10g", 1.25, 40, efficiency=0.96, launch_s=4e-5, step_s=3e-5, source="fitted",
          fit_error=0.3,
          reference="NCCL 1.2 GB/s in DAPPLE's constants; step: ring latencies in ddl-benchmarks"),
    _link("ethernet-25g", 3.125, 40, efficiency=0.96, launch_s=4e-5, step_s=3e-5, source="fitted",
          fit_error=0.3,
          reference="NCCL 3.0 GB/s in DAPPLE's constants; step: ring latencies in ddl-benchmarks"),
    _link("ethernet-100g", 12.5, 30, efficiency=0.7, launch_s=4e-5, step_s=2e-5,
          reference="100 Gb/s a node; the rest assumptions (TCP)"),
)  # fmt: skip
_ONE_PORT = "ethernet"
_HASHED = "roce"
_LEAF_NODES = 32
"""Half the ports of a switch of 64, one for each node; an assumption."""
_COLLIDING = 1.4
"""All-reduces of Meta's RoCE network gained up to 40 % once its switches hashed queue pairs as well
and NCCL used several, which it does not by default (Gangidi et al., SIGCOMM 2024)."""

LINKS = {link.name: link for link in (*_INSIDE, *_NETWORKS)}
NETWORKS = tuple(link.name for link in _NETWORKS)


def network(name: str, devices_per_node: int, num_nodes: int = 2) -> Link:
    """The network of that name, its bandwidth as what each device of a node gets.

    Ethernet with several paths between its switches sends each flow along one of them, chosen by a
    hash, and the few large flows of a collective meet on some paths while others lie idle: where
    `num_nodes` are more than a leaf switch has, RoCE is taken to be slower by that.
    """
    if name not in NETWORKS:
        raise PlanError(f"no network {name!r}; the networks are {', '.join(NETWORKS)}")
    link = LINKS[name]
    if name.startswith(_HASHED) and num_nodes > _LEAF_NODES:
        link = replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / _COLLIDING,
            reference=f"{link.reference}; {_COLLIDING:g} times slower over several leaf switches: "
            "Gangidi et al., SIGCOMM 2024",
        )
    if not name.startswith(_ONE_PORT):
        return link
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / devices_per_node,
        shared_by=devices_per_node,
    )
