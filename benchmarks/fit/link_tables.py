"""Published timings of collectives in one convention: bytes of the whole value, seconds."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fit.fit_comm import CommTiming

NCCL = "nccl_single_node_aiconfigurator.json"
NETWORK = "network_collectives_measured.json"
PLAYBOOK = "hf_ultrascale_scaling_and_bandwidth.json"
P5 = Path(__file__).parents[1] / "tables" / "nccl_p5.csv"
"""Kept here; the other tables are in the calibration part of the published ones."""

SINGLE = {
    "A100-SXM4-80GB": "nvlink3",
    "H100-SXM5-80GB": "nvlink4",
    "H200-SXM-141GB": "nvlink4-h200",
    "B200-SXM-180GB": "nvlink5",
    "GB200-NVL72": "nvlink5-nvl72",
    "L40S-48GB": "pcie4-no-p2p",
}
"""GPU of the NCCL table -> preset link."""
_OPERATIONS = {"alltoall": "all_to_all"}
_ROUNDS = {"all_reduce": 2}
_P5_GPUS = 8
_P5_SOURCE = "aws-gpu-communication-benchmark, H100"
_PLAYBOOK = "Ultra-Scale Playbook, H100"
PLAYBOOK_BYTES = 2**30
"""Of nanotron's start-up test, whose name says 256 MB: its source makes 256 Mi values in fp32."""


@dataclass(frozen=True, slots=True)
class Series:
    """Timings of one source on one machine; several nodes of `inside` GPUs if `nodes` > 1."""

    source: str
    link: str
    nodes: int
    inside: int
    rows: tuple[CommTiming, ...]
    judges: bool = False
    """Several nodes: only compared with the link's curves, which come from another source."""


def nccl_rows(folder: Path) -> dict[str, list[CommTiming]]:
    """Preset link -> rows."""
    found: dict[str, list[CommTiming]] = {link: [] for link in SINGLE.values()}
    for raw in _rows(folder / NCCL):
        operation = _OPERATIONS.get(raw["op"], raw["op"])
        # nccl-tests counts what one rank of an all-to-all holds.
        nbytes = raw["bytes"] * (raw["gpus"] if operation == "all_to_all" else 1)
        row = CommTiming(operation, nbytes, raw["gpus"], raw["latency_us"] * 1e-6)
        found[SINGLE[raw["gpu"]]].append(row)
    return found


def other_series(folder: Path) -> list[Series]:
    """What other sources measured, one node and several."""
    found: dict[tuple[str, str, int, int], list[CommTiming]] = {}
    for raw in _rows(folder / NETWORK):
        hardware = raw["hardware"]
        # Rows without a tool repeat others with one algorithm forced.
        if raw["collective"] != "all_reduce" or not raw.get("bytes") or not raw.get("tool"):
            continue
        gpus = hardware.get("gpus") or raw.get("group_size")
        nodes = hardware.get("nodes", 1)
        link = _link_of(hardware["gpu"], nodes)
        seconds = _seconds(raw["measured"], raw["bytes"], gpus, "all_reduce")
        key = (f"{raw['source'].split()[0]}, {hardware['gpu']}", link, nodes, gpus // nodes)
        found.setdefault(key, []).append(CommTiming("all_reduce", raw["bytes"], gpus, seconds))
    for raw in _rows(folder / PLAYBOOK):
        if raw["kind"] != "collective_bandwidth":
            continue
        hardware, operation = raw["hardware"], raw["collective"]
        seconds = _seconds(raw["measured"], PLAYBOOK_BYTES, hardware["gpus"], operation)
        link = "efa-p5" if hardware["nodes"] > 1 else "nvlink4"
        key = (_PLAYBOOK, link, hardware["nodes"], hardware["gpus_per_node"])
        found.setdefault(key, []).append(
            CommTiming(operation, PLAYBOOK_BYTES, hardware["gpus"], seconds)
        )
    series = [Series(*key, tuple(rows), key[0] == _PLAYBOOK) for key, rows in found.items()]
    return [*series, *p5_series()]


def p5_series() -> list[Series]:
    """Collectives of nccl-tests on AWS p5."""
    found: dict[int, list[CommTiming]] = {}
    lines = [line for line in P5.read_text().splitlines() if not line.startswith("#")]
    for raw in csv.DictReader(lines):
        nodes, operation, nbytes = int(raw["nodes"]), raw["operation"], float(raw["mib"]) * 2**20
        gpus = nodes * _P5_GPUS
        rate = {"busbw_gb_s": float(raw["busbw_gb_s"])}
        seconds = _seconds(rate, nbytes, gpus, operation)
        # nccl-tests counts what one rank of an all-to-all holds.
        whole = nbytes * (gpus if operation == "all_to_all" else 1)
        found.setdefault(nodes, []).append(CommTiming(operation, whole, gpus, seconds))
    name = _P5_SOURCE
    return [Series(name, "efa-p5", n, _P5_GPUS, tuple(rows)) for n, rows in sorted(found.items())]


def continued(half: Series, last: Series) -> Series:
    """Twice the nodes of `last`, of which `half` has half, in timings that both have: gathers run
    as rings and grow with their members, the rest with the logarithm of their number."""
    before = {(row.operation, _size(row)): row.seconds for row in half.rows}
    rows = []
    for row in last.rows:
        if (key := (row.operation, _size(row))) not in before:
            continue
        growth = max(0.0, row.seconds - before[key])
        more = 2 * growth if row.operation == "all_gather" else growth
        whole = row.nbytes * (2 if row.operation == "all_to_all" else 1)
        rows.append(CommTiming(row.operation, whole, 2 * row.size, row.seconds + more))
    return Series(f"continued: {last.source}", last.link, 2 * last.nodes, last.inside, tuple(rows))


def _size(row: CommTiming) -> float:
    """Bytes as nccl-tests counts them."""
    return row.nbytes / row.size if row.operation == "all_to_all" else row.nbytes


def two_node_groups(folder: Path) -> tuple[list[tuple[int, int, float]], float]:
    """((GPUs, GPUs on a node, bus bytes/s) of groups on two nodes, bytes/s of messages)."""
    groups, port = [], 0.0
    for raw in _rows(folder / NETWORK):
        if raw["hardware"].get("nodes") != 2 or raw.get("bytes") is not None:
            continue
        size, rate = raw["group_size"], raw["measured"]["bandwidth_gb_s"] * 1e9
        if raw["collective"] == "p2p" and size == 2:
            port = rate
        elif raw["collective"] == "all_reduce" and (not raw["consecutive"] or size > 8):
            groups.append((size, size // 2, rate))
    return sorted(groups), port


def _link_of(gpu: str, nodes: int) -> str:
    if nodes > 1:
        return "efa-p6" if gpu.startswith("B200") else "fabric-100g"
    for name, link in SINGLE.items():
        if gpu.split("-")[0] == name.split("-")[0]:
            return link
    return "nvlink2" if gpu.startswith("V100") else "nvlink3"


def _seconds(measured: Mapping[str, float], nbytes: float, gpus: int, operation: str) -> float:
    """From a time, or from nccl-tests' bus bandwidth."""
    if "time_us" in measured:
        return measured["time_us"] * 1e-6
    moved = _ROUNDS.get(operation, 1) * (gpus - 1) / gpus * nbytes
    return moved / (measured["busbw_gb_s"] * 1e9)


def _rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found
