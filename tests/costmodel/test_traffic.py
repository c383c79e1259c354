"""The communication that the cost model counts is what generated code sends."""

from functools import cache

import pytest
import torch
from torch import nn

from meshwright.codegen.comm import Traffic
from meshwright.costmodel.block import summary
from meshwright.ir.cluster import Cluster
from meshwright.ir.conversions import Primitive
from meshwright.ir.graph import Graph
from meshwright.ir.plan import BlockLayout
from meshwright.ir.trace import trace
from meshwright.planner.problem import make_problem
from tests.codegen.equality import plan_of
from tests.costmodel.traffic import Tokens, same_traffic, walks
from tests.models import CASES

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


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_blocks_send_what_is_priced(name: str, dp: int) -> None:
    sizes, ops, stored = PLANS[name]
    model, graph = traced()
    plan = plan_of(graph, layouts(sizes, ops, stored), (BATCH // dp,) * dp)
    batch = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    assert same_traffic(model, graph, plan, batch)


def test_two_axes_by_hand() -> None:
    """A layer gathers and scatters tokens over columns, and its weights over rows."""
    sizes, ops, stored = PLANS["two axes"]
    model, graph = traced()
    plan = plan_of(graph, layouts(sizes, ops, stored), (BATCH,))
    batch = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    found = same_traffic(model, graph, plan, batch)
    tokens, weight = BATCH * LENGTH * WIDTH * 8 // 2, WIDTH * 16 * 8 // 2
    gather, scatter = Primitive.ALL_GATHER, Primitive.REDUCE_SCATTER
    # x is gathered for `up`, the sum of `down` scattered; backward mirrors it, but for the input.
    assert found[Traffic("tp_col", gather, tokens // 2)] == 3 + 3
    assert found[Traffic("tp_col", scatter, tokens)] == 3 + 2
    assert found[Traffic("tp_row", gather, weight // 2)] == 2 * 3
    assert found[Traffic("tp_row", scatter, weight)] == 2 * 3
    assert found[Traffic("tp_col", Primitive.ALL_REDUCE, 8)] == 1  # the loss, on both axes
    assert found.total() == 25


def test_seconds_and_bytes_of_three_axes_by_hand() -> None:
    """The second layer; parts are those of a rank."""
    sizes, ops, stored = PLANS["three axes"]
    _, graph = traced()
    plan = plan_of(graph, layouts(sizes, ops, stored), (BATCH,))
    walk, block = walks(graph, plan)[1], graph.blocks[1]
    cost = summary(walk, block, plan.layouts[1])
    tokens, weight, bias = BATCH * LENGTH * WIDTH * 8 // 4, WIDTH * 16 * 8 // 2, WIDTH * 8
    moves = [  # both ways
        *[(tokens, "tp_col")] * 2, *[(weight, "tp_row")] * 2, (bias, "tp_depth"),
    ]  # fmt: skip
    gather = sum(walk.site.primitive_s(Primitive.ALL_GATHER, n, axis) for n, axis in moves)
    scatter = sum(walk.site.primitive_s(Primitive.REDUCE_SCATTER, n, axis) for n, axis in moves)
    mixed = walk.site.primitive_s(Primitive.REDUCE_SCATTER, tokens, "tp_col")
    mixed -= walk.site.primitive_s(Primitive.ALL_GATHER, tokens, "tp_col")
    masked = walk.site.primitive_s(Primitive.MASK, bias, "tp_col")
    assert cost.comm_forward_s == pytest.approx(gather + mixed + masked)
    assert cost.comm_backward_s == pytest.approx(scatter - mixed)
    assert dict(zip(block.params, cost.param_bytes, strict=True)) == {
        "h_1_up_weight": weight // 2, "h_1_up_bias": 16 * 8 // 2,
        "h_1_down_weight": weight // 2, "h_1_down_bias": bias // 2,
    }  # fmt: skip
    rows = ("tp_depth", "tp_row")
    assert cost.summed_over == (("tp_depth",), rows, ("tp_depth",), ("tp_row",))
    # x whole on columns, what relu makes, and both weights as gathered; x itself is not read.
    assert cost.saved_bytes == tokens + tokens + 2 * weight and cost.saved_inputs == (0,)
    assert cost.output_bytes == (tokens // 2,)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "resnet50"])
def test_planned_layouts_send_what_is_priced(name: str) -> None:
    case = CASES[name]
    model, batch = case.model(), case.example()
    graph = trace(model, batch, case.loss_fn)
    values = batch.values() if isinstance(batch, dict) else batch
    named = dict(zip(graph.input_names, values, strict=True))
    problem = make_problem(graph, Cluster.local(4), precision="fp64")
    plan = plan_of(graph, problem.layouts((("tp", 2),)), (case.batch_size // 2,) * 2)
    assert same_traffic(model, graph, plan, named)
