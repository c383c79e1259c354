"""What a block's walk says is sent, and what generated code really sends on simulated ranks."""

from collections import Counter
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn

from meshwright.codegen.collectives.comm import Comm, SentCollective
from meshwright.codegen.lower.lower import lower
from meshwright.codegen.one_process import run_local
from meshwright.costmodel.block.block import walk_block
from meshwright.costmodel.block.price_ops import GraphFacts, PricedMove, StageSite, Walk
from meshwright.costmodel.comm.borders import borders
from meshwright.costmodel.comm.comm import group_levels
from meshwright.costmodel.cost_cache import CostTables
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.conversions import COMMUNICATES, Primitive
from meshwright.ir.layout.op_messages import SHIFT, Inner
from meshwright.ir.plan.plan import BlockLayout, Plan
from meshwright.ir.precision import precision
from meshwright.ir.trace.trace import trace
from meshwright.testing.simulated import simulate
from meshwright.testing.whole_values import held
from tests.codegen.equality import rank_of, samples_of, whole_tensor

CLUSTER = Cluster.preset("a100-80")
_PART = frozenset({Primitive.ALL_GATHER, Primitive.ALL_TO_ALL})
"""Each rank hands in its part of the value; to others the whole."""


def sent(
    model: nn.Module, graph: Graph, plan: Plan, batch: dict[str, Tensor]
) -> list[SentCollective]:
    """What the first rank sends for one micro-batch, forward and backward."""
    return sent_by_each(model, graph, plan, batch)[0]


def sent_by_each(
    model: nn.Module, graph: Graph, plan: Plan, batch: dict[str, Tensor]
) -> list[list[SentCollective]]:
    """The same of every rank."""
    stage = plan.stages[0]
    share = stage.batch_shares[0]

    def body(comm: Comm) -> list[SentCollective]:
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

    return simulate({"dp": stage.dp, **dict(stage.model)}, body)


def walks(graph: Graph, plan: Plan) -> list[Walk]:
    """A walk of each block as the first rank runs it."""
    stage, layouts = plan.stages[0], {layout.name: layout for layout in plan.layouts}
    facts = GraphFacts.of(graph, precision(plan.precision), "cpu")
    return [
        walk_block(facts, block, layouts[stage.layouts[block.pattern]], site_of(plan))
        for block in graph.blocks
    ]


def site_of(plan: Plan) -> StageSite:
    axes = plan.stages[0].axes(plan.global_batch_size)
    levels = {axis: group_levels(range(line.size), CLUSTER) for axis, line in axes.items()}
    return StageSite(axes, dict.fromkeys(axes, 0), CLUSTER.device(0), levels)


def between(graph: Graph, plan: Plan) -> list[Walk]:
    """Walks of what is converted between blocks and stages."""
    tables = CostTables(graph, CLUSTER, plan.precision)
    found = []
    for stage in borders(tables, plan):
        for name, source, target in stage.changes:
            walk = Walk(tables.facts, site_of(plan), None)
            walk.placed[name] = dict(source)
            walk.convert(name, dict(target))
            found.append(walk)
    return found


def expected(graph: Graph, plan: Plan) -> list[SentCollective]:
    """The same as `sent` by the cost model."""
    everything = [*walks(graph, plan), *between(graph, plan)]
    return [t for walk in everything for t in _of_walk(graph, walk)]


def _of_walk(graph: Graph, walk: Walk) -> Iterator[SentCollective]:
    for entry in walk.trail:
        if isinstance(entry, PricedMove):
            conversion = entry.conversion
            both = (conversion.forward, conversion.backward)
            for primitive in both if graph.tensors[entry.name].requires_grad else both[:1]:
                if primitive in COMMUNICATES:
                    size = entry.size if primitive in _PART else 1
                    yield SentCollective(entry.axis, primitive, entry.nbytes // size)
    for axis, message in walk.sent:
        yield from [_of_message(axis, message, walk.site.axes[axis].size)] * message.times


def _of_message(axis: str, message: Inner, ranks: int) -> SentCollective:
    if message.kind == SHIFT:
        return SentCollective(axis, SHIFT, message.nbytes)
    primitive = Primitive(message.kind)
    return SentCollective(axis, primitive, message.nbytes // (ranks if primitive in _PART else 1))


def same_traffic(
    model: nn.Module, graph: Graph, plan: Plan, batch: dict[str, Tensor]
) -> Counter[SentCollective]:
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


BATCH, LENGTH, WIDTH = 4, 8, 8
DP = {
    "up/linear": "S(0) R|P R|P -> S(0)", "/relu": "S(0) -> S(0)",
    "down/linear": "S(0) R|P R|P -> S(0)", "/add": "S(0) S(0) -> S(0)",
    "/square": "S(0) -> S(0)", "/mean": "S(0) -> P",
}  # fmt: skip
TOKENS = {
    "up/linear": "S(1) R|P R|P -> S(1)", "/relu": "S(1) -> S(1)",
    "down/linear": "S(1) R|P R|P -> S(1)", "/add": "S(1) S(1) -> S(1)",
    "/square": "S(1) -> S(1)", "/mean": "S(1) -> P",
}  # fmt: skip
COLUMNS = {
    "up/linear": "R|P S(0) S(0) -> S(2)", "/relu": "S(2) -> S(2)",
    "down/linear": "S(2) S(1) P -> P", "/add": "S(2) S(2) -> S(2)",
    "/square": "S(2) -> S(2)", "/mean": "S(2) -> P",
}  # fmt: skip
MEGATRON = {
    **COLUMNS, "/add": "R R -> R", "/square": "R -> R", "/mean": "R -> R",
}  # fmt: skip


def inside(ops: dict[str, str], parts: int) -> dict[str, str]:
    """The same splitting tokens inside of as many parts."""
    return {key: text.replace("S(1)", f"S(1,outer={parts})") for key, text in ops.items()}


@cache
def traced() -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = Tokens().double()
    return model, trace(model, {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)})


def layouts(
    sizes: dict[str, int], ops: dict[str, dict[str, str]], stored: dict[str, dict[str, str]]
) -> list[BlockLayout]:
    """One per block; values enter and leave as `/add` reads and makes them."""
    _, graph = traced()
    found = []
    for block in graph.blocks:
        keys = [op.key for op in graph.block_ops(block)]
        last = keys[-1]
        found.append(BlockLayout(
            name=block.pattern, pattern=block.pattern, mesh=sizes, parameters=stored,
            inputs=({axis: text["/add"].split()[0] for axis, text in ops.items()},),
            outputs=({axis: text[last].split()[-1] for axis, text in ops.items()},),
            ops={key: {axis: text[key] for axis, text in ops.items()} for key in keys},
        ))  # fmt: skip
    return found


TWO = {"tp_row": 2, "tp_col": 2}
SUMMA = {
    "up.weight": {"tp_row": "S(1)", "tp_col": "S(0)"}, "up.bias": {"tp_col": "S(0)"},
    "down.weight": {"tp_row": "S(0)", "tp_col": "S(1)"},
}  # fmt: skip
NESTED = SUMMA | {"up.weight": {"tp_row": "S(0,outer=2)", "tp_col": "S(0)"}}
PLANS = {
    "megatron": ({"tp": 2}, {"dp": DP, "tp": MEGATRON},
                 {"up.weight": {"tp": "S(0)"}, "up.bias": {"tp": "S(0)"},
                  "down.weight": {"tp": "S(1)"}}),
    "sequence": ({"cp": 2}, {"dp": DP, "cp": TOKENS}, {}),
    "sequence, tensors": ({"cp": 2, "tp": 2}, {"dp": DP, "cp": TOKENS, "tp": MEGATRON},
                          {"up.weight": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}}),
    "two axes": (TWO, {"dp": DP, "tp_row": TOKENS, "tp_col": COLUMNS}, SUMMA),
    "nested": (TWO, {"dp": DP, "tp_row": TOKENS, "tp_col": COLUMNS}, NESTED),
    "three axes": ({"tp_depth": 2, **TWO},
                   {"dp": DP, "tp_depth": TOKENS, "tp_row": inside(TOKENS, 2), "tp_col": COLUMNS},
                   SUMMA | {"down.bias": {"tp_depth": "S(0)"}}),
}  # fmt: skip
