"""What is made again of a block is the best there is, and modes have names."""

from functools import cache
from itertools import combinations

import pytest

from meshwright.costmodel.block.keeping import Makers, effect
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.forms.retention.selective import CHEAP
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible
from meshwright.ir.plan.verify import check
from meshwright.ir.trace.trace import trace
from meshwright.planner.decisions.saved import saved_name
from meshwright.planner.inside.saved_choice import SavedChoice
from meshwright.planner.pins.constraints import broken
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.saved_modes import SavedMode, saved_modes
from meshwright.planner.search.search import search_problem
from meshwright.testing.models import CASES
from meshwright.testing.tensor_forms import case

DEVICE = Cluster.local(1)


@cache
def problem(name: str) -> Problem:
    one = case(width=16) if name == "mlp" else CASES[name]
    graph = trace(one.model(), one.example(4), one.loss_fn)
    return make_problem(graph, DEVICE, precision="fp64", optimizer="adam")


def makers(name: str) -> Makers:
    """Of a layer that is not the first."""
    at = problem(name)
    block = at.graph.blocks[2]
    layout = next(x for x in at.layouts(()) if x.pattern == block.pattern)
    return at.tables.blocks.makers(block, layout, BlockSpot(4, 1, (), "cpu", (), ()))


def by_trying_all(found: Makers) -> list[tuple[int, float]]:
    """(bytes inside the block, seconds) of every set of ops."""
    saved = SavedChoice(found).saved_bytes
    ways = []
    for count in range(len(found.parts) + 1):
        for keys in combinations(found.parts, count):
            effects = effect(found, tuple((key, "recompute") for key in keys))
            kept = sum(saved.values()) - effects.remade_bytes + effects.held_bytes
            ways.append((kept, effects.again_s))
    return ways


def test_no_set_is_better() -> None:
    found = makers("mlp")
    ways = by_trying_all(found)
    choice = SavedChoice(found)
    limits = sorted({kept for kept, _ in ways})
    assert len(limits) >= 3
    for limit in (*limits, limits[-1] + 1):
        best = min(seconds for kept, seconds in ways if kept <= limit)
        way = choice.fastest(limit)
        assert way and way.kept_bytes <= limit
        assert way.again_s == pytest.approx(best, rel=1e-6, abs=1e-8)
    assert choice.fastest(limits[0] - 1) is None
    for limit_s in sorted({seconds for _, seconds in ways}):
        least = min(kept for kept, seconds in ways if seconds <= limit_s * (1 + 1e-9))
        assert choice.smallest(limit_s + 1e-7).kept_bytes == least


@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet50"])
def test_what_is_chosen_costs_what_it_says(name: str) -> None:
    found = makers(name)
    choice = SavedChoice(found)
    front = choice.front(8)
    assert len(front) > 2
    assert front[0].keys == () and front[0].kept_bytes == sum(choice.saved_bytes.values())
    for less, more in zip(front[1:], front, strict=False):
        assert less.kept_bytes < more.kept_bytes and less.again_s > more.again_s
    for way in front:
        effects = effect(found, tuple((key, "recompute") for key in way.keys))
        kept = front[0].kept_bytes - effects.remade_bytes + effects.held_bytes
        assert kept == way.kept_bytes
        assert effects.again_s == pytest.approx(way.again_s, rel=1e-6, abs=1e-8)


def test_selective_is_what_is_cheap() -> None:
    one = case(batch=16, tokens=512, width=1024)
    graph = trace(one.model(), one.example(16), None)
    cluster = Cluster.preset("a100-40", num_nodes=1, devices_per_node=1)
    at = make_problem(graph, cluster, precision="fp32", optimizer="adam")
    block = graph.blocks[2]
    offload, selective = saved_modes(at, block.pattern)
    assert selective == SavedMode("selective", (("act/gelu", "recompute"),))
    assert offload == SavedMode("offload", (("*", "offload"),))
    layout = next(x for x in at.layouts(()) if x.pattern == block.pattern)
    spot = BlockSpot(16, 1, (), "a100-40", (), ())
    plain, cheap = (at.tables.block(block, layout, spot, m) for m in (False, selective.policy))
    assert 0 < cheap.again_s <= CHEAP * plain.forward_s
    assert plain.saved_bytes - cheap.saved_bytes == 16 * 512 * 4 * 1024 * 4


@pytest.mark.parametrize("word", ["selective", "offload"])
@pytest.mark.parametrize("searcher", ["ilp", "exhaustive"])
def test_pinned_modes_are_searched_and_kept(word: str, searcher: str) -> None:
    cluster = Cluster.preset("a100-40", num_nodes=1, devices_per_node=2)
    graph = problem("gpt2").graph
    at = make_problem(
        graph, cluster, precision="fp64", optimizer="adam",
        constraints=(f"saved={word}", "tp=1"),
    )  # fmt: skip
    plan = search_problem(at, searcher)
    check(plan, graph, cluster)
    assert saved_name(plan) == word and not broken(at.constraints, plan, graph)
    assert not any("full" in stage.recompute.values() for stage in plan.stages)
    assert plan.evidence and plan.predicted and plan.evidence.bound_s <= plan.predicted.step_s
    for stage in plan.stages:
        assert set(stage.saved) <= {"transformer.h.*"}


def test_pins_that_contradict_each_other_are_named() -> None:
    at = make_problem(
        problem("gpt2").graph, DEVICE, precision="fp64", optimizer="adam",
        constraints=("saved=offload", "recompute=full"),
    )  # fmt: skip
    with pytest.raises(Infeasible, match="recompute=full"):
        search_problem(at)
