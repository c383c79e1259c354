"""A small plan by hand, and the graph and cluster it is for."""

from dataclasses import replace
from typing import Any

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Block, Graph, Kind, Op, Ref, Tensor
from meshwright.ir.plan.plan import (
    BlockLayout,
    ClusterId,
    InputSpec,
    ModelId,
    Plan,
    ScheduleTable,
    Stage,
)
from meshwright.ir.plan.predicted import Prediction, RankMemory, StagePrediction

CLUSTER = Cluster.preset("a100-40", num_nodes=1, devices_per_node=4)


def graph() -> Graph:
    """Four blocks of one op each, in two patterns; nothing of it is meant to be run."""
    tensors = {"x": Tensor("x", (8, 4), "float32", Kind.INPUT)}
    ops, blocks, previous = [], [], "x"
    for i in range(4):
        name, pattern = ("head", "head") if i == 3 else (f"h.{i}", "h.*")
        out = f"v{i}"
        tensors[out] = Tensor(out, (8, 4), "float32", Kind.ACTIVATION, requires_grad=True)
        ops.append(
            Op(f"op{i}", "/relu", "aten.relu.default", (("self", Ref(previous)),), (previous,),
               (out,), name)
        )  # fmt: skip
        blocks.append(Block(name, pattern, pattern, i, i + 1, (previous,), (out,), ()))
        previous = out
    return Graph(tensors, tuple(ops), 0, tuple(blocks), ("x",), ("x",), previous, 8, ("x",),
                 fingerprint="abc")  # fmt: skip


def layout(pattern: str, tp: int) -> BlockLayout:
    ops = {} if pattern == "(prelude)" else {"/relu": {"dp": "S(0) -> S(0)"}}
    sides = () if pattern == "(prelude)" else ({"dp": "S(0)"},)
    mesh = {"tp": tp} if tp > 1 else {}
    return BlockLayout(name=f"{pattern} tp{tp}", pattern=pattern, mesh=mesh, parameters={},
                       inputs=sides, outputs=sides, ops=ops)  # fmt: skip


def prediction(num_stages: int, parameters_bytes: int = 1000) -> Prediction:
    memory = RankMemory(parameters_bytes=parameters_bytes, gradients_bytes=1, optimizer_bytes=2,
                        activations_bytes=3, communication_bytes=0, workspace_bytes=0)  # fmt: skip
    stage = StagePrediction(forward_s=0.1, backward_s=0.2, send_s=0.01, sync_s=0.0,
                            optimizer_s=0.001, memory=memory)  # fmt: skip
    return Prediction(step_s=1.25, samples_per_s=6.4, error_band=0.2, source="datasheet",
                      stages=(stage,) * num_stages)  # fmt: skip


def plan(**changes: Any) -> Plan:
    """Two stages: dp 3 with uneven shares, then one device; with `changes`."""
    names = {p: f"{p} tp1" for p in ("h.*", "head", "(prelude)")}
    made = Plan(
        model=ModelId(name="Toy", fingerprint="abc", num_parameters=0, num_blocks=4,
                      inputs=(InputSpec(name="x", shape=(8, 4), dtype="float32"),)),
        cluster=ClusterId(name=CLUSTER.name, fingerprint=CLUSTER.fingerprint, num_devices=4),
        global_batch_size=8, num_microbatches=2, optimizer="adamw", precision="fp32",
        stages=(
            Stage(first="h.0", last="h.1", mesh={"dp_replicate": 3, "dp_shard": 1, "tp": 1},
                  devices=(0, 1, 2), batch_shares=(2, 1, 1), layouts=names,
                  recompute={"h.*": "full"}),
            Stage(first="h.2", last="head", mesh={"dp_replicate": 1, "dp_shard": 1, "tp": 1},
                  devices=(3,), batch_shares=(4,), layouts=names),
        ),
        schedule=ScheduleTable(name="one_f_one_b",
                               rows=("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")),
        layouts=tuple(layout(p, 1) for p in ("h.*", "head", "(prelude)")),
        predicted=prediction(2),
    )  # fmt: skip
    return replace(made, **changes)
