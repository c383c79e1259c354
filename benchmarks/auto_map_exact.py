"""Random networks with up to twelve linkage groups: the agent against all partitions there are."""

import random
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import nn

from meshwright.ir.cluster import Cluster
from meshwright.ir.device import DeviceType, Link
from meshwright.ir.graph import Graph
from meshwright.ir.plan import ModelMesh
from meshwright.ir.trace import trace
from meshwright.planner.dqn.decisions import Pruning
from meshwright.planner.dqn.envs import DecisionEnv
from meshwright.planner.dqn.flips import best_of, flipped
from meshwright.planner.dqn.judge import Judge
from meshwright.planner.dqn.operators import Operators
from meshwright.planner.dqn.training import Settings, Trainer
from meshwright.planner.problem import Problem, make_problem

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
        device = DeviceType(
            name="toy", kind="cpu", memory_bytes=10**9,
            memory_bandwidth_bytes_per_s=1e9, peak_flops={"float32": 1e10},
        )  # fmt: skip
        link = Link(name="wire", bandwidth_bytes_per_s=self.rate, latency_s=1e-6, step_s=1e-6)
        base = Cluster.preset("a100-40", devices_per_node=self.tp * self.dp)
        node = replace(base.nodes[0], devices=("toy",) * (self.tp * self.dp), link=link)
        machine = replace(base, name="toy", device_types=(device,), nodes=(node,))
        return make_problem(self.graph, machine, precision="fp32")


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
    cpu_s: float


def learned(asked: Instance, pruning: Pruning, seed: int) -> Learned:
    """A new agent on an instance, and the small steps after it."""
    start = time.process_time()
    agent = Operators(asked.problem, asked.model, Judge(asked.problem), pruning)
    groups = len(agent.linkage.groups)
    steps = STEPS_PER_GROUP * groups
    trainer = Trainer(DecisionEnv(agent), Settings(steps, starts=16), seed)
    trainer.learn(steps)
    list(flipped(agent, len(agent.found) + 12 * groups))
    return Learned(
        best_of(agent).verdict.value, groups, len(agent.states), len(agent.found),
        time.process_time() - start,
    )  # fmt: skip
