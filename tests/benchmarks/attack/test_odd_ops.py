"""A slice of the attacks with odd ops: equal to one process under every layout, or refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.attack.layouts import MODELS, attack, plan_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.verify import check
from meshwright.ir.trace.changing import shared
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks

EQUAL = [
    ("fourier", ("x2", "tp2", "pp2_tp2")),
    ("complex_exp", ("tp3",)),
    ("embedding_freq", ("x2", "zero3", "tp2")),
    ("bag_weights", ("zero3",)),
    ("spectral_linear", ("tp2",)),
    ("vae_gamma", ("tp2",)),
    ("bernoulli_logits", ("dp2",)),
    ("counting", ("pp2_tp2",)),
    ("following_steps", ("pp2",)),
]
"""What was wrong, each under the layouts that it was wrong under."""


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "layouts"), EQUAL)
def test_equal_to_one_process(name: str, layouts: tuple[str, ...]) -> None:
    for result in attack(name, layouts):
        assert result.what.startswith("equal"), str(result)


REFUSED = [
    ("bag_freq", "x2", "whole batch"),
    ("cosine_loss", "x2", "whole batch"),
    ("norm_twice", "pp2", "buffer norm.num_batches_tracked, which forward changes"),
    ("changed_late", "pp2", "keep the blocks up, head in one stage, or take pp=1"),
]


@pytest.mark.parametrize(("name", "layout", "why"), REFUSED)
def test_refused_where_it_would_be_wrong(name: str, layout: str, why: str) -> None:
    one, other = attack(name, ("dp2", layout))
    assert one.what.startswith("equal"), str(one)
    assert other.what.startswith("refused") and why in other.what, str(other)


def traced(name: str) -> tuple[Graph, list[Any]]:
    model = MODELS[name]
    batches = [model.batch(8, torch.Generator().manual_seed(i)) for i in range(2)]
    return trace(model.made(), batches[0], model.loss), batches


def test_what_reads_a_changed_buffer_is_not_computed_again() -> None:
    graph, _ = traced("changed_late")
    plan = plan_of(graph, {})
    (stage,) = plan.stages
    for how in ({"recompute": {"up": "full"}}, {"saved": {"up": {"*": "offload"}}}):
        with pytest.raises(PlanError, match="block up reads buffer scale"):
            check(replace(plan, stages=(replace(stage, **how),)), graph)
    (again,) = plan_of(graph, {"recompute": "full"}).stages
    assert set(again.recompute) == {"mid", "head"}


def searched(graph: Graph, world: int, *pins: str) -> Plan:
    return search(
        graph, Cluster.local(world), constraints=pins, precision="fp64", optimizer="sgd",
        progress=False, time_limit_s=20,
    )  # fmt: skip


def test_search_keeps_a_changed_buffer_in_one_stage() -> None:
    graph, _ = traced("norm_twice")
    assert shared(graph)
    plan = searched(graph, 2)
    assert len(plan.stages) == 1
    assert any("no pipeline stages are tried" in note for note in plan.notes)


def losses(name: str, plan: Plan, graph: Graph, batches: list[Any]) -> list[float]:
    model = MODELS[name]
    job = compile_job(
        model.made(), plan, graph=graph, loss_fn=model.loss, optimizer="sgd", lr=0.1, device="cpu"
    )
    found = [float(job.step(batch)) for batch in batches]
    job.close()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["returning", "two_heads_deep", "recurring", "tied"])
def test_search_gives_a_parameter_one_placement(name: str) -> None:
    graph, batches = traced(name)
    wanted = alone(losses, name, plan_of(graph, {}), graph, batches)
    for pins in (("tp=2",), ("tp=2", "pp=2", "num_microbatches=2"), ()):
        plan = searched(graph, 4 if "pp=2" in pins else 2, *pins)
        found = run_ranks(plan.world_size, losses, name, plan, graph, batches)
        assert found[0] == pytest.approx(wanted, rel=1e-10), pins
