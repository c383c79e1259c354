"""What a block's walk says is sent, and what generated code really sends on simulated ranks."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshwright.codegen.comm import Comm, Traffic
from meshwright.codegen.lower import lower
from meshwright.codegen.one_process import run_local
from meshwright.codegen.simulated import simulate
from meshwright.codegen.whole import held
from meshwright.costmodel.block import walk_block
from meshwright.costmodel.comm import group_levels
from meshwright.costmodel.walk import GraphFacts, Move, Site, Walk
from meshwright.ir.cluster import Cluster
from meshwright.ir.conversions import COMMUNICATES, Primitive
from meshwright.ir.graph import Graph
from meshwright.ir.inside import SHIFT, Inner
from meshwright.ir.plan import Plan
from tests.codegen.equality import rank_of, samples_of, whole_tensor

CLUSTER = Cluster.preset("a100-80")
_PART = frozenset({Primitive.ALL_GATHER, Primitive.ALL_TO_ALL})
"""Each rank hands in its part of the value; to others the whole."""


def sent(model: nn.Module, graph: Graph, plan: Plan, batch: dict[str, Tensor]) -> list[Traffic]:
    """What the first rank sends for one micro-batch, forward and backward."""
    stage = plan.stages[0]
    share = stage.batch_shares[0]

    def body(comm: Comm) -> list[Traffic]:
        programs = lower(graph, plan, rank_of(stage, comm))
        start = comm.coordinates["dp"] * share
        params = {p.name: p for program in programs for p in program.params}
        stored = {
            name: held(whole_tensor(model, graph, name), p.runs).clone()
            for name, p in params.items()
        }
        for name, p in params.items():
            stored[name].requires_grad_(p.requires_grad)
        comm.log = []
        samples = samples_of(graph, batch, start, share)
        run_local(programs, stored, [samples], comm, [start]).backward()
        totals = sum(len(p.totals.outputs) for p in programs if p.totals) if stage.dp > 1 else 0
        return comm.log[totals:]  # totals of the batch are not part of a block

    return simulate({"dp": stage.dp, **dict(stage.model)}, body)[0]


def walks(graph: Graph, plan: Plan) -> list[Walk]:
    """A walk of each block as the first rank runs it."""
    stage, layouts = plan.stages[0], {layout.name: layout for layout in plan.layouts}
    axes = stage.axes(plan.global_batch_size)
    site = Site(
        axes, dict.fromkeys(axes, 0), CLUSTER.device(0),
        {axis: group_levels(range(line.size), CLUSTER) for axis, line in axes.items()},
    )  # fmt: skip
    facts = GraphFacts.of(graph, plan.precision)
    return [
        walk_block(facts, block, layouts[stage.layouts[block.pattern]], site)
        for block in graph.blocks
    ]


def expected(graph: Graph, plan: Plan) -> list[Traffic]:
    """The same as `sent` by the cost model."""
    return [t for walk in walks(graph, plan) for t in _of_walk(graph, walk)]


def _of_walk(graph: Graph, walk: Walk) -> Iterator[Traffic]:
    for entry in walk.trail:
        if isinstance(entry, Move):
            conversion = entry.conversion
            both = (conversion.forward, conversion.backward)
            for primitive in both if graph.tensors[entry.name].requires_grad else both[:1]:
                if primitive in COMMUNICATES:
                    size = entry.size if primitive in _PART else 1
                    yield Traffic(entry.axis, primitive, entry.nbytes // size)
    for axis, message in walk.sent:
        yield from [_of_message(axis, message, walk.site.axes[axis].size)] * message.times


def _of_message(axis: str, message: Inner, ranks: int) -> Traffic:
    if message.kind == SHIFT:
        return Traffic(axis, SHIFT, message.nbytes)
    primitive = Primitive(message.kind)
    return Traffic(axis, primitive, message.nbytes // (ranks if primitive in _PART else 1))


def same_traffic(
    model: nn.Module, graph: Graph, plan: Plan, batch: dict[str, Tensor]
) -> Counter[Traffic]:
    """Checks that both are equal, and returns what is sent."""
    found, priced = Counter(sent(model, graph, plan, batch)), Counter(expected(graph, plan))
    assert found == priced, f"only sent: {found - priced}\nonly priced: {priced - found}"
    return found


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Tokens(nn.Module):
    """Three residual layers over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()
