"""Links and networks that no single device owns, each with where its constants come from.

Efficiencies, launches and steps are fitted by benchmarks/fit/links.py to published NCCL timings
where the source says fitted. The rest is what data sheets say, or an assumption.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.ir.cluster.device import Curve, Link

NCCL = "NCCL timings collected by ai-dynamo/aiconfigurator (095f58a), 2-8 GPUs"
ENGINEERING = "stas00/ml-engineering (744d01e)"
BESIDE: Mapping[str, Any] = {"overlap_compute_slowdown": 1.13}
"""NCCL's kernels take multiprocessors and memory bandwidth from computation: measured on A100."""


def link(name: str, gb_s: float, latency_us: float, **rest: Any) -> Link:
    """Makes a link of `gb_s` GB/s a device and direction; `rest` are other fields of a Link.

    `p2p_gb_s`: what one message reaches, where that is known apart from the data sheet. Latencies
    of messages are assumptions.
    """
    rate, curves = rest.pop("p2p_gb_s", None), rest.pop("curves", ())
    if rate is not None:
        curves = (*curves, _line("send", 2, latency_us, 1.0, rate))
    return Link(
        name=name,
        bandwidth_bytes_per_s=gb_s * 1e9,
        latency_s=latency_us * 1e-6,
        **{"source": "datasheet", **rest, "curves": curves},
    )


def curve(operation: str, size: int, *points: tuple[int, float]) -> Curve:
    """Makes the curve of an operation among `size` devices; points are (bytes, microseconds)."""
    held = tuple((float(n), us * 1e-6) for n, us in points)
    return Curve(operation=operation, size=size, points=held)


def mesh(wire_gb_s: float, devices: int, launch_us: float) -> tuple[Curve, ...]:
    """Makes the curves of devices of which each two have a wire of their own, so that a group of
    few reaches a part of the whole rate: two of eight a seventh."""
    found = []
    for size in range(2, devices + 1):
        of_value = {"all_gather": 1 / size, "all_reduce": 2 / size, "all_to_all": 1 / size**2}
        found += [_line(name, size, launch_us, s, wire_gb_s) for name, s in of_value.items()]
    return tuple(found)


def _line(operation: str, size: int, launch_us: float, share: float, gb_s: float) -> Curve:
    first, nbytes = launch_us * 1e-6, 2.0**30
    points = ((0.0, first), (nbytes, first + share * nbytes / (gb_s * 1e9)))
    return Curve(operation=operation, size=size, points=points)


@dataclass(frozen=True, slots=True)
class Network:
    """What joins nodes."""

    link: Link
    """Per device when all devices of a node of 8 send at once; of the node if `one_port`."""
    one_port: bool = False
    """Whether a node has one port, however many devices."""
    hashed: bool = False
    """Whether switches choose the path of a flow by a hash: the few large flows of a collective
    meet on some paths while others lie idle, as soon as there are several leaf switches."""

    def between(self, devices_per_node: int, num_nodes: int) -> Link:
        """The tier between nodes, its bandwidth as what each device of a node gets."""
        link = self.link
        if self.hashed and num_nodes > _LEAF_NODES:
            link = replace(
                link,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / _COLLIDING,
                reference=f"{link.reference}; {_COLLIDING:g} times slower over several leaf "
                "switches: Gangidi et al., SIGCOMM 2024",
            )
        if not self.one_port:
            return link
        return replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / devices_per_node,
            shared_by=devices_per_node,
        )


_LEAF_NODES = 32
"""Half the ports of a switch of 64, one for each node; an assumption."""
_COLLIDING = 1.4
"""All-reduces of Meta's RoCE network gained up to 40 % once its switches hashed queue pairs as well
and NCCL used several, which it does not by default (Gangidi et al., SIGCOMM 2024)."""

# fmt: off
PCIE_3 = link("pcie3", 15.8, 12, efficiency=0.5, launch_s=1e-5, step_s=4e-6,
              reference="data sheet; efficiency an assumption: copies go through the host")
PCIE_4 = link("pcie4", 31, 12, efficiency=0.5, launch_s=1e-5, step_s=4e-6,
              reference="data sheet; efficiency an assumption: no peer-to-peer, copies go by host")
PCIE_5 = link("pcie5", 63, 10, efficiency=0.5, launch_s=1e-5, step_s=4e-6,
              reference="data sheet; efficiency an assumption: copies go through the host")
# Processes of one machine over Gloo; profiles replace these by measurements.
LOOPBACK = link("loopback", 2, 150, launch_s=1e-4, step_s=2e-4, source="assumption",
                reference="Gloo over TCP on one machine; order of magnitude")
# fmt: on
INSIDE = (PCIE_3, PCIE_4, PCIE_5, LOOPBACK)

# An efficiency of 0.92 is what 32 GPUs on 4 nodes with 100 Gb/s a GPU reach with large messages in
# a table of stas00/ml-engineering, and launch and step are those of its small ones.
_FABRIC: Mapping[str, Any] = {
    "efficiency": 0.92, "launch_s": 1.5e-5, "step_s": 7e-6, "source": "fitted", "fit_error": 0.25
}  # fmt: skip
_EFA: Mapping[str, Any] = {
    "efficiency": 0.9, "launch_s": 1e-4, "step_s": 5e-5, "source": "fitted",
}  # fmt: skip
_AS_FABRIC = f"the rest as a fabric of {ENGINEERING}"
_AS_INFINIBAND = "the rest as InfiniBand, an assumption"
_DAPPLE = "DAPPLE's constants; step: ring latencies in ddl-benchmarks"
# fmt: off
EFA_P5_CURVES = (
    curve("all_gather", 2, (0, 41), (4194304, 143.8), (16777216, 302.1), (33554432, 638.6),
          (268435456, 3284)),
    curve("all_reduce", 2, (0, 69), (4194304, 253.9), (268435456, 4851),
          (1073741824, 1.801e+04)),
    curve("all_to_all", 2, (0, 41), (536870912, 5307), (34359738368, 2.029e+05)),
    curve("all_gather", 4, (0, 69), (4194304, 312.2), (33554432, 805.7), (67108864, 1837),
          (268435456, 4878)),
    curve("all_reduce", 4, (0, 125), (4194304, 547.2), (1073741824, 3.611e+04)),
    curve("all_to_all", 4, (0, 97), (1073741824, 6844), (4294967296, 1.909e+04),
          (68719476736, 3.071e+05)),
    curve("all_gather", 8, (0, 97), (4194304, 639.9), (33554432, 1096), (67108864, 1804),
          (134217728, 4191), (268435456, 6403)),
    curve("all_reduce", 8, (0, 181), (8388608, 1141), (67108864, 3456),
          (268435456, 1.352e+04), (1073741824, 4.231e+04)),
    curve("all_to_all", 8, (0, 209), (8589934592, 2.771e+04), (137438953472, 3.393e+05)),
    curve("all_gather", 16, (0, 125), (4194304, 1265), (67108864, 2289), (268435456, 7594)),
    curve("all_reduce", 16, (0, 237), (8388608, 1364), (33554432, 3401),
          (1073741824, 4.521e+04)),
    curve("all_to_all", 16, (0, 433), (34359738368, 5.822e+04), (274877906944, 3.823e+05)),
    curve("all_gather", 32, (0, 153), (4194304, 2614), (134217728, 4676), (268435456, 7916)),
    curve("all_reduce", 32, (0, 293), (8388608, 1552), (67108864, 6630),
          (1073741824, 5.183e+04)),
    curve("all_to_all", 32, (0, 881), (68719476736, 6.462e+04), (549755813888, 4.134e+05)),
    curve("all_gather", 64, (0, 181), (4194304, 5236), (268435456, 8232)),
    curve("all_reduce", 64, (0, 349), (8388608, 1727), (33554432, 4091), (67108864, 8751),
          (268435456, 1.58e+04), (1073741824, 5.793e+04)),
    curve("all_to_all", 64, (0, 1777), (17179869184, 3841), (274877906944, 1.4e+05),
          (1099511627776, 4.414e+05)),
)
EFA_P6_CURVES = (
    curve("all_reduce", 4, (32768, 349.8), (524288, 396.6), (33554432, 1821),
          (67108864, 2527), (2147483648, 6.756e+04)),
)
# fmt: on

INFINIBAND_EDR = Network(
    link(
        "infiniband-edr",
        6.25,
        6,
        shared_by=2,
        **_FABRIC,
        reference=f"DGX-1: 4 x 100 Gb/s for 8 GPUs; {_AS_FABRIC}",
    )
)
INFINIBAND_HDR = Network(
    link("infiniband-hdr", 25, 6, **_FABRIC, reference=f"DGX A100: 8 x 200 Gb/s; {_AS_FABRIC}")
)
INFINIBAND_NDR = Network(
    link("infiniband-ndr", 50, 6, **_FABRIC, reference=f"DGX H100: 8 x 400 Gb/s; {_AS_FABRIC}")
)
INFINIBAND_XDR = Network(
    link("infiniband-xdr", 100, 6, **_FABRIC, reference=f"DGX B300: 8 x 800 Gb/s; {_AS_FABRIC}")
)
ROCE_4X100G = Network(
    link(
        "roce-4x100g",
        6.25,
        10,
        shared_by=2,
        **_FABRIC,
        reference=f"4 x 100 Gb/s for 8 GPUs; {_AS_INFINIBAND}",
    ),
    hashed=True,
)
ROCE_8X100G = Network(
    link(
        "roce-8x100g", 12.5, 10, **_FABRIC, reference=f"8 x 100 Gb/s for 8 GPUs; {_AS_INFINIBAND}"
    ),
    hashed=True,
)
ROCE_8X200G = Network(
    link("roce-8x200g", 25, 10, **_FABRIC, reference=f"8 x 200 Gb/s; {_AS_INFINIBAND}"), hashed=True
)
EFA_P4D = Network(
    link(
        "efa-p4d",
        6.25,
        30,
        shared_by=2,
        **_EFA,
        fit_error=0.5,
        reference="AWS p4d: 4 x 100 Gb/s for 8 GPUs; the rest as efa-p6",
    )
)
# Few bytes take 70 us on two nodes (aws-k8s-tester, pull requests 503 and 585), of which a node
# alone takes 13: a message each way.
EFA_P5 = Network(
    link(
        "efa-p5",
        50,
        28,
        efficiency=0.9,
        launch_s=1.3e-5,
        step_s=2.8e-5,
        source="fitted",
        fit_error=0.1,
        reference="AWS p5, 2-32 nodes, 32 MiB to 8 GiB: nccl-tests of crazyguitar/"
        "aws-gpu-communication-benchmark (October 2025)",
        curves=EFA_P5_CURVES,
    )
)
EFA_P6 = Network(
    link(
        "efa-p6",
        50,
        30,
        **_EFA,
        fit_error=0.15,
        reference=f"AWS p6-b200, 4 nodes, 256 KiB to 16 GiB: {ENGINEERING}",
        curves=EFA_P6_CURVES,
    )
)
# One port a node, bandwidth given for the node.
ETHERNET_10G = Network(
    link(
        "ethernet-10g",
        1.25,
        40,
        efficiency=0.96,
        launch_s=4e-5,
        step_s=3e-5,
        source="fitted",
        fit_error=0.3,
        reference=f"NCCL 1.2 GB/s in {_DAPPLE}",
    ),
    one_port=True,
)
ETHERNET_25G = Network(
    link(
        "ethernet-25g",
        3.125,
        40,
        efficiency=0.96,
        launch_s=4e-5,
        step_s=3e-5,
        source="fitted",
        fit_error=0.3,
        reference=f"NCCL 3.0 GB/s in {_DAPPLE}",
    ),
    one_port=True,
)
ETHERNET_100G = Network(
    link(
        "ethernet-100g",
        12.5,
        30,
        efficiency=0.7,
        launch_s=4e-5,
        step_s=2e-5,
        reference="100 Gb/s a node; the rest assumptions (TCP)",
    ),
    one_port=True,
)
# fmt: off
NETWORKS = (
    INFINIBAND_EDR, INFINIBAND_HDR, INFINIBAND_NDR, INFINIBAND_XDR, ROCE_4X100G, ROCE_8X100G,
    ROCE_8X200G, EFA_P4D, EFA_P5, EFA_P6, ETHERNET_10G, ETHERNET_25G, ETHERNET_100G,
)
# fmt: on
