"""Clusters as YAML for people: shorthand for equal nodes, presets by name, units written out.

name: lab
links:                                   # optional: own tiers
  lan: {bandwidth_bytes_per_s: 10Gb/s, latency_s: 40us}
  measured:                              # optional: times of an operation, (bytes, seconds)
    bandwidth_bytes_per_s: 25GB/s
    latency_s: 8us
    curves:
      - {operation: all_reduce, size: 4, points: [[1024, 2.0e-5], [1.0e+8, 0.01]]}
device_types:                            # optional: own devices; presets are known by name
  - {name: old, kind: cuda, memory_bytes: 12GB, memory_bandwidth_bytes_per_s: 480GB/s,
     peak_flops: {float32: 11TFLOP/s}, price_per_hour: 0.35}   # the price is optional
nodes:
  - {count: 2, devices: {a100-80: 4}, link: nvlink3}
  - {devices: {l4: 1, old: 2}, link: pcie4, uplink: lan}
between_nodes: ethernet-25g
"""

from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node, check_size, from_data, reasons, to_data
from meshwright.ir.errors import PlanError
from meshwright.ir.text.canonical import read_text
from meshwright.ir.text.plain_text import shown
from meshwright.ir.text.yaml_text import MAX_BYTES, parse_yaml


def load(path: Path) -> Cluster:
    """The cluster described in the file; PlanError names the file and the field."""
    data = parse_yaml(read_text(path, MAX_BYTES), str(path))
    if not isinstance(data, dict):
        raise PlanError(
            f"{path}: expected a mapping with name and nodes, got {type(data).__name__}"
        )
    return from_data(_expand(data, str(path)), str(path))


def save(cluster: Cluster, path: Path) -> None:
    """Write the cluster in full; links by name, equal nodes once."""
    links: dict[str, Any] = {}

    def named(link: dict[str, Any]) -> Any:
        return link["name"] if links.setdefault(link["name"], link) == link else link

    data = to_data(cluster)
    nodes = []
    for node, group in groupby(data["nodes"]):
        short = {"count": len(list(group)), **node}
        short |= {key: named(node[key]) for key in ("link", "uplink") if key in node}
        short["devices"] = _shorten(node["devices"])
        nodes.append(short)
    between = {k: named(data[k]) for k in ("between_nodes", "between_racks") if k in data}
    content = {"name": data["name"], "links": {name: _unnamed(v) for name, v in links.items()},
               "device_types": data["device_types"], "nodes": nodes, **between}  # fmt: skip
    path.write_text(yaml.safe_dump(content, sort_keys=False, width=100))


def _shorten(devices: list[str]) -> Any:
    runs = [(name, len(list(group))) for name, group in groupby(devices)]
    return dict(runs) if len({name for name, _ in runs}) == len(runs) else devices


def _unnamed(link: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in link.items() if key != "name"}


def _expand(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The full form of the shorthand."""
    data = dict(data)
    own = {
        name: {"name": name, **_mapping(value, f"links.{name}", where)}
        for name, value in _mapping(data.pop("links", None), "links", where).items()
    }
    given = [_mapping(n, "a node", where) for n in _list(data.get("nodes"), "nodes", where)]
    counts = [_count(node.get("count", 1), "count", where) for node in given]
    full = [_node(node, own, where) for node in given]
    check_size(sum(counts), sum(n * len(f["devices"]) for n, f in zip(counts, full, strict=True)))
    made = [_made(node, f"nodes.{i}", where) for i, node in enumerate(full)]
    data["nodes"] = [node for node, count in zip(made, counts, strict=True) for _ in range(count)]
    for key in ("between_nodes", "between_racks"):
        if key in data:
            data[key] = _link(data[key], own, where)
    types = _list(data.get("device_types"), "device_types", where)
    described = {str(_mapping(t, "a device type", where).get("name")) for t in types}
    used = {name for node in made for name in node.devices}
    data["device_types"] = types + [
        presets.DEVICES[name] for name in sorted(used - described) if name in presets.DEVICES
    ]
    return data


def _node(node: dict[str, Any], own: dict[str, Any], where: str) -> dict[str, Any]:
    full = {key: value for key, value in node.items() if key != "count"}
    devices = node.get("devices")
    if isinstance(devices, dict):
        counts = {name: _count(n, f"devices.{name}", where) for name, n in devices.items()}
        check_size(1, sum(counts.values()))
        full["devices"] = [name for name, count in counts.items() for _ in range(count)]
    else:
        full["devices"] = _list(devices, "devices", where)
    for key in ("link", "uplink"):
        if key in node:
            full[key] = _link(node[key], own, where)
    return full


def _made(node: dict[str, Any], place: str, where: str) -> Node:
    """Equal nodes are one object, however many there are."""
    try:
        return _NODE.validate_python(node)
    except ValidationError as error:
        raise PlanError(f"{where}: {reasons(error, place)}") from error


_NODE = TypeAdapter(Node)


def _mapping(value: object, what: str, where: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise PlanError(f"{where}: {what} is {shown(value)}; it must be a mapping")
    return value or {}


def _list(value: object, what: str, where: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise PlanError(f"{where}: {what} is {shown(value)}; it must be a list")
    return value or []


def _count(value: object, what: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{where}: {what} is {shown(value)}; it must be a whole number, 1 or more")
    return value


def _link(value: Any, own: dict[str, Any], where: str) -> Any:
    if not isinstance(value, str):
        return value
    if value in own:
        return own[value]
    if value in presets.LINKS:
        return presets.LINKS[value]
    known = ", ".join([*own, *presets.LINKS])
    raise PlanError(f"{where}: no link {shown(value)}; known are {known}")
