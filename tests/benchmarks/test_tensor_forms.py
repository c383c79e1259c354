"""Where volume is all that counts, the planner's own layouts are the known forms, or better."""

from functools import cache

import pytest
import torch

from benchmarks.tensor_volume import SAMPLES, by_hand, volume
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.layout import Shard, parse_placement
from meshwright.ir.plan.plan import BlockLayout, ModelMesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.layout_objective import Regime
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.inside.prices import AlphaBeta
from meshwright.testing import tensor_forms as forms

WIDTH = 3072
ONLY_VOLUME = AlphaBeta(
    latency_s=0.0, bandwidth=1e9, flops_per_s=1e9, memory_bandwidth=1e30, half_reduce=1.0
)
"""Arithmetic so slow that none of it is done twice."""
LINE: ModelMesh = (("tp", 64),)
SQUARE: ModelMesh = (("tp_row", 8), ("tp_col", 8))
CUBE: ModelMesh = (("tp_depth", 4), ("tp_row", 4), ("tp_col", 4))


@cache
def traced(tokens: int) -> Graph:
    """Enough layers that the equal ones between the first and the last decide."""
    case = forms.case(SAMPLES, tokens // SAMPLES, WIDTH, layers=12, bias=False)
    with torch.device("meta"):
        model = case.model()
        batch = torch.zeros(2, SAMPLES, tokens // SAMPLES, WIDTH)
    return trace(model, tuple(batch), None, global_batch_size=SAMPLES)


@cache
def layer(tokens: int, mesh: ModelMesh) -> BlockLayout:
    """As the planner lays it out for all samples at once, with parameters split over all ranks."""
    regime = Regime(
        (ONLY_VOLUME,) * len(mesh), samples=SAMPLES, parameter_uses=1.0, stored_s_per_byte=1e-5
    )
    graph = traced(tokens)
    found = solve_layouts(graph, mesh, regime, split_borders=True)
    return next(x for x in found if x.pattern == graph.blocks[1].pattern)


@pytest.mark.parametrize("tokens", [6144, 16384])
@pytest.mark.parametrize(
    ("mesh", "known"), [(LINE, ["1d"]), (SQUARE, ["2d"]), (CUBE, ["2.5d", "3d"])], ids=str
)
def test_no_form_sends_less(tokens: int, mesh: ModelMesh, known: list[str]) -> None:
    graph = traced(tokens)
    ours = volume(graph, graph.blocks[1], layer(tokens, mesh)).kept
    best = min(by_hand(graph, name).kept for name in known)
    assert ours <= best * (1 + 1e-9)


def test_3d_sends_a_third_of_1d_and_half_of_2d() -> None:
    """The published ratios, of what the planner chooses; SUMMA gathers twice."""
    graph = traced(6144)
    ours = volume(graph, graph.blocks[1], layer(6144, CUBE)).kept
    one, two = by_hand(graph, "1d").kept, by_hand(graph, "2d").again
    assert one / ours == pytest.approx(3.0, abs=0.05)
    assert two / ours >= 2.2


@pytest.mark.parametrize("mesh", [SQUARE, CUBE], ids=str)
def test_everything_is_split_over_all_ranks(mesh: ModelMesh) -> None:
    found = layer(6144, mesh)
    for texts in found.parameters.values():
        assert sum(isinstance(parse_placement(t), Shard) for t in texts.values()) == len(mesh)
    for strategies in found.ops.values():
        assert {axis for axis, _ in mesh} <= strategies.keys()
