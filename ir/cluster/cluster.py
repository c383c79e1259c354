"""The machines a plan is for: nodes of devices, and the link tiers between them."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Self

import psutil
from pydantic import ConfigDict, TypeAdapter, ValidationError

from meshwright.ir import presets
from meshwright.ir.cluster.device import DeviceType, Link
from meshwright.ir.cluster.links import LOOPBACK
from meshwright.ir.errors import PlanError
from meshwright.ir.text.plain_text import odd_character, shown

MAX_DEVICES = 2**20
"""Of a cluster."""
MAX_NODES = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    devices: tuple[str, ...]
    """Name of the device type in each slot."""
    link: Link
    """Between the devices of the node."""
    uplink: Link | None = None
    """To other nodes, where it differs from the cluster's."""
    rack: int = 0
    cores: int = 0
    """How many of its devices can run at full speed at once; 0 means all of them. Processes on one
    CPU share its cores."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError("a node has no devices; it needs at least one")
        if not 0 <= self.cores <= MAX_DEVICES:
            raise PlanError(
                f"a node has {self.cores} cores; it must be 0 (not shared) or more, and at most "
                f"{MAX_DEVICES:,}"
            )
        if not 0 <= self.rack <= MAX_DEVICES:
            raise PlanError(f"a node is in rack {self.rack}; it must be 0 to {MAX_DEVICES:,}")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, the device types in them, and the tiers between them.

    Ranks number the device slots node by node.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    device_types: tuple[DeviceType, ...]
    nodes: tuple[Node, ...]
    between_nodes: Link | None = None
    between_racks: Link | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise PlanError(f"cluster {self.name!r} has no nodes; it needs at least one")
        check_size(len(self.nodes), sum(len(node.devices) for node in self.nodes))
        self._check_names()
        known = {device.name for device in self.device_types}
        if len(known) != len(self.device_types):
            raise PlanError(f"cluster {self.name!r}: two device types have the same name")
        kinds = {id(node): (index, node) for index, node in reversed([*enumerate(self.nodes)])}
        for index, node in sorted(kinds.values(), key=lambda kind: kind[0]):
            if unknown := set(node.devices) - known:
                raise PlanError(
                    f"cluster {self.name!r}, node {index}: device types {sorted(unknown)} are not "
                    f"described; known are {sorted(known)}"
                )
        if len(self.nodes) > 1 and self.between_nodes is None:
            raise PlanError(f"cluster {self.name!r} has several nodes but no link between_nodes")

    def _check_names(self) -> None:
        """They get into plans, and from there into files and terminals."""
        links = {id(link): link for node in self.nodes for link in (node.link, node.uplink)}
        between = (self.between_nodes, self.between_racks)
        for one in (self, *self.device_types, *links.values(), *between):
            if one is not None and (odd := odd_character(one.name)):
                raise PlanError(f"the name {shown(one.name)} has the character {odd}; take it out")

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(len(node.devices) for node in self.nodes))

    @cached_property
    def _types(self) -> dict[str, DeviceType]:
        return {device.name: device for device in self.device_types}

    @cached_property
    def kind(self) -> Literal["cuda", "cpu"]:
        """Of its devices; of some CPUs beside GPUs, that of GPUs."""
        return "cpu" if all(x.kind == "cpu" for x in self.device_types) else "cuda"

    @property
    def num_devices(self) -> int:
        return self._ends[-1]

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @cached_property
    def widest_node(self) -> int:
        """Devices of the node that has most."""
        return max(len(node.devices) for node in self.nodes)

    @cached_property
    def node_numbers(self) -> tuple[int, ...]:
        """Index of the node of each rank."""
        return tuple(number for number, node in enumerate(self.nodes) for _ in node.devices)

    def node_of(self, rank: int) -> int:
        """Index of the node that holds global `rank`."""
        if not 0 <= rank < self._ends[-1]:
            raise PlanError(
                f"rank {rank} is not in cluster {self.name!r}: ranks are 0 to {self._ends[-1] - 1}"
            )
        return bisect_right(self._ends, rank)

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Device type name of each rank."""
        return tuple(name for node in self.nodes for name in node.devices)

    def types_of(self, ranks: Sequence[int]) -> tuple[DeviceType, ...]:
        """The distinct device types of some ranks."""
        if len(self.device_types) == 1 and ranks:
            return self.device_types
        found = dict.fromkeys(map(self.device_names.__getitem__, ranks))
        return tuple(self._types[name] for name in found)

    def device(self, rank: int) -> DeviceType:
        index = self.node_of(rank)
        node = self.nodes[index]
        return self._types[node.devices[rank - self._ends[index] + len(node.devices)]]

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The tier that carries bytes between two ranks."""
        return self.link_of_nodes(self.node_of(rank_a), self.node_of(rank_b))

    def link_of_nodes(self, a: int, b: int) -> Link:
        """The slowest link on the way between two nodes, or inside one."""
        first, second = self.nodes[a], self.nodes[b]
        if a == b:
            return first.link
        assert self.between_nodes is not None  # __post_init__ checks it
        way = [node.uplink or self.between_nodes for node in (first, second)]
        if first.rack != second.rack and self.between_racks is not None:
            way.append(self.between_racks)
        return min(way, key=lambda link: link.rate)

    def tier(self, ranks: Sequence[int]) -> Link:
        """The slowest link between any two of `ranks`."""
        nodes = sorted({self.node_of(rank) for rank in ranks})
        if len(nodes) == 1:
            return self.nodes[nodes[0]].link
        # Uplinks of single nodes and the step between racks: no need to look at all pairs.
        links = [self.link_of_nodes(nodes[0], other) for other in nodes[1:]]
        counts = {n: 0 for n in nodes}
        for rank in ranks:
            counts[self.node_of(rank)] += 1
        links += [self.nodes[n].link for n, count in counts.items() if count > 1]
        return min(links, key=lambda link: link.rate)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything a plan's time and memory depend on."""
        # The JSON of the whole, whose equal nodes are written once: there may be 100,000.
        first = _NODE.dump_json(self.nodes[0])
        said = _unsaid(self.device_types)
        small = _ADAPTER.dump_json(replace(self, nodes=self.nodes[:1]), exclude=said)
        before, _, after = small.partition(b'"nodes":[' + first)
        found = sha256(before + b'"nodes":[')
        texts = {id(node): node for node in self.nodes}
        dumped = {key: _NODE.dump_json(node) for key, node in texts.items()}
        for number, node in enumerate(self.nodes):
            found.update(b"," * bool(number) + dumped[id(node)])
        found.update(after)
        return found.hexdigest()[:16]

    @cached_property
    def prices_per_hour(self) -> tuple[float, ...] | None:
        """Of each node, with all its devices; None if a device has no price."""
        prices = [[self._types[name].price_per_hour for name in n.devices] for n in self.nodes]
        known = [[price for price in node if price is not None] for node in prices]
        return tuple(map(sum, known)) if known == prices else None

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        num_nodes: int = 1,
        devices_per_node: int = 8,
        network: str | None = None,
    ) -> Self:
        """Equal nodes of a well-known device; `network` names another tier between nodes."""
        if num_nodes < 1 or devices_per_node < 1:
            raise PlanError(
                f"a cluster of {num_nodes} nodes x {devices_per_node} devices: "
                "both must be 1 or more"
            )
        check_size(num_nodes, num_nodes * devices_per_node)
        device = presets.device(name)
        inside, between = presets.MACHINES[name]
        node = Node(devices=(name,) * devices_per_node, link=presets.LINKS[inside])
        return cls(
            name=f"{name}:{num_nodes}x{devices_per_node}" + (f"+{network}" if network else ""),
            device_types=(device,),
            nodes=(node,) * num_nodes,
            between_nodes=presets.network(network or between, devices_per_node, num_nodes),
        )

    @classmethod
    def local(cls, num_processes: int) -> Self:
        """CPU processes on this machine, with assumed speeds; `measure_local` measures them."""
        if num_processes < 1:
            raise PlanError(f"a local cluster of {num_processes} processes; it needs at least one")
        check_size(1, num_processes)
        memory = psutil.virtual_memory().total // num_processes
        node = Node(
            devices=("cpu",) * num_processes,
            link=LOOPBACK,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        )
        return cls(
            name=f"local:{num_processes}",
            device_types=(presets.cpu_process(memory),),
            nodes=(node,),
        )

    @classmethod
    def detect(cls) -> "Cluster":
        """The cluster that this torchrun job runs on; every rank must call it."""
        # Reading or describing a cluster must not import torch.
        from meshwright.ir.cluster.detect import detect

        return detect()

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """The cluster that a YAML file describes; see `ir.cluster.cluster_file` for the format."""
        from meshwright.ir.cluster.cluster_file import load  # it needs this module's types

        return load(Path(path))

    def save(self, path: str | Path) -> None:
        """Write it as YAML that `load` reads."""
        from meshwright.ir.cluster.cluster_file import save  # it needs this module's types

        save(self, Path(path))


def check_size(num_nodes: int, num_devices: int) -> None:
    """PlanError for more than is planned for; to be asked before anything is made of them."""
    if num_devices > MAX_DEVICES or num_nodes > MAX_NODES:
        raise PlanError(
            f"a cluster of {num_nodes:,} nodes with {num_devices:,} devices; at most "
            f"{MAX_NODES:,} nodes and {MAX_DEVICES:,} devices are planned for"
        )


_ADAPTER = TypeAdapter(Cluster)
_NODE = TypeAdapter(Node)


_SINCE = ("sustained", "narrow_sustained", "narrow_share")
"""What curves could not always say."""


def _unsaid(types: Sequence[DeviceType]) -> Any:
    """What fingerprints leave out: prices, and what no device type says. So clusters that say
    nothing of hosts or of software have the fingerprints that they had before any could."""
    optional = {"host", "launching", "casting"}
    silent = {name for name in optional if not any(getattr(d, name) for d in types)}
    found: dict[str, Any] = {name: True for name in ("price_per_hour", *silent)}
    classes = {op_class for device in types for op_class in device.curves}
    curves = [curve for device in types for curve in device.curves.values()]
    unsaid = {name for name in _SINCE if not any(getattr(curve, name) for curve in curves)}
    if unsaid:
        found["curves"] = {op_class: unsaid for op_class in classes}
    return {"device_types": {"__all__": found}}


def to_data(cluster: Cluster) -> Any:
    """The cluster as plain data, without what is None."""
    return _ADAPTER.dump_python(cluster, mode="json", exclude_none=True)


def from_data(data: Any, where: str) -> Cluster:
    """The cluster that plain data describes; PlanError names every wrong field."""
    try:
        return _ADAPTER.validate_python(data, strict=False)
    except ValidationError as error:
        raise PlanError(f"{where}: {reasons(error, '')}") from error


def reasons(error: ValidationError, place: str) -> str:
    """What is wrong, field by field; `place`: of the data that was validated."""
    lines = []
    for problem in error.errors(include_url=False)[:5]:
        path = ".".join(filter(None, (place, *map(str, problem["loc"])))) or "cluster"
        lines.append(f"{path}: {str(problem['msg']).removeprefix('Value error, ')}")
    more = f"; and {error.error_count() - 5} more" * (error.error_count() > 5)
    return "; ".join(lines) + more
