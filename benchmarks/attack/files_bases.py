"""Sound files to spoil: plans of several kinds, clusters, a profile, what a run leaves."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshwright.arguments.targets import load_target
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import Work
from meshwright.ir.profile import measured
from meshwright.ir.profile.measured import (
    ActionMeasured,
    CollectiveMeasured,
    KernelMeasured,
    Measured,
    MemoryMeasured,
    Spread,
    StepMeasured,
    TensorMemory,
    TimedAction,
    TimedMessage,
    TimelineMeasured,
)
from meshwright.ir.profile.profile import (
    BlockRecord,
    CollectiveRecord,
    CopyRecord,
    GroupShape,
    Machine,
    MemoryRecord,
    OpRecord,
    OptimizerRecord,
    Timing,
)
from meshwright.ir.profile.profile_store import open_store
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search

TARGET = (
    'hf:GPT2Config{"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 16, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)
PINS = {
    "pipeline": ("pp=2", "tp=2", "num_microbatches=4"),
    "shards": ("dp_shard=4", "zero=3"),
    "halves": ("pp=4", "schedule=zero_bubble", "num_microbatches=4"),
    "saved": ("pp=2", "saved=selective", "num_microbatches=2"),
}
HAND = (
    '{"tp": 2, "pp": 2, "num_microbatches": 2, "global_batch_size": 8, "precision": "fp32", '
    '"zero": [0, 1], "recompute": "none", "memory": "60GB", "constraints": ["dp_shard=1"], '
    '"stages": [{"first": "transformer.h.0"}, {"tp": 2}]}'
)
SHORT = """\
name: lab
links:
  lan: {bandwidth_bytes_per_s: 10Gb/s, latency_s: 40us}
  measured:
    bandwidth_bytes_per_s: 25GB/s
    latency_s: 8us
    curves:
      - {operation: all_reduce, size: 4, points: [[1024, 2.0e-5], [1.0e+8, 0.01]]}
device_types:
  - {name: old, kind: cuda, memory_bytes: 12GB, memory_bandwidth_bytes_per_s: 480GB/s,
     peak_flops: {float32: 11TFLOP/s}, price_per_hour: 0.35}
nodes:
  - {count: 2, devices: {a100-80: 4}, link: nvlink3}
  - {devices: {l4: 1, old: 2}, link: pcie4, uplink: lan}
  - {devices: [old, old], link: measured, rack: 1, cores: 2}
between_nodes: ethernet-25g
"""
MACHINE = Machine(device="Some CPU", kind="cpu", driver="6.1", torch="2.13", backend="gloo",
                  cores=2, memory_bytes=2**34)  # fmt: skip


@dataclass(frozen=True)
class Bases:
    """A folder of sound files, and what the plans are for."""

    folder: Path
    graph: Graph
    cluster: Cluster
    plans: tuple[Path, ...]
    hand: Path
    clusters: tuple[Path, ...]
    profile: Path
    run: Path
    """A run folder of the first plan."""


@cache
def traced() -> Graph:
    """The model of all plans."""
    return trace(load_target(TARGET, meta=True).model, global_batch_size=8)


def make_bases(folder: Path) -> Bases:
    """Writes the files."""
    cluster = Cluster.local(4)
    plans = []
    for name, pins in PINS.items():
        plan = search(traced(), cluster, precision="fp32", constraints=pins, time_limit_s=300.0,
                      progress=False)  # fmt: skip
        plans.append(folder / f"{name}.json")
        plan_io.save(plan, plans[-1])
    run = folder / "run"
    run.mkdir()
    first = plan_io.load(plans[0])
    for rank in range(first.world_size):
        measured.save(_measured(first, rank), run / f"measured_rank{rank}.json")
    clusters = folder / "short.yaml", folder / "full.yaml"
    clusters[0].write_text(SHORT)
    Cluster.load(clusters[0]).save(clusters[1])
    hand, profile = folder / "hand.json", folder / "profile.db"
    hand.write_text(HAND)
    with open_store(profile) as store:
        store.add(MACHINE, *_records())
    return Bases(folder, traced(), cluster, tuple(plans), hand, clusters, profile, run)


def sound(bases: Bases) -> Iterator[tuple[str, ...]]:
    """Commands that must succeed while nothing is spoiled: else nothing is tried."""
    for path in map(str, bases.plans):
        yield "show", path
        yield "check", path, "--strict"
        yield "explain", path
        yield "diff", path, str(bases.plans[0])
        yield "report", path, "-o", str(bases.folder / "page.html")
        yield "export", path, "--to", "torchrun"
    yield "compare", str(bases.plans[0]), str(bases.run)
    yield "report", str(bases.plans[0]), "-o", str(bases.folder / "r.html"), "--run", str(bases.run)
    for cluster in map(str, bases.clusters):
        yield "check", str(bases.plans[0]), "-c", cluster


def _records() -> tuple[
    OpRecord | BlockRecord | CollectiveRecord | CopyRecord | MemoryRecord | OptimizerRecord, ...
]:
    time = Timing(median_s=1e-3, spread=0.1, count=5, mean_s=1.1e-3)
    return (
        OpRecord(key="addmm", target="aten.addmm.default", op_class="matmul", dtype="float32",
                 inputs=((4,), (8, 4)), flops=1e6, moved_bytes=1e5, forward=time, backward=time),
        BlockRecord(key="block", pattern="h.*", samples=2, tp=2, processes=2, forward=time,
                    backward=time, backward_input=None, backward_weight=time),
        *(CollectiveRecord(operation="all_reduce", nbytes=n, group=GroupShape(size=2, per_node=2),
                           groups_at_once=1, time=time) for n in (1024, 2**20)),
        CopyRecord(direction="to_host", nbytes=1024, time=time),
        MemoryRecord(name="process", value=1e8, unit="bytes"),
        OptimizerRecord(optimizer="adamw", num_tensors=4, nbytes=1024, time=time),
    )  # fmt: skip


def _flat(seconds: float) -> Spread:
    return Spread(median_s=seconds, p10_s=seconds, p90_s=seconds)


def _measured(plan: Plan, rank: int) -> Measured:
    """One rank of a run of the plan, as its prediction would have it."""
    assert plan.predicted
    step_s = plan.predicted.step_s
    stages = [i for i, stage in enumerate(plan.stages) if rank in stage.devices]
    actions = tuple(
        ActionMeasured(stage=i, work=work, count=8, busy=_flat(step_s / 9), waiting=_flat(0.0),
                       blocked=_flat(0.0))
        for i in stages for work in (Work.FORWARD, Work.BACKWARD)
    )  # fmt: skip
    reduce = CollectiveMeasured(
        purpose="gradients", stage=0, axis="dp", primitive="all_reduce", nbytes=1000, size=2,
        count=2, median_s=0.001, spread=0.1, exposed_s=0.001, total_s=0.002,
    )  # fmt: skip
    tensors = TensorMemory(peak_bytes=9000, parameters_bytes=4000, gradients_bytes=2000,
                           optimizer_bytes=2000, inputs_bytes=500, rest_bytes=500)  # fmt: skip
    timeline = TimelineMeasured(
        step=3, started_s=1.7e9,
        actions=(TimedAction(name=f"{stages[0]}F0", start_s=0.0, end_s=step_s / 9),
                 TimedAction(name="optimizer", start_s=step_s / 2, end_s=step_s)),
        messages=(TimedMessage(border=0, microbatch=0, gradient=False, value="x", source=0,
                               target=2, nbytes=64, start_s=0.0, end_s=1e-3),),
    )  # fmt: skip
    kernel = KernelMeasured(kernel="rms_norm", way="torch", why="tensors are on cpu", calls=2)
    return Measured(
        plan=plan.hash, rank=rank, world_size=plan.world_size, machine=MACHINE, host="here",
        steps=tuple(StepMeasured(kind=kind, step_s=step_s, loss=1.0)
                    for kind in ("warm-up", "timed", "timed", "tracked", "traced")),
        actions=actions, collectives=(reduce,),
        phases={"gradients": _flat(0.02), "publish": _flat(0.01), "optimizer": _flat(0.02)},
        updated_tensors=4, updated_bytes=100,
        memory=MemoryMeasured(tensors=tensors, resident_before_bytes=10**8,
                              resident_start_bytes=10**8 + 5, resident_peak_bytes=2 * 10**8),
        timeline=timeline, kernels=(kernel,),
    )  # fmt: skip
