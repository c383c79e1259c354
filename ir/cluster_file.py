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

from collections.abc import Hashable
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from meshwright.ir import presets
from meshwright.ir.canonical import read_text
from meshwright.ir.cluster import Cluster, from_data, to_data
from meshwright.ir.errors import PlanError


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    if twice := {key for key in keys if keys.count(key) > 1}:
        line = node.start_mark.line + 1
        raise PlanError(f"line {line}: {sorted(twice)} written twice in one mapping")
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path: Path) -> Cluster:
    """The cluster described in the file; PlanError names the file and the field."""
    text = read_text(path)
    try:
        data = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(
            f"{path}: expected a mapping with name and nodes, got {type(data).__name__}"
        )
    return from_data(_expand(data, path), str(path))


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


def _expand(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """The full form of the shorthand."""
    data = dict(data)
    own = {
        name: {"name": name, **(value if isinstance(value, dict) else {})}
        for name, value in (data.pop("links", None) or {}).items()
    }
    nodes: list[Any] = []
    for node in data.get("nodes") or []:
        if not isinstance(node, dict):
            raise PlanError(f"{path}: a node is {node!r}; it must have devices and a link")
        nodes += [_node(node, own, path)] * _count(node.get("count", 1), "count", path)
    data["nodes"] = nodes
    for key in ("between_nodes", "between_racks"):
        if key in data:
            data[key] = _link(data[key], own, path)
    types = list(data.get("device_types") or [])
    described = {t.get("name") for t in types if isinstance(t, dict)}
    used = {name for node in nodes for name in node.get("devices", ()) if isinstance(name, str)}
    data["device_types"] = types + [
        presets.DEVICES[name] for name in sorted(used - described) if name in presets.DEVICES
    ]
    return data


def _node(node: dict[str, Any], own: dict[str, Any], path: Path) -> dict[str, Any]:
    full = {key: value for key, value in node.items() if key != "count"}
    devices = node.get("devices")
    if isinstance(devices, dict):
        full["devices"] = [
            name
            for name, count in devices.items()
            for _ in range(_count(count, f"devices.{name}", path))
        ]
    for key in ("link", "uplink"):
        if key in node:
            full[key] = _link(node[key], own, path)
    return full


def _count(value: object, what: str, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{path}: {what} is {value!r}; it must be a whole number, 1 or more")
    return value


def _link(value: Any, own: dict[str, Any], path: Path) -> Any:
    if not isinstance(value, str):
        return value
    if value in own:
        return own[value]
    if value in presets.LINKS:
        return presets.LINKS[value]
    known = ", ".join([*own, *presets.LINKS])
    raise PlanError(f"{path}: no link {value!r}; known are {known}")
