"""Experts without weights, whose tokens are handed on: work, memory and traffic of those that have
some."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

import meshwright as mw
from meshwright.costmodel.block.block_costs import BlockSpot
from meshwright.costmodel.block.reprice import OpStep
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.expert_form import ExpertForm, parse_form
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Kind
from meshwright.ir.graph.routing import Routing, spread_evenly
from meshwright.ir.graph.rules import input_shapes
from meshwright.ir.layout.layout import Shard, Strategy
from meshwright.ir.ops import facts
from meshwright.ir.profile.route_counts import RouteCounts, counts_of
from meshwright.ir.trace.declared import mix_experts
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.runtime.profiling.values import rows_below
from meshwright.testing.models import CASES
from tests.told_memory import told_of_held
from tests.traces import zoo_graph

EXPERTS, WEIGHTLESS, PICKED = 4, 2, 2
CHOICES = tuple(combinations(range(EXPERTS + WEIGHTLESS), PICKED))
"""Each choice of different experts once: even."""


def test_words_with_a_number() -> None:
    form = ExpertForm(transposed_first=True, weightless=256)
    assert str(form) == "transposed_first weightless=256" and parse_form(str(form)) == form
    for text, error in (
        ("weightless", "from 1 to 1,048,576"), ("weightless=0", "is '0'"),
        ("weightless=-2", "is '-2'"), ("weightless=1e3", "'weightless=256'"),
        ("weightless=²", "is '²'"), ("some=1", "'some' has no value"),
        ("weghtless=2", "nearest is 'weightless'"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=error):
            parse_form(text)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_an_even_spread_is_over_all(ranks: int) -> None:
    known, held = spread_evenly(EXPERTS, PICKED, WEIGHTLESS), EXPERTS // ranks
    owners = [{one // held for one in choice if one < EXPERTS} for choice in CHOICES]
    assert known.copies(ranks) == pytest.approx(sum(map(len, owners)) / len(CHOICES))
    here = sum(one < EXPERTS for choice in CHOICES for one in choice)
    assert known.load(ranks) == known.share == here / (PICKED * len(CHOICES))
    assert not known.drops
    with pytest.raises(PlanError, match="pick 7 of 4 experts, and of 2 without weights"):
        replace(known, picked=7)


def test_counted_and_assumed(tmp_path: Path) -> None:
    picks = np.zeros((len(CHOICES), EXPERTS + WEIGHTLESS), bool)
    for row, choice in zip(picks, CHOICES, strict=True):
        row[[*choice]] = True
    counts = RouteCounts({"a": counts_of(picks[:, :EXPERTS], PICKED, WEIGHTLESS)})
    counts.save(tmp_path / "routes.json")
    assert RouteCounts.load(tmp_path / "routes.json") == counts
    known, even = counts.routing(EXPERTS, PICKED, WEIGHTLESS), spread_evenly(4, 2, 2)
    assert known and counts.routing(EXPERTS, PICKED) is None
    assert counts.sizes == [(EXPERTS, PICKED, WEIGHTLESS)]
    for ranks in (1, 2, 4):
        assert known.copies(ranks) == pytest.approx(even.copies(ranks), rel=1e-5)
        assert known.load(ranks) == pytest.approx(even.load(ranks), rel=1e-5)
    assumed = RouteCounts(zipf=0.3).routing(16, 4, 8)
    assert assumed and assumed.weightless == 8
    assert assumed.load(1) == pytest.approx(16 / 24, rel=0.1)
    assert assumed.copies(4) == pytest.approx(spread_evenly(16, 4, 8).copies(4), rel=0.1)


class Even(nn.Module):
    """LongCat's layer of experts on tokens that are told what they pick."""

    def __init__(self, width: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layer = LongcatFlashExperts(SimpleNamespace(
            hidden_size=width, expert_ffn_hidden_size=inner, n_routed_experts=EXPERTS,
            zero_expert_num=WEIGHTLESS, hidden_act="silu",
        ))  # fmt: skip
        for weight in self.layer.parameters():
            nn.init.normal_(weight, std=0.1)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        scale = torch.full(index.shape, 0.5, dtype=x.dtype)
        return self.layer(self.first(x), index, scale).square().mean()


def even(times: int) -> tuple[Tensor, Tensor]:
    index = torch.tensor(CHOICES).repeat(times, 1)
    return torch.rand(len(index), 32), index


def test_work_is_that_of_its_own_forward() -> None:
    model, data = Even(), even(2)
    (op,) = (op for op in trace(model, data).ops if op.target == EXPERTS_TARGET)
    with FlopCounterMode(display=False) as counter:
        model.layer(data[0], data[1], torch.ones(data[1].shape))
    assert op.flops == counter.get_total_flops() > 0
    routes = mw.count_routes(model, [data]).routing(EXPERTS, PICKED, WEIGHTLESS)
    assert routes and routes.load(1) == pytest.approx(EXPERTS / (EXPERTS + WEIGHTLESS), rel=1e-5)
    graph = trace(model, data)
    (index,) = (n for n, x in graph.tensors.items() if x.dtype == "int64" and x.kind is Kind.INPUT)
    assert rows_below(graph, index) == EXPERTS + WEIGHTLESS


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.gate_up = nn.Parameter(0.1 * torch.randn(EXPERTS, 96, 32))
        self.down = nn.Parameter(0.1 * torch.randn(EXPERTS, 32, 48))

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        form, scale = f"weightless={WEIGHTLESS}", torch.full(index.shape, 0.5, dtype=x.dtype)
        made = mix_experts(self.first(x), index, scale, self.gate_up, self.down, form=form)
        return made.square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_of_pairs_that_have_rows(precision: str) -> None:
    assert told_of_held(Mixed(), even(32), precision) == pytest.approx(1.0, abs=0.01)


def test_where_pairs_without_an_expert_have_rows() -> None:
    """Everywhere but on a GPU that has all experts (`ir.graph.grouped`)."""
    graph = trace(Even(), even(1))
    (op,) = (op for op in graph.ops if op.target == EXPERTS_TARGET)
    apart = Strategy((None, None, None, Shard(0), Shard(0)), (None,))
    kept = facts(op.target).kept
    assert kept
    found = {
        (kind, len(split)): kept(op, input_shapes(op, graph), split, 0.0, kind)
        for kind in ("cpu", "cuda") for split in ((), ((apart, 2),))
    }  # fmt: skip
    share = EXPERTS / (EXPERTS + WEIGHTLESS)
    assert found.pop(("cuda", 0)) == 1.0 and set(found.values()) == {share}


DROPPING = Routing(
    experts=4, picked=2, source="counted", ranks=(1, 2, 4), reached=(0.9, 1.2, 1.5),
    arrived=(1.0,) * 3, worked=(0.75, 1.0, 1.25),
)  # fmt: skip


def routed(*known: Routing) -> Problem:
    graph = zoo_graph(CASES["mixtral"])
    places = tuple(f"place *.experts.* ep={place}" for place in ("S(0)",))
    return make_problem(
        graph, Cluster.local(2), routes=RouteCounts(known=known) if known else None,
        constraints=places,
    )  # fmt: skip


@pytest.mark.parametrize(("ranks", "most"), [(1, 0.75), (2, 1.0)])
def test_dropped_tokens_are_no_work(ranks: int, most: float) -> None:
    """Where they were counted, whether or not experts are split."""
    problem = routed(DROPPING)
    block, model = problem.graph.blocks[1], (("ep", ranks),) if ranks > 1 else ()
    layout = next(x for x in problem.layouts(model) if x.pattern == block.pattern)
    device = problem.cluster.device_types[0].name
    spot = BlockSpot(2, 1, model, device, (), ((),) * len(model))
    script = problem.tables.blocks.walk(block, layout, spot).script
    assert [s.busiest for s in script if isinstance(s, OpStep) and s.busiest] == [most]


def test_dropped_tokens_take_neither_time_nor_memory() -> None:
    found = []
    for known in ((), (replace(DROPPING, worked=(1.0, 1.0, 1.25)),), (DROPPING,)):
        problem = routed(*known)
        plan = build_plan(problem, uniform_choice(problem))
        assert plan.predicted
        found.append((plan.predicted.step_s, plan.predicted.peak_bytes))
    whole, kept, dropped = found
    assert whole == kept and dropped < whole and dropped[1] < whole[1]
