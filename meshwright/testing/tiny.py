"""Random tiny problems: uneven chains, skips, tied weights; machines mixed, slow and tight."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from hypothesis import strategies as st
from torch import nn

from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import DeviceType, Link
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.searchers.exhaustive import count

WIDTH = 8
PINS = (
    "saved=none", "recompute=none", "schedule=one_f_one_b", "num_microbatches=2", "zero<=1",
    "pp<=2", "dp<=2",
)  # fmt: skip
"""What is pinned until an instance is small enough."""


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    """Layers of several sizes; `skip` joins the first result to the last layer's input, `tied` lets
    the last layer share a weight with the first one of its size."""

    def __init__(self, hidden: tuple[int, ...], *, skip: bool, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(h) for h in hidden)
        self.skip = skip
        first = hidden.index(hidden[-1])
        if tied and first + 1 < len(hidden):
            self.layers[-1].up.weight = self.layers[first].up.weight  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:-1]:
            x = layer(x)
        return torch.as_tensor(self.layers[-1](x + first if self.skip else x))


def _square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


@cache
def _graph(hidden: tuple[int, ...], skip: bool, tied: bool, batch: int) -> Graph:
    example = (torch.zeros(batch, WIDTH), torch.zeros(batch, WIDTH))
    return trace(Chain(hidden, skip=skip, tied=tied), example, _square)


@dataclass(frozen=True, slots=True)
class Tiny:
    """What an instance is made of; `str` tells it in one line."""

    hidden: tuple[int, ...]
    skip: bool
    tied: bool
    batch: int
    nodes: tuple[tuple[str, ...], ...]
    inside: float
    between: float
    cores: int
    cap: int | None

    def cluster(self) -> Cluster:
        fast = DeviceType(
            name="fast", kind="cpu", memory_bytes=10**8,
            memory_bandwidth_bytes_per_s=1e8, peak_flops={"float32": 1e8},
        )  # fmt: skip
        weak = replace(
            fast, name="weak", reserved_bytes=10**8 - 40_000, peak_flops={"float32": 3e7}
        )
        inner, outer = (
            Link(name=f"{rate:g}", bandwidth_bytes_per_s=rate, latency_s=1e-6, step_s=1e-6)
            for rate in (self.inside, self.between)
        )
        return Cluster(
            name="tiny", device_types=(fast, weak), between_nodes=outer,
            nodes=tuple(Node(devices=n, link=inner, cores=self.cores) for n in self.nodes),
        )  # fmt: skip

    def problem(self, most: int) -> Problem:
        """With as many decisions pinned as make it small."""
        graph = _graph(self.hidden, self.skip, self.tied, self.batch)
        cap = (f"memory<={self.cap}B",) if self.cap else ()
        for number in range(len(PINS) + 1):
            found = make_problem(
                graph, self.cluster(), precision="fp32", constraints=(*cap, *PINS[:number])
            )
            if count(found, most) <= most:
                break
        return found


def tiny() -> st.SearchStrategy[Tiny]:
    """Any of them."""
    return st.builds(
        Tiny,
        hidden=st.lists(st.sampled_from((4, 16, 64)), min_size=2, max_size=4).map(tuple),
        skip=st.booleans(),
        tied=st.booleans(),
        batch=st.sampled_from((2, 4, 8)),
        nodes=st.sampled_from((
            (("fast",),), (("fast", "fast"),), (("fast", "weak"),), (("fast",), ("fast",)),
            (("fast", "fast", "weak"),), (("fast",), ("weak", "weak")), (("fast",) * 3,),
            (("fast", "fast"), ("fast", "fast")),
        )),
        inside=st.sampled_from((1e6, 1e8)),
        between=st.sampled_from((1e5, 1e7)),
        cores=st.sampled_from((0, 1)),
        cap=st.sampled_from((None, 8_000, 20_000, 60_000)),
    )  # fmt: skip
