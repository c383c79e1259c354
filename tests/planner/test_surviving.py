"""A search for plans whose state outlives a node."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import meshwright as mw
from meshwright.forms.survival import lost_with
from meshwright.ir.plan import plan_io
from meshwright.planner.search import surviving as searching
from meshwright.testing.nets import Net, data


def test_a_search_finds_what_survives():
    graph = mw.trace(Net(), data(), precision="fp64")
    two = mw.Cluster.preset("a100-80", num_nodes=2, devices_per_node=2)
    asked = {"progress": False, "time_limit_s": 4, "constraints": ("pp=1",)}
    free = mw.search(graph, two, constraints=("zero=1", "dp_shard=4"), progress=False)
    assert lost_with(free, two, "any node") == {0: (0, 1)}
    plan = mw.search(graph, two, survives="any node", **asked)
    assert not lost_with(plan, two, "any node") and plan.notes[0].startswith("survives any node")
    assert plan == plan_io.rehash(plan), "its seal is that of all it says"
    one = mw.Cluster.preset("a100-80", devices_per_node=2)
    with pytest.raises(mw.Infeasible, match=r"no plan was found.*node 0 alone holds"):
        mw.search(graph, one, survives="any node", **asked)
    with pytest.raises(mw.PlanError, match="throughput"):
        mw.search(graph, two, survives="any node", objective="memory")


@dataclass(frozen=True)
class Priced:
    """A plan, as far as it is looked at."""

    step_s: float
    lost: bool
    notes: tuple[str, ...] = ()

    @property
    def predicted(self):
        return SimpleNamespace(step_s=self.step_s)


@pytest.mark.parametrize(
    ("first", "second_s", "best_s", "searches"),
    [
        ((Priced(1.0, False),), 0.5, 1.0, 1),
        # A finalist survives, the fastest plan does not: others may be faster than it.
        ((Priced(1.0, True), Priced(1.04, False)), 1.02, 1.02, 4),
        ((Priced(1.0, True), Priced(1.04, False)), 1.1, 1.04, 4),
    ],
)
def test_the_fastest_that_survives_is_taken(monkeypatch, first, second_s, best_s, searches):
    monkeypatch.setattr(searching, "lost_with", lambda plan, *_: plan.lost)
    monkeypatch.setattr(searching, "rehash", lambda plan: plan)  # of what is a plan
    asked = []

    def solve(pins, limit_s):
        asked.append(limit_s)
        return (Priced(second_s, False),) if pins else first

    two = mw.Cluster.preset("a100-80", num_nodes=2, devices_per_node=2)
    found = searching.surviving(solve, two, "any node", 8.0)
    assert found[0].step_s == best_s and len(asked) == searches
    assert sum(asked) == pytest.approx(8.0 if searches > 1 else 4.0)
