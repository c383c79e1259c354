"""What plans with pairs cost does not depend on what was priced before them."""

from dataclasses import replace

from meshwright.ir.cluster.cluster import Cluster
from meshwright.planner.search.search import search_problem
from tests.planner.problems import problem, traced


def test_stages_with_pairs_come_after_the_same_stages_without() -> None:
    """On cores that are shared, where nothing is hidden, they take the same time, and do not hold
    the same at their stops: such a search ended in an IndexError."""
    local = Cluster.local(4)
    machine = replace(local, nodes=(replace(local.nodes[0], cores=2),))
    pins = ("num_microbatches=4", "overlap=linear", "recompute=stage_aware", "tp=2")
    asked = problem(traced("sequential"), machine, precision="fp64", constraints=pins)
    assert search_problem(asked).predicted is not None
