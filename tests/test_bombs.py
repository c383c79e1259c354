"""Files that are small and ask for much: a word in under a second, and no memory for it."""

import copy
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.arguments.targets import cluster_of, load_cluster
from meshwright.ir.cluster.cluster import MAX_DEVICES, Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.bounds import figure_problems
from meshwright.ir.plan.plan import ScheduleTable
from meshwright.ir.plan.verify import check
from meshwright.ir.profile import measured
from meshwright.ir.profile.profile_store import load_profile
from meshwright.planner.search.handwritten import check_batch
from tests.injection import plain
from tests.ir.plans import plan

LIMIT_S, LIMIT_KB = 1.0, 300 * 1024


def refused(called: Callable[[], object], says: str) -> None:
    """It is refused in these words, in under a second of computing, without a jump of memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(PlanError, match=says) as error:
        called()
    assert time.process_time() - started < LIMIT_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LIMIT_KB
    assert len(str(error.value)) < 2000


def edited(*path: str | int, value: Any) -> str:
    """A plan file with another value in one place."""
    data = copy.deepcopy(plain(plan()))
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return json.dumps(data)


HEAD = '{"schema": "meshwright.plan/2.0", "stages": ['


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            edited("stages", 0, "mesh", value={"dp_shard": 10**9}),
            r"stages.0.mesh.dp_shard is 1,000,",
        ),
        (edited("stages", 0, "mesh", value={"tp": 2**20, "dp_shard": 2**20}), "x 1048576; at most"),
        (edited("stages", 0, "devices", value=[10**9]), "stages.0.devices is 1,000,000,000"),
        (
            edited("stages", 0, "devices", value=["a"] * 200_000),
            r"devices.0: Input should be a val",
        ),
        (edited("num_microbatches", value=10**9), "num_microbatches is 1,000,000,000"),
        (edited("global_batch_size", value=10**18), "global_batch_size is 1e\\+18"),
        (
            edited("schedule", "rows", value=["0F0 " * 600_000] * 2),
            "has 1,200,002 actions; at most",
        ),
        (
            edited("model", "inputs", 0, "shape", value=[10**12, 4]),
            "at most 68,719,476,736 elements",
        ),
        (edited("model", "inputs", 0, "dtype", value="int64x"), "int64x'; nearest is 'int64'"),
        (edited("predicted", "step_s", value=0.0), "predicted.step_s is 0.0; it must be between"),
        (edited("predicted", "stages", 0, "forward_s", value=-1.0), "forward_s is -1.0"),
        (
            edited("model", "num_parameters", value=7).replace(": 7", f": 1{'0' * 400}"),
            "401 digits",
        ),
        (edited("max_grad_norm", value=7.5).replace("7.5", "1e400"), "beyond the range of a float"),
        ("[" * 10**5, "nested too deeply"),
        ('{"a":' * 10**5, "nested too deeply"),
        (edited("notes", value=[[[["a"] * 3] * 9] * 9] * 9), "notes.0: Input should be a valid"),
        (HEAD + "{}," * 300_000 + "{}]}", "300003 lists and objects; at most"),
        (HEAD + "1," * 5_000_000 + "1]}", "5000001 items; at most"),
        (" " * (65 * 2**20), "characters; at most"),
    ],
)
def test_plans(text: str, says: str):
    refused(lambda: plan_io.loads(text, check_hash=False), says)


@dataclass
class Large:
    model_flops: float


def test_a_step_of_the_largest_models_is_told():
    """405B parameters and 4 Mi tokens: 1.1e19."""
    assert not list(figure_problems("step", Large(1.1e19), frozenset(), frozenset()))
    assert list(figure_problems("step", Large(1e30), frozenset(), frozenset()))


ROWS = (
    "0F0 0F999999999 0B0", "0F9999999 0B9999999", "9999999F0 9999999B0", f"{'9' * 5000}F0", "²F0",
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_schedules_of_large_numbers(row: str):
    refused(lambda: check(plan(schedule=ScheduleTable(name="mine", rows=(row,)))), "schedule: ")


def test_divisors_of_a_large_batch_are_found_at_once():
    refused(lambda: check_batch({"num_microbatches": 7}, 2**39 + 23), "is no multiple of")
    started = time.process_time()
    found = plan(global_batch_size=2**39 + 23).verify()
    assert found[0].rule == "batch" and time.process_time() - started < LIMIT_S


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
NODE = "link: pcie4}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAUGHS, r"line 2: the alias \*a: write out"),
        ("&a [*a]", "alias"),
        ("a: &x {b: 1}\nc: {<<: *x}", "alias"),
        ("name: !!python/object/apply:os.system [ls]", "the tag"),
        (
            f"name: x\nnodes: [{{count: 1000000000, devices: {{l4: 1}}, {NODE}]",
            "1,000,000,000 nodes",
        ),
        (f"name: x\nnodes: [{{count: 1e9, devices: {{l4: 1}}, {NODE}]", "count is '1e9'"),
        (f"name: x\nnodes: [{{devices: {{l4: 1000000000}}, {NODE}]", "with 1,000,000,000 devices"),
        (f"name: x\nnodes: [{{devices: 4, {NODE}]", "devices is 4; it must be a list"),
        ("name: x\nnodes: 3", "nodes is 3; it must be a list"),
        ("name: x\nnodes: [3]", "a node is 3; it must be a mapping"),
        ("name: x\nlinks: [1]\nnodes: []", "links is .1.; it must be a mapping"),
        (f"name: x\ndevice_types: 4\nnodes: [{{devices: [l4], {NODE}]", "device_types is 4"),
        ("a: " + "[" * 100_000, "nested more than 40 deep"),
        (f"name: 0x{'f' * 10_000}", "an integer of 10002 digits"),
        ("? [a]\n: 1", "keys are texts"),
        ("name: '\\n'", "has no nodes"),
        ('name: "a\\nb"', "name is 'a.*has the character"),
        ("a: 1\n---\nb: 2", "a second document"),
        ("x" * 2**20, "at most 524288 are read"),
    ],
)
def test_clusters(text: str, says: str, tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    refused(lambda: Cluster.load(path), says)


@pytest.mark.parametrize("memory", ["1e400", f"{'9' * 400}GB", "-1", ".nan", ".inf", "true", "[1]"])
def test_quantities_beyond_all_machines(memory: str, tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(
        f"name: x\nnodes: [{{devices: [q], {NODE}]\ndevice_types: [{{name: q, kind: cuda, "
        f"memory_bytes: {memory}, memory_bandwidth_bytes_per_s: 1TB/s, "
        "peak_flops: {float32: 1}}]"
    )
    refused(lambda: Cluster.load(path), "memory_bytes")


@pytest.mark.parametrize(
    "text",
    ["local:1000000000", f"local:{MAX_DEVICES + 1}", "h100-sxm:100000x100000",
     f"a10:{'9' * 12}x{'9' * 12}", f"a10:{'9' * 5000}", "local:²"],
)  # fmt: skip
def test_names_of_clusters(text: str):
    refused(lambda: load_cluster(text), "planned for|is none of local:N|at most")


def test_a_large_cluster_is_made_at_once():
    started = time.process_time()
    found = load_cluster("h100-sxm:131072x8")
    assert found.num_devices == MAX_DEVICES and len(found.fingerprint) == 16
    assert time.process_time() - started < 3 * LIMIT_S


READERS = (plan_io.load, Cluster.load, load_profile, measured.load)


@pytest.mark.parametrize("read", READERS)
def test_what_is_no_file(read: Callable[[Path], object], tmp_path: Path):
    """A device or a pipe has no end: it is not opened."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10 * 2**30)
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    refused(lambda: read(Path("/dev/zero")), "is a device, a pipe or a socket")
    refused(lambda: read(tmp_path / "pipe"), "is a device, a pipe or a socket")
    refused(lambda: read(tmp_path), "is a folder")
    refused(lambda: read(tmp_path / "large"), "10737418240 bytes; at most")
    refused(lambda: read(tmp_path / "text"), "is not UTF-8 text|no SQLite database")


def test_a_plan_names_no_file(tmp_path: Path):
    """A cluster's name in a plan is looked up among presets, not on the disk."""
    (tmp_path / "c.yaml").write_text("name: x\n")
    whole = plan()
    odd = replace(whole, cluster=replace(whole.cluster, name=str(tmp_path / "c.yaml")))
    refused(lambda: cluster_of(odd, None), "which is no preset; give --cluster")
