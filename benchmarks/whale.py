"""Whale's hardware-aware balance on V100 and P100: predicted gains beside the published ones.

python -m benchmarks.whale [-o docs/results/whale.md]

Jia et al., USENIX ATC 2022: figures 17 and 18. Nodes of V100-32GB or P100-16GB, 50 Gb/s Ethernet.
Batches and sequence lengths are not published; those here are in the tables.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from benchmarks.whale_shares import ReplicaDevice, whale_shares
from meshwright.costmodel.stage.placement import spots
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.layout import balanced
from meshwright.ir.plan.plan import Plan
from meshwright.ir.presets import LINKS, MACHINES, device
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.shares import balanced_shares
from meshwright.planner.problem.candidates import Choice, build_plan, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.search import search_problem
from meshwright.testing.networks import GNMT, ResNet50

FAST, SLOW = "v100-32", "p100"
PUBLISHED_DP, PUBLISHED_PIPELINE = (1.25, 1.40), 1.2


@dataclass(frozen=True, slots=True)
class Case:
    """A model, one batch of it per device, and what the table calls it."""

    name: str
    build: Callable[[], tuple[nn.Module, Any, Any]]
    per_device: int
    """Samples per device and step."""


def mixed(per_node: int) -> Cluster:
    """A node of V100 and a node of P100, 50 Gb/s between them."""
    wire = replace(
        LINKS["ethernet-25g"], name="ethernet-50g", bandwidth_bytes_per_s=6.25e9 / per_node,
        shared_by=per_node, source="assumption", fit_error=None, reference="50 Gb/s a node",
    )  # fmt: skip
    nodes = tuple(
        Node(devices=(name,) * per_node, link=LINKS[MACHINES[name][0]]) for name in (FAST, SLOW)
    )
    return Cluster(
        name=f"{per_node} {FAST} + {per_node} {SLOW}",
        device_types=(device(FAST), device(SLOW)), nodes=nodes, between_nodes=wire,
    )  # fmt: skip


def synchronised_resnet() -> tuple[nn.Module, Any, Any]:
    return (
        ResNet50(width=64, classes=1000),
        (torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.long)),
        F.cross_entropy,
    )


def resnet() -> tuple[nn.Module, Any, Any]:
    """With norms that replicas need not agree on, as in Whale's runtime: of single samples, which
    read and write as much as batch-norm. Our runtime's batch-norm is that of the whole batch."""
    model, inputs, loss = synchronised_resnet()
    for module in [*model.modules()]:
        for name, norm in [*module.named_children()]:
            if isinstance(norm, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(1, norm.num_features))
    return model, inputs, loss


def gnmt() -> tuple[nn.Module, Any, Any]:
    ids = torch.zeros(2, 50, dtype=torch.long)

    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return GNMT(32000, 1024, 8), {"source": ids, "target": ids, "labels": ids}, loss


def bert() -> tuple[nn.Module, Any, Any]:
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    ids = torch.zeros(2, 128, dtype=torch.long)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}, None


def t5() -> tuple[nn.Module, Any, Any]:
    config = T5Config(
        d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.zeros(2, 128, dtype=torch.long)
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}, None


DATA_PARALLEL = (
    Case("ResNet-50", resnet, 32),
    Case("ResNet-50", resnet, 64),
    Case("ResNet-50", resnet, 128),
    Case("GNMT-16", gnmt, 64),
    Case("BERT-Large", bert, 16),
    Case("BERT-Large", bert, 32),
)
SYNCHRONISED = Case("ResNet-50, batch-norm of all", synchronised_resnet, 64)
TIGHT = tuple(Case("BERT-Large", bert, each) for each in (32, 48, 56, 64))
PIPELINES = (Case("BERT-Large", bert, 16), Case("T5-Large", t5, 16))


def graph_of(case: Case, devices: int) -> Graph:
    with torch.device("meta"):
        model, inputs, loss = case.build()
    return trace(model, inputs, loss, global_batch_size=case.per_device * devices)


def plan_with(problem: Problem, choice: Choice, shares: tuple[int, ...]) -> Plan:
    stage = replace(choice.stages[0], shares=shares)
    return build_plan(problem, replace(choice, stages=(stage,)))


def published_shares(problem: Problem) -> tuple[int, ...]:
    """Algorithm 1 with peak FLOP/s, and the memory that the plan of even shares needs."""
    even = build_plan(problem, uniform_choice(problem, dp_replicate=problem.cluster.num_devices))
    assert even.predicted
    memory = even.predicted.stages[0].memory
    state = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
    each = problem.batch // problem.cluster.num_devices
    sample = (memory.used_bytes - state) / each
    types = [problem.cluster.device(rank) for rank in range(problem.cluster.num_devices)]
    found = whale_shares(
        problem.batch,
        [ReplicaDevice(t.peak("float32"), t.usable_bytes, state, sample) for t in types],
    )
    assert found is not None
    return found


def busy_s(problem: Problem, plan: Plan) -> dict[str, float]:
    """Forward and backward of a replica, by device type."""
    stage, tables = plan.stages[0], problem.tables
    layouts = {pattern: plan.layout(name) for pattern, name in stage.layouts.items()}
    again = [False] * len(problem.graph.blocks)
    found = {}
    for spot in spots(tables, stage):
        cost = tables.stage(problem.graph.blocks, layouts, again, spot)
        found[spot.device] = max(found.get(spot.device, 0.0), cost.forward_s + cost.backward_s)
    return found


@dataclass(frozen=True, slots=True)
class Ways:
    """One model under even shares, Whale's and ours, in this order."""

    problem: Problem
    plans: tuple[Plan, ...]

    @classmethod
    def of(cls, case: Case, per_node: int) -> "Ways":
        cluster = mixed(per_node)
        problem = make_problem(graph_of(case, 2 * per_node), cluster, precision="fp32")
        choice = uniform_choice(problem, dp_replicate=cluster.num_devices)
        ways = (
            balanced(problem.batch, cluster.num_devices),
            published_shares(problem),
            balanced_shares(problem, choice.stages[0], 1),
        )
        return cls(problem, tuple(plan_with(problem, choice, shares) for shares in ways))

    @property
    def steps_s(self) -> list[float]:
        return [plan.predicted.step_s for plan in self.plans if plan.predicted]

    @property
    def gain(self) -> float:
        """Of our shares over even ones."""
        return self.steps_s[0] / self.steps_s[2]

    @property
    def excess_gib(self) -> list[float]:
        return [excess_bytes(self.problem, plan) / 2**30 for plan in self.plans]

    @property
    def shares(self) -> list[str]:
        """Samples on a V100 and on a P100."""
        found = [plan.stages[0].batch_shares for plan in self.plans]
        return [f"{max(shares)}:{min(shares)}" for shares in found]


def row(name: str, ways: Ways) -> str:
    steps, shares = [step * 1e3 for step in ways.steps_s], ways.shares
    busy = [
        busy_s(ways.problem, plan)[FAST] / step
        for plan, step in zip(ways.plans, ways.steps_s, strict=True)
    ]
    one = busy_s(ways.problem, ways.plans[0])
    ideal = (1 / one[FAST] + 1 / one[SLOW]) * one[SLOW] / 2
    return (
        f"| {name} | {ways.problem.batch} | {steps[0]:.0f} | {shares[1]} | {steps[1]:.0f} | "
        f"{steps[0] / steps[1]:.2f} | {shares[2]} | {steps[2]:.0f} | **{ways.gain:.3f}** | "
        f"{ideal:.2f} | {busy[2] / busy[0]:.2f} |"
    )


def tight_row(name: str, ways: Ways) -> str:
    cells = [
        f"{shares} | " + (f"{excess:.1f} GiB too much" if excess else f"{step * 1e3:.0f} ms")
        for shares, excess, step in zip(ways.shares, ways.excess_gib, ways.steps_s, strict=True)
    ]
    return f"| {name} | {ways.problem.batch} | {' | '.join(cells)} |"


PINS = ("pp=4", "dp_replicate=2", "tp=1", "schedule=one_f_one_b", "recompute=none")


def pipeline(case: Case, per_node: int, num_microbatches: int) -> str:
    cluster, pins = mixed(per_node), (*PINS, f"num_microbatches={num_microbatches}")
    problem = make_problem(
        graph_of(case, 2 * per_node), cluster, precision="fp32", constraints=pins
    )
    choice = uniform_choice(problem, pp=4, dp_replicate=2, num_microbatches=num_microbatches)
    plans = build_plan(problem, choice), search_problem(problem, "ilp")
    assert not any(excess_bytes(problem, plan) for plan in plans)
    even, aware = (plan.predicted.step_s for plan in plans if plan.predicted)
    counts = [[len(p.stage_blocks(problem.graph, i)) for i in range(4)] for p in plans]
    cuts = [":".join(map(str, count)) for count in counts]
    first = problem.tables.device_names[plans[1].stages[0].devices[0]]
    return (
        f"| {case.name} | {problem.batch} | {num_microbatches} | {cuts[0]} | {even * 1e3:.0f} | "
        f"{cuts[1]} | {first} | {aware * 1e3:.0f} | **{even / aware:.2f}** |"
    )


def report() -> str:
    low, high = PUBLISHED_DP
    found = [(case.name, Ways.of(case, 8)) for case in DATA_PARALLEL]
    inside = sum(low <= ways.gain <= high for _, ways in found)
    lines = [
        "# Whale (USENIX ATC 2022): balance over V100 and P100",
        "",
        f"{date.today()}, `python -m benchmarks.whale`. Predictions of the cost model from data",
        "sheets, in float32: no machine was measured, and nothing is fitted to Whale's figures.",
        "Batches and sequence lengths (BERT and T5 128, GNMT 50) are ours: none are published.",
        "",
        f"## Data parallel, {mixed(8).name}: published {low} to {high:.2f}, {inside} "
        f"of {len(found)} inside",
        "",
        "Steps in ms under even shares, under Whale's algorithm 1 (by peak FLOP/s, then by memory)",
        "and under ours (by the cost tables of each device type, exact over whole samples).",
        "What a batch gains depends on how much of its step gradients are waited for, so there are",
        "several of ResNet-50 and BERT; 128 images on a V100 are usual.",
        "`ideal`: if there were only computing. `busy`: share of the step that a V100 computes,",
        "under ours as a multiple of that under even shares.",
        "",
        "| model | batch | even | Whale V:P | step | gain | ours V:P | step | gain | ideal "
        "| busy |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row(*pair) for pair in found),
        row(SYNCHRONISED.name, Ways.of(SYNCHRONISED, 8)),
        "",
        "Whale's TensorFlow normalises the samples of each replica alone. Our runtime makes",
        "batch-norm that of the whole batch, at times that do not depend on the device: the last",
        "row. The first has norms that need no agreement and move as many bytes.",
        "",
        *memory_section(),
        *pipeline_section(),
        "",
    ]
    return "\n".join(lines)


def memory_section() -> list[str]:
    tight = [(case.name, Ways.of(case, 8)) for case in TIGHT]
    return [
        "## Memory: shares that fit",
        "",
        "Judged by the whole memory model, each device against its own memory.",
        "",
        "| model | batch | even |  | Whale |  | ours |  |",
        "|---|---|---|---|---|---|---|---|",
        *(tight_row(*pair) for pair in tight),
        "",
    ]


def pipeline_section() -> list[str]:
    return [
        f"## Pipeline of 4 stages, {mixed(4).name}: published about {PUBLISHED_PIPELINE}",
        "",
        "Two replicas per stage, 1F1B. Even: stages of equal FLOPs, V100s first (they have more",
        "memory). Aware: cuts and places as the search finds them by each device's own times.",
        "",
        "| model | batch | micro-batches | even blocks | step | aware blocks | first on | step "
        "| gain |",
        "|---|---|---|---|---|---|---|---|---|",
        *(pipeline(case, 4, 16) for case in PIPELINES),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    text = report()
    if arguments.output:
        arguments.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
