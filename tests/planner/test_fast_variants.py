"""Layouts of an axis for one sample at once, and for as many as a rank can have."""

from dataclasses import replace

import pytest

from meshwright.planner.across import mesh_variants
from meshwright.planner.across.mesh_variants import variants
from meshwright.planner.inside.variants import fast_variants
from meshwright.planner.search.search import search_finalists
from tests.planner import problems

LATENCY_S = 3e-4


def test_messages_that_are_dear_for_one_sample_are_worth_it_for_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a message takes as long as a sample's attention, ranks that are asked for `cp=2` had
    all the work each, whatever the micro-batch."""
    cluster = problems.cluster(2)
    link = replace(cluster.nodes[0].link, latency_s=LATENCY_S, step_s=LATENCY_S)
    cluster = replace(cluster, nodes=(replace(cluster.nodes[0], link=link),))
    pins = ("cp=2", "num_microbatches=1")
    problem = problems.problem(problems.traced("gpt2"), cluster, constraints=pins)
    assert variants(problem, (("cp", 2),)) == ("fast", "fast8")
    (plan,) = search_finalists(problem, most=1, time_limit_s=20.0)
    assert {layout.name.split()[-1] for layout in plan.layouts} == {"fast8"}
    only = problems.problem(problems.traced("gpt2"), cluster, constraints=pins)
    monkeypatch.setattr(mesh_variants, "fast_variants", lambda *_: ("fast",))
    (slow,) = search_finalists(only, most=1, time_limit_s=20.0)
    assert plan.predicted and slow.predicted
    assert plan.predicted.step_s < 0.8 * slow.predicted.step_s


def test_there_is_one_where_a_rank_has_one_sample() -> None:
    assert fast_variants((("cp", 2),), 4, 8) == ("fast",)
    assert fast_variants((("cp", 4),), 4, 8) == ("fast", "fast2")
