"""Random networks with up to twelve linkage groups: the agent against all partitions there are."""

import random
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, Link
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import ModelMesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.mesh_variants import ways
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.searchers.dqn.decisions import Pruning
from meshwright.planner.searchers.dqn.envs import DecisionEnv
from meshwright.planner.searchers.dqn.flips import best_of, flipped
from meshwright.planner.searchers.dqn.judge import Judge
from meshwright.planner.searchers.dqn.operators import Operators
from meshwright.planner.searchers.dqn.training import Settings, Trainer

SEEDS = tuple(range(20))
WIDTHS = (6, 16, 32, 64, 96, 128, 256)
STEPS_PER_GROUP = 40


class Network(nn.Module):
    """Layers of random widths; `skips` add what went into a pair of layers to what comes out."""

    def __init__(self, widths: tuple[int, ...], skips: tuple[bool, ...]) -> None:
        super().__init__()
        pairs = pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.skips = skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, skip in zip(self.layers, self.skips, strict=True):
            y = torch.relu(layer(x))
            x = x + y if skip and y.shape == x.shape else y
        return x


def _square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


@dataclass(frozen=True)
class Instance:
    """A random network on a random machine, and the mesh that it is laid out on."""

    seed: int
    widths: tuple[int, ...]
    skips: tuple[bool, ...]
    batch: int
    rate: float
    tp: int
    dp: int
    memory_bytes: int = 10**9
    """That a plan may use of each device."""

    def with_memory(self, share: float) -> "Instance":
        """With so much of the memory that all parameters with gradients and AdamW's state take."""
        stored = 4 * sum(a * b + b for a, b in pairwise(self.widths))
        return replace(self, memory_bytes=int(share * 4 * stored))

    @property
    def model(self) -> ModelMesh:
        return (("tp", self.tp),)

    @cached_property
    def graph(self) -> Graph:
        with torch.random.fork_rng(devices=[]):
            network = Network(self.widths, self.skips)
            example = torch.zeros(self.batch, self.widths[0])
            target = torch.zeros(self.batch, self.widths[-1])
            return trace(network, (example, target), _square)

    @cached_property
    def problem(self) -> Problem:
        return make_problem(self.graph, self.cluster, precision="fp32", constraints=self.pins)

    @property
    def pins(self) -> tuple[str, ...]:
        return (f"memory<={self.memory_bytes}B",)

    @property
    def cluster(self) -> Cluster:
        device = DeviceType(
            name="toy", kind="cpu", memory_bytes=10**9,
            memory_bandwidth_bytes_per_s=1e9, peak_flops={"float32": 1e10},
        )  # fmt: skip
        link = Link(name="wire", bandwidth_bytes_per_s=self.rate, latency_s=1e-6, step_s=1e-6)
        base = Cluster.preset("a100-40", devices_per_node=self.tp * self.dp)
        node = replace(base.nodes[0], devices=("toy",) * (self.tp * self.dp), link=link)
        return replace(base, name="toy", device_types=(device,), nodes=(node,))


def instance(seed: int, most_groups: int = 12) -> Instance:
    """Equal seeds give equal instances."""
    rng = random.Random(f"partition {seed}")
    layers = rng.randint(max(3, most_groups // 2), most_groups - 1)
    widths = tuple(rng.choice(WIDTHS) for _ in range(layers + 1))
    skips = tuple(rng.random() < 0.3 for _ in range(layers))
    return Instance(
        seed, widths, skips, batch=rng.choice((8, 32, 128)), rate=rng.choice((1e8, 1e9, 1e10)),
        tp=rng.choice((2, 4)), dp=rng.choice((1, 2)),
    )  # fmt: skip


def brute_force(agent: Operators) -> tuple[float, int]:
    """The least simulated step of all legal partitions, and how many there are."""
    groups = len(agent.linkage.groups)
    found = [
        agent.judged(bits).verdict.value
        for bits in (tuple(n >> i & 1 for i in range(groups)) for n in range(2**groups))
        if agent.is_legal(bits)
    ]
    return min(found), len(found)


@dataclass(frozen=True, slots=True)
class Learned:
    """What an agent came to."""

    value: float
    groups: int
    states: int
    """Different decisions, whole or in part, that it was in."""
    simulated: int
    too_large: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Reference:
    """What brute force comes to."""

    value: float
    groups: int
    partitions: int
    priced: float
    """Of the layouts that the ILP has priced, the best."""
    cpu_s: float


def reference(agent: Operators) -> Reference:
    """The best of all partitions."""
    start = time.process_time()
    value, partitions = brute_force(agent)
    took_s = time.process_time() - start
    priced = agent.known(ways(agent.problem)).value
    return Reference(value, len(agent.linkage.groups), partitions, priced, took_s)


def operators(asked: Instance, pruning: Pruning) -> Operators:
    """The decisions of an instance."""
    return Operators(asked.problem, asked.model, Judge(asked.problem), pruning)


def learned(agent: Operators, seed: int) -> Learned:
    """A new agent of the network, and the small steps after it."""
    start = time.process_time()
    groups = len(agent.linkage.groups)
    steps = STEPS_PER_GROUP * groups
    trainer = Trainer(DecisionEnv(agent), Settings(steps, starts=16), seed)
    trainer.learn(steps)
    list(flipped(agent, len(agent.found) + 12 * groups))
    return Learned(
        best_of(agent).verdict.value, groups, len(agent.states), len(agent.found),
        sum(not found.verdict.fits for found in agent.found.values()),
        time.process_time() - start,
    )  # fmt: skip
