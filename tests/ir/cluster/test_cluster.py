"""Clusters: tiers, presets, files, and refusing numbers that cannot be."""

from collections.abc import Callable
from math import nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.detect import Seen, describe
from meshwright.ir.cluster.device import DeviceType, Link, parse_quantity
from meshwright.ir.errors import PlanError
from meshwright.testing.spawn import run_ranks

MIXED = """
name: lab
links:
  lan: {bandwidth_bytes_per_s: 10Gb/s, latency_s: 40us}
device_types:
  - {name: old, kind: cuda, memory_bytes: 12GB, memory_bandwidth_bytes_per_s: 480GB/s,
     peak_flops: {float32: 11TFLOP/s}}
nodes:
  - {count: 2, devices: {a100-80: 4}, link: nvlink3}
  - {devices: {l4: 1, old: 2}, link: pcie4, uplink: lan}
between_nodes: ethernet-25g
"""


def link(**changes: float) -> Link:
    values = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6} | changes
    return Link(name="x", **values)


def device(**changes: object) -> DeviceType:
    values: dict[str, object] = {
        "name": "d", "kind": "cuda", "memory_bytes": 2**34,
        "memory_bandwidth_bytes_per_s": 1e12, "peak_flops": {"float32": 1e13},
    }  # fmt: skip
    return DeviceType(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def lab(tmp_path: Path) -> Cluster:
    (tmp_path / "lab.yaml").write_text(MIXED)
    return Cluster.load(tmp_path / "lab.yaml")


def test_mixed_and_uneven_nodes(lab: Cluster) -> None:
    assert lab.num_devices == 11
    assert [lab.device(r).name for r in (0, 7, 8, 9, 10)] == ["a100-80"] * 2 + ["l4", "old", "old"]
    assert lab.link(0, 3).name == "nvlink3"
    assert lab.link(0, 4).name == "ethernet-25g"
    assert lab.link(0, 8).name == "lan"
    assert lab.tier([0, 1]).name == "nvlink3"
    assert lab.tier([0, 4]).name == "ethernet-25g"
    assert lab.tier([0, 4, 10]).name == "lan"
    assert lab.device(9).memory_bytes == 12 * 10**9
    assert lab.nodes[2].uplink is not None
    assert lab.nodes[2].uplink.bandwidth_bytes_per_s == 1.25e9


def test_file_round_trip(lab: Cluster, tmp_path: Path) -> None:
    for cluster in (lab, Cluster.preset("h100-sxm", num_nodes=3), Cluster.local(3)):
        cluster.save(tmp_path / "again.yaml")
        again = Cluster.load(tmp_path / "again.yaml")
        assert again == cluster
        assert again.fingerprint == cluster.fingerprint


def test_racks() -> None:
    node = Node(devices=("d",), link=link())
    cluster = Cluster(
        name="racks",
        device_types=(device(),),
        nodes=(node, node, Node(devices=("d",), link=link(), rack=1)),
        between_nodes=link(bandwidth_bytes_per_s=5e8),
        between_racks=link(bandwidth_bytes_per_s=1e8),
    )
    assert cluster.link(0, 1).bandwidth_bytes_per_s == 5e8
    assert cluster.link(1, 2).bandwidth_bytes_per_s == 1e8
    assert cluster.tier([0, 1, 2]).bandwidth_bytes_per_s == 1e8


@pytest.mark.parametrize("name", presets.DEVICES)
def test_presets_are_complete(name: str) -> None:
    cluster = Cluster.preset(name, num_nodes=2, devices_per_node=4)
    assert cluster.num_devices == 8
    assert cluster.device(7).reference and cluster.nodes[0].link.reference
    assert cluster.between_nodes is not None and cluster.between_nodes.reference
    assert cluster.device(0).usable_bytes > 0
    assert Cluster.preset(name, num_nodes=2).fingerprint != cluster.fingerprint


def test_ethernet_is_shared_by_the_devices_of_a_node() -> None:
    cluster = Cluster.preset("l4", num_nodes=2, devices_per_node=4, network="ethernet-100g")
    assert cluster.between_nodes is not None
    assert cluster.between_nodes.bandwidth_bytes_per_s == 12.5e9 / 4


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(PlanError, match=r"no preset 'h101'.*h100-sxm"):
        Cluster.preset("h101")
    with pytest.raises(PlanError, match=r"no network 'carrier-pigeon'.*infiniband-ndr"):
        Cluster.preset("h200", num_nodes=2, network="carrier-pigeon")
    with pytest.raises(PlanError, match="rank 8 is not in"):
        Cluster.preset("h200").device(8)


@pytest.mark.parametrize("bad", [0.0, -1.0, nan, float("inf"), 450.0])
def test_bandwidth_that_cannot_be(bad: float) -> None:
    with pytest.raises(PlanError, match="bandwidth_bytes_per_s"):
        link(bandwidth_bytes_per_s=bad)
    with pytest.raises(PlanError, match="memory_bandwidth_bytes_per_s"):
        device(memory_bandwidth_bytes_per_s=bad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: device(memory_bytes=80), "write|80GB"),
        (lambda: device(memory_bytes=83886080 // 1024), "plain numbers are bytes"),
        (lambda: device(memory_bytes=-1), "memory_bytes is -1"),
        (lambda: device(peak_flops={"bfloat16": 1e12}), "needs at least float32"),
        (lambda: device(peak_flops={"float32": 0.0}), "peak_flops"),
        (lambda: device(reserved_bytes=2**40), "reserved_bytes"),
        (lambda: link(latency_s=5.0), "5us"),
        (lambda: link(efficiency=1.5), "efficiency"),
        (lambda: Node(devices=(), link=link()), "no devices"),
        (lambda: Cluster(name="x", device_types=(), nodes=()), "no nodes"),
        (lambda: Cluster.local(0), "at least one"),
        (lambda: Cluster.preset("l4", num_nodes=0), "1 or more"),
    ],
)
def test_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("10Gb/s", "10Gbps"), "10Gbps.*300GB/s"),
        (("12GB", "0GB"), "memory_bytes is 0"),
        (("count: 2", "count: 0"), "count is 0"),
        (("link: nvlink3", "link: nvlink9"), "nvlink9.*nvlink3"),
        (("l4: 1", "l5: 1"), "'l5'.*not described"),
        (("between_nodes: ethernet-25g", ""), "no link between_nodes"),
        (("name: lab", "name: lab\nname: lab2"), "written twice"),
        (("name: lab", "name: lab\ncolour: red"), "colour"),
        (("kind: cuda, ", "kind: tpu, "), "kind"),
        (("latency_s: 40us", "latency_s: .nan"), "latency_s is nan"),
    ],
)
def test_a_bad_file_is_refused(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(MIXED.replace(*change))
    with pytest.raises(PlanError, match=message) as error:
        Cluster.load(path)
    assert "bad.yaml" in str(error.value)


@given(st.integers(1, 10**6), st.sampled_from(["B", "kB", "MB", "GB", "MiB", "GiB"]))
def test_quantities(number: int, unit: str) -> None:
    scale = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}[unit]
    assert parse_quantity(f"{number}{unit}", "bytes") == number * scale
    assert parse_quantity(f"{number} {unit}", "bytes") == number * scale


@pytest.mark.parametrize("text", ["80", "80G", "80 gb", "GB", "-1GB", "80GB/s", "nanGB"])
def test_quantities_are_strict(text: str) -> None:
    with pytest.raises(PlanError, match="80GB or 80GiB"):
        parse_quantity(text, "bytes")


def test_a_unit_in_other_letters_is_told() -> None:
    with pytest.raises(PlanError, match=r"'2KB' is not a bytes quantity; nearest is '2kB'"):
        parse_quantity("2KB", "bytes")


def test_local_processes_share_cores() -> None:
    cluster = Cluster.local(4)
    assert cluster.num_devices == 4
    assert cluster.nodes[0].cores >= 1
    assert cluster.device(3).memory_bytes == cluster.device(0).memory_bytes


def test_detected_hosts() -> None:
    a100 = [Seen("one", "NVIDIA A100-SXM4-80GB", 85_000_000_000, 32, 108)] * 2
    small = [Seen("two", "NVIDIA A100-SXM4-40GB", 42_000_000_000, 32, 108)]
    cluster = describe(a100 + small)
    assert [cluster.device(r).name for r in range(3)] == ["a100-80", "a100-80", "a100-40"]
    assert cluster.num_nodes == 2 and cluster.link(0, 2).name == "infiniband-hdr"
    cpus = describe([Seen("one", "", 2**34, 2)] * 4)
    assert cpus.nodes[0].cores == 2 and cpus.device(0).memory_bytes == 2**32
    assert describe([Seen("x", "Some New GPU", 2**35, 8, 100)]).device(0).source == "assumption"
    with pytest.raises(PlanError, match="follow each other"):
        describe([a100[0], small[0], a100[1]])


def test_detect_needs_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PlanError, match=r"torchrun.*Cluster\.local"):
        Cluster.detect()


def test_detect_on_ranks() -> None:
    found = run_ranks(3, _fingerprint)
    assert len(set(found)) == 1
    assert found[0][0] == 3


def _fingerprint() -> tuple[int, str]:
    cluster = Cluster.detect()
    return cluster.num_devices, cluster.fingerprint


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"lab.yaml: cannot be read: No such file"):
        Cluster.load(tmp_path / "lab.yaml")


def test_roce_is_slower_over_several_leaf_switches() -> None:
    small, large = (
        Cluster.preset("a100-80", num_nodes=nodes, network="roce-4x100g").between_nodes
        for nodes in (32, 33)
    )
    assert small and large
    assert large.rate == pytest.approx(small.rate / 1.4)
    assert "SIGCOMM" in large.reference and "SIGCOMM" not in small.reference
    fabric = [
        Cluster.preset("a100-80", num_nodes=nodes, network="infiniband-hdr").between_nodes
        for nodes in (32, 128)
    ]
    assert fabric[0] == fabric[1]
