"""Searches whose plans and predictions are recorded: every form that a plan has today, in small.

Clusters are the same on every machine: `Cluster.local` would ask this one for its memory and cores.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.costmodel.block.block_costs import BlockSpot
from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.graph.graph import Graph
from meshwright.ir.profile.profile import BlockRecord, Profile
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.kernels import asked_kernels, worth
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.schedule_tools import SCHEDULES
from meshwright.profiling.work import block_tasks
from meshwright.testing.models import CASES as ZOO
from tests.costmodel.explain.runs import MACHINE
from tests.costmodel.fit.cpu_profiles import cpu_profile
from tests.costmodel.fit.timings import timing
from tests.costmodel.models import mlp
from tests.planner.problems import TINY
from tests.planner.problems import cluster as toy

OPTIMIZERS = ("adamw", "adam", "sgd", "sgd_momentum", "adagrad", "rmsprop")


@dataclass(frozen=True, slots=True)
class Case:
    """One search."""

    graph: str
    """A key of `GRAPHS`."""
    cluster: str
    """A key of `CLUSTERS`."""
    pins: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `make_problem`."""
    profile: str = ""
    """A key of `PROFILES`."""
    searcher: str = "ilp"

    def problem(self) -> Problem:
        graph, cluster = graph_of(self.graph), CLUSTERS[self.cluster]()
        settings: dict[str, Any] = {"precision": "bf16-autocast", **self.settings}
        profile = None
        if self.profile:
            plain = make_problem(graph, cluster, constraints=self.pins, **settings)
            profile = PROFILES[self.profile](plain)
        return make_problem(graph, cluster, constraints=self.pins, profile=profile, **settings)


def _gpt2(kernels: tuple[str, ...] = ()) -> Graph:
    """Wide enough for its products to take longer than their launches; on no device."""
    config = GPT2Config(
        vocab_size=8192, n_positions=256, n_embd=512, n_layer=4, n_head=8, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
        ids = torch.zeros(32, 256, dtype=torch.long)
    return trace(model, {"input_ids": ids, "labels": ids}, kernels=kernels)


def _zoo(name: str, batch: int, kernels: str = "none", priced_on: str = "") -> Graph:
    case = ZOO[name]
    return trace(
        case.model(torch.float32), case.example(batch, 0, torch.float32), case.loss_fn,
        kernels=asked_kernels(kernels), wins=worth([CLUSTERS[priced_on]()]) if priced_on else None,
    )  # fmt: skip


GRAPHS: dict[str, Callable[[], Graph]] = {
    "gpt2": _gpt2,
    "gpt2 fused": lambda: _gpt2(asked_kernels("all")),
    "llama": lambda: _zoo("llama", 16),
    "mixtral": lambda: _zoo("mixtral", 16),
    "llama fused": lambda: _zoo("llama", 16, "all"),
    "llama auto": lambda: _zoo("llama", 16, "auto", "h100 x8"),
    "mixtral fused": lambda: _zoo("mixtral", 16, "all"),
    "chain": lambda: _zoo("sequential", 16),
    "mlp": lambda: replace(mlp(4), fingerprint="mlp4"),
}


@cache
def graph_of(name: str) -> Graph:
    """Trace a graph once for all of its cases."""
    return GRAPHS[name]()


def _local(processes: int, cores: int) -> Cluster:
    node = Node(devices=("cpu",) * processes, link=presets.LINKS["loopback"], cores=cores)
    kind = presets.cpu_process(4 << 30)
    return Cluster(name=f"local:{processes}", device_types=(kind,), nodes=(node,))


def _mixed() -> Cluster:
    """A node of fast devices and one of slow ones with less memory."""
    fast, slow = (Cluster.preset(name, devices_per_node=2) for name in ("a100-40", "v100-16"))
    ether = presets.network("ethernet-25g", 2, 2)
    return Cluster(
        name="mixed", device_types=(*fast.device_types, *slow.device_types),
        nodes=(*fast.nodes, *slow.nodes), between_nodes=ether,
    )  # fmt: skip


CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "a100 x4": lambda: Cluster.preset("a100-40", devices_per_node=4),
    "a100 2x4": lambda: Cluster.preset("a100-40", num_nodes=2, devices_per_node=4),
    "h100 x8": lambda: Cluster.preset("h100-sxm", devices_per_node=8),
    "v100 2x2 ether": lambda: Cluster.preset(
        "v100-16", num_nodes=2, devices_per_node=2, network="ethernet-25g"
    ),
    "local:4": lambda: _local(4, 4),
    "local:4 on 2": lambda: _local(4, 2),
    "local:2": lambda: _local(2, 2),
    "mixed": _mixed,
    "toy:2": lambda: toy(2),
    "toy:4 slow": lambda: toy(4, slow=True),
}


def _blocks(problem: Problem) -> Profile:
    """All blocks of the problem's plans as if measured, slower than the model says."""
    blocks: dict[str, BlockRecord] = {}
    named = {block.pattern: block for block in problem.graph.blocks}
    for task in block_tasks(problem):
        block, stage = named[task.pattern], task.plan.stages[task.stage]
        layout = task.plan.layout(stage.layouts[task.pattern])
        device = problem.cluster.device_types[0].name
        spot = BlockSpot(task.samples, stage.dp, stage.model, device, (), ((),) * len(stage.model))
        cost = problem.tables.blocks.cost(block, layout, spot)
        blocks[task.key] = BlockRecord(
            key=task.key, pattern=task.pattern, samples=task.samples, tp=task.tp, processes=2,
            forward=timing(1.25 * (cost.forward_s - cost.comm_forward_s)),
            backward=timing(1.25 * (cost.backward_s - cost.comm_backward_s)),
            backward_input=None, backward_weight=None,
        )  # fmt: skip
    return Profile(machine=replace(MACHINE, kind="cpu"), blocks=blocks)


PROFILES: dict[str, Callable[[Problem], Profile]] = {
    "blocks": _blocks,
    "ops": lambda problem: cpu_profile(),
}


BASE = ("pp=1", "model=1", "num_microbatches=2", "recompute=none", "saved=none")
AXES = BASE[2:]


def _replicas() -> dict[str, Case]:
    """How replicas agree on gradients, and optimizers."""
    found: dict[str, Case] = {}
    for cluster in ("a100 2x4", "local:4"):
        size = 8 if cluster.startswith("a100") else 4
        for zero in range(4):
            pins = (*BASE, f"zero={zero}", "dp_replicate=2", f"dp_shard={size // 2}")
            if zero == 3:
                pins = (*pins, "prefetch=0")
            found[f"zero {zero} of 2 x {size // 2} on {cluster}"] = Case("gpt2", cluster, pins)
    shards = (*BASE, "dp_shard=4")
    found |= {
        "zero 3 ahead": Case("gpt2", "v100 2x2 ether", (*shards, "zero=3", "prefetch=2")),
        "zero 1, shared cores": Case("gpt2", "local:4 on 2", (*shards, "zero=1")),
        "zero 3, shared cores": Case(
            "gpt2", "local:4 on 2", (*shards, "zero=3", "prefetch=1"), {"precision": "fp32"}
        ),
        "zero 2, clipped": Case(
            "gpt2", "v100 2x2 ether", (*shards, "zero=2"), {"max_grad_norm": 1.0}
        ),
        "zero 0, clipped": Case(
            "gpt2", "a100 x4", (*BASE, "dp_replicate=4"), {"max_grad_norm": 1.0}
        ),
    }
    for optimizer in OPTIMIZERS:
        settings = {"optimizer": optimizer, "precision": "fp32"}
        pins = (*BASE, "dp_replicate=2", "dp_shard=2", "zero=1")
        found[optimizer] = Case("mlp", "a100 x4", pins, settings)
    return found


def _stages() -> dict[str, Case]:
    """What is saved for the backward, and how stages and devices differ."""
    found: dict[str, Case] = {}
    for saved in ("selective", "offload"):
        pins = ("pp=1", "model=1", "dp_shard=4", "zero=2", "num_microbatches=2", f"saved={saved}")
        found[f"saved {saved}"] = Case("gpt2", "a100 x4", (*pins, "recompute=none"))
    two = ("pp=2", "model=1", "dp_shard=2", "zero=1", "num_microbatches=4", "saved=none")
    found |= {
        "recompute": Case("gpt2", "a100 x4", (*two, "recompute=full", "schedule=one_f_one_b")),
        "stage aware": Case("gpt2", "a100 x4", (*two, "recompute=stage_aware")),
        "one block recomputed": Case(
            "gpt2", "a100 x4", (*two, "block transformer.h.1 recompute=full")
        ),
        "uneven stages": Case(
            "gpt2", "a100 x4",
            (*two, "recompute=none", "block transformer.h.3 starts stage 1",
             "schedule=one_f_one_b"),
        ),
        "uneven meshes": Case(
            "gpt2", "a100 x4",
            ("pp=2", "stage 0 mesh dp_shard=3", "stage 1 mesh tp=1", "num_microbatches=4",
             "saved=none", "recompute=none", "schedule=gpipe", "overlap=none"),
        ),
        "mixed": Case("gpt2", "mixed", ("pp=2", "model=1", "num_microbatches=4", "saved=none")),
        "mixed replicas": Case("gpt2", "mixed", ("pp=1", "dp=4", "num_microbatches=2", "zero=1")),
    }  # fmt: skip
    return found


def _schedules() -> dict[str, Case]:
    """Every schedule."""
    found: dict[str, Case] = {}
    for schedule in SCHEDULES:
        pins = ("pp=2", "model=1", "dp_shard=2", "num_microbatches=4", "saved=none",
                f"schedule={schedule}")  # fmt: skip
        found[f"schedule {schedule}"] = Case("mlp", "toy:4 slow", pins, {"precision": "fp32"})
    return found


def _model_axes() -> dict[str, Case]:
    """Axes inside a replica, and what goes on beside their collectives."""
    found: dict[str, Case] = {}
    found |= {
        "tp": Case("gpt2", "a100 x4", (*AXES, "pp=1", "tp=2", "dp_shard=2", "zero=1")),
        "tp of a local job": Case("llama", "local:4", (*AXES, "pp=2", "tp=2", "dp=1")),
        "cp": Case("gpt2", "a100 x4", (*AXES, "pp=1", "cp=2", "dp_shard=2", "zero=3")),
        "ep": Case("mixtral", "a100 x4", (*AXES, "pp=1", "ep=2", "dp_shard=2", "zero=1")),
        "2D": Case("llama", "a100 x4", (*AXES, "pp=1", "tp_row=2", "tp_col=2")),
        "3D": Case("llama", "h100 x8", (*AXES, "pp=1", "tp_depth=2", "tp_row=2", "tp_col=2")),
    }
    for overlap in ("none", "gradients", "linear", "block", "blocks"):
        pins = ("pp=1", "tp=4", "dp=1", *AXES, f"overlap={overlap}")
        found[f"overlap {overlap}"] = Case("gpt2", "v100 2x2 ether", pins)
    return found


def _kernels() -> dict[str, Case]:
    """Fused kernels, and profiles."""
    found: dict[str, Case] = {}
    fused = ("pp=1", *AXES)
    found |= {
        "kernels": Case(
            "gpt2 fused", "h100 x8", (*fused, "tp=2", "dp_shard=4", "zero=2"),
            {"max_grad_norm": 1.0},
        ),
        "kernels, zero 3": Case(
            "gpt2 fused", "h100 x8", (*fused, "model=1", "dp_shard=8", "zero=3")
        ),
        "kernels beside collectives": Case(
            "gpt2 fused", "h100 x8", (*fused, "tp=8", "dp=1", "overlap=none")
        ),
        "kernels of a llama": Case(
            "llama fused", "h100 x8", (*fused, "tp=2", "dp_shard=4", "overlap=none")
        ),
        "kernels that pay": Case(
            "llama auto", "h100 x8", (*fused, "tp=2", "dp_shard=4", "zero=1", "overlap=none")
        ),
        "kernels of experts": Case(
            "mixtral fused", "a100 x4", (*fused, "ep=2", "dp_shard=2", "zero=1")
        ),
        "measured blocks": Case("gpt2", "local:2", (*fused, "tp=2", "dp=1"), {}, "blocks"),
        "measured ops": Case("gpt2", "local:2", (*fused, "dp_shard=2", "zero=1"), {}, "ops"),
    }  # fmt: skip
    return found


def _free() -> dict[str, Case]:
    """Searches of small models in which all is open."""
    return {
        "free gpt2": Case("gpt2", "a100 x4"),
        "free gpt2, slow network": Case("gpt2", "v100 2x2 ether", ("memory<=3GB",)),
        "free llama": Case("llama", "local:4 on 2"),
        "free mlp": Case("mlp", "toy:2", (), {"precision": "fp32"}),
        "free chain, auto": Case("chain", "local:2", (), {"precision": "fp32"}, "", "auto"),
    }


CASES: dict[str, Case] = (
    _replicas() | _stages() | _schedules() | _model_axes() | _kernels() | _free()
)
TINIES: tuple[str, ...] = tuple(TINY)
"""Free searches, too, of problems that every searcher meets."""
