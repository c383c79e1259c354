"""Quick bounds: never above the exact ones, and the least bound is found with few of those."""

import pytest

from meshwright.costmodel.cost_cache import BlockSpot, CostTables
from meshwright.forms.sync import chosen, is_exact
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import ModelMesh, model_mesh
from meshwright.planner.across.places import Places, orders
from meshwright.planner.bounds import bound as bounds
from meshwright.planner.bounds.beside import LeastCosts
from meshwright.planner.bounds.bound import lower_bound, relaxed
from meshwright.planner.bounds.frames import Frame, frames
from meshwright.planner.bounds.relaxation import Relaxation
from meshwright.planner.pins.constraints import allowed
from meshwright.planner.problem.problem import Problem
from tests.planner.gpus import on_gpus
from tests.planner.problems import TINY, problem, traced

FORMS = tuple(filter(is_exact, chosen()))


def alone(asked: Problem) -> Relaxation:
    """One that shares nothing."""
    places = [Places(asked, order) for order in orders(asked)]
    return Relaxation(LeastCosts(asked), places)


def by_all_frames(asked: Problem, relaxation: Relaxation) -> float:
    """The least bound, each frame's asked for."""
    seconds = {frame: relaxation.bound(frame).seconds for frame in frames(asked)}
    found = min(seconds.values())
    for form in filter(is_exact, allowed(asked.constraints, "sync", chosen())):
        least = {frame: relaxation.floor_s(frame, form) for frame in seconds}
        for frame in sorted(least, key=lambda frame: (least[frame], frame)):
            if least[frame] >= found * (1 - bounds._NEAR):
                found = min(found, least[frame])
                break
            found = min(found, relaxation.bound(frame, form).seconds)
    return found if found < float("inf") else 0.0


@pytest.mark.parametrize("name", TINY)
def test_quick_bounds_are_below_the_exact_ones(name: str) -> None:
    asked = on_gpus(name)
    for relaxation in (relaxed(asked), relaxed(asked).under(LeastCosts(asked)), alone(asked)):
        for frame in frames(asked):
            found = relaxation.bound(frame).seconds * (1 + 1e-9)
            assert relaxation.quick_s(frame) <= found
            for form in FORMS:
                least = relaxation.floor_s(frame, form) * (1 + 1e-9)
                assert relaxation.quick_s(frame, form) <= least


@pytest.mark.parametrize("name", TINY)
def test_the_least_bound_is_that_of_all_frames(name: str) -> None:
    asked = on_gpus(name)
    assert lower_bound(asked, waits=False) == by_all_frames(asked, alone(asked))
    assert lower_bound(asked, late=True) == by_all_frames(asked, relaxed(asked))


def test_frames_come_by_their_exact_values() -> None:
    exact = {Frame(1, 1): 3.0, Frame(1, 2): 2.0, Frame(2, 1): 2.0, Frame(2, 2): 9.0}
    quick = {Frame(1, 1): 1.0, Frame(1, 2): 2.0, Frame(2, 1): 0.0, Frame(2, 2): 8.0}
    asked: list[Frame] = []

    def ask(frame: Frame) -> float:
        asked.append(frame)
        return exact[frame]

    found = bounds._ascending(list(exact), quick.__getitem__, ask)
    assert [next(found) for _ in range(3)] == [
        (2.0, Frame(1, 2)), (2.0, Frame(2, 1)), (3.0, Frame(1, 1)),
    ]  # fmt: skip
    assert Frame(2, 2) not in asked


NODES = Cluster.preset("a100-40", num_nodes=2, devices_per_node=2)


def spots(tables: CostTables, model: ModelMesh, samples: int) -> list[BlockSpot]:
    """On fast links and on slow ones."""
    device = tables.device_names[0]
    lines = (0, 1), (0, 2)
    return [BlockSpot(samples, 1, model, device, (), (tables.levels(line),)) for line in lines]


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_on_other_links_a_block_costs_what_a_walk_says(name: str) -> None:
    asked, model = problem(traced(name), NODES), model_mesh({"tp": 2})
    layouts = {layout.pattern: layout for layout in asked.layouts(model)}
    costs = set[float]()
    for block in asked.graph.distinct_blocks():
        layout = layouts[block.pattern]
        for spot in spots(asked.tables, model, 2):
            fresh = CostTables(asked.graph, NODES, "fp32")
            found = asked.tables.block(block, layout, spot)
            assert found == fresh.block(block, layout, spot)
            costs.add(found.comm_forward_s)
    assert len(costs) > 1


def test_halves_compute_what_playing_them_says() -> None:
    asked, model = problem(traced("gpt2"), NODES), model_mesh({"tp": 2})
    layouts = {layout.pattern: layout for layout in asked.layouts(model)}
    blocks, halved = asked.tables.blocks, 0
    for block in asked.graph.distinct_blocks():
        for samples in (1, 2, 3):
            for spot in spots(asked.tables, model, samples):
                if blocks.parts(block, layouts[block.pattern], spot):
                    hidden = blocks.hidden(block, layouts[block.pattern], spot, "block")
                    more = blocks.in_halves_s(block, layouts[block.pattern], spot)
                    assert more == (hidden.more_forward_s, hidden.more_backward_s)
                    halved += 1
    assert halved
