"""Bounds of all plans, also of those that compute beside their collectives: below every step."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Fusion
from meshwright.ir.placed import joint_kernels, used
from meshwright.ir.plan.beside import bounded, waits_for_collectives
from meshwright.ir.plan.plan import OVERLAPS, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.choice_space import ChoiceSpace
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.bounds.frames import frames
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import build_plan
from meshwright.planner.problem.predict import excess_bytes, predict_plan
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.complete import complete, minimal_problem
from meshwright.planner.search.evidence import with_evidence
from meshwright.planner.search.finish import variants
from meshwright.planner.search.found import SearchLog
from meshwright.planner.search.search import search_problem
from tests.compiled_blocks import profiled
from tests.overlap_plans import priced
from tests.planner.gpus import on_gpus
from tests.planner.problem.large import RANKS, large
from tests.planner.problem.large import cluster as gpus
from tests.planner.problems import TINY

FEW = 12
"""Choices of each problem, taken evenly over its space, each with all variants."""


def plans(asked: Problem) -> Iterator[Plan]:
    """That fit: as they are, with each level of overlap, compiled, with kernels that pay."""
    choices = ChoiceSpace(asked)
    every = [choice for frame in frames(asked) for choice in choices.of(frame)]
    for choice in every[:: max(1, len(every) // FEW)]:
        plan = build_plan(asked, obey(asked, choice))
        for found in (plan, *variants("overlap", asked, plan), *variants("compile", asked, plan)):
            if not excess_bytes(asked, found):
                yield found


def check_below(asked: Problem) -> list[Plan]:
    bound_s = lower_bound(asked, waits=False)
    found = list(plans(asked))
    assert 0 < bound_s <= lower_bound(asked) * (1 + 1e-9)
    for plan in found:
        assert plan.predicted
        assert bound_s <= plan.predicted.step_s * (1 + 1e-5), plan
    return found


@pytest.mark.parametrize("name", TINY)
def test_tiny_problems(name: str) -> None:
    check_below(TINY[name]())
    check_below(on_gpus(name))


@pytest.mark.parametrize("pins", [("tp=4",), ("tp=2", "num_microbatches=2"), ("recompute=full",)])
def test_every_level(pins: tuple[str, ...]) -> None:
    found = check_below(priced(*pins))
    assert {plan.stages[0].overlap for plan in found} == set(OVERLAPS)


@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_compiled_blocks(ratio: float) -> None:
    found = check_below(profiled(ratio))
    assert any(plan.stages[0].compile for plan in found)


def test_tokens_that_crowd_on_gpus() -> None:
    """A plan by hand is completed for them as searched for; its bound holds with what experts do
    beside their products, and with the busiest rank's tokens."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1,
             "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256,
             "num_local_experts": 4, "dtype": torch.bfloat16}  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes))
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    graph = trace(model, {"input_ids": ids, "labels": ids}, global_batch_size=64, precision="bf16")
    cluster = Cluster.preset("h100-sxm", devices_per_node=2)
    given = {"ep": 2, "samples": "own", "constraints": ["place *.experts.* ep=S(0)"]}
    even, crowded = (minimal_problem(given, graph, cluster, routes=r) for r in (None, "zipf:1.0"))
    plans = complete(given, graph, cluster), complete(given, graph, cluster, routes="zipf:1.0")
    assert [bool(plan.routing) for plan in plans] == [False, True]
    # The first sends tokens, and would wait for the busiest rank.
    steps_s = [[predict_plan(asked, plan).step_s for plan in plans] for asked in (even, crowded)]
    assert steps_s[0][0] < steps_s[1][0]
    for i, asked in enumerate((even, crowded)):
        assert 0 < lower_bound(asked, waits=False) <= steps_s[i][i] * (1 + 1e-5)


def test_kernels() -> None:
    kernels = tuple(Fusion(name, 0, priced=True) for name in sorted(joint_kernels()))
    graph = replace(large(), fusions=kernels)
    pins = (f"tp={RANKS}", "pp=1")
    asked = make_problem(graph, gpus(), precision="bf16-autocast", constraints=pins)
    assert any(used(plan) & joint_kernels() for plan in check_below(asked))


def test_the_bound_of_a_plan_that_overlaps_is_of_all_plans() -> None:
    """What plans that wait cannot beat, this one does: to show that as its bound was no proof."""
    asked = priced("tp=4", "num_microbatches=1")
    best = search_problem(asked, "ilp")
    assert best.predicted and best.evidence and best.evidence.gap is not None
    assert not waits_for_collectives(best) and bounded(best) == "no plan"
    assert best.evidence.bound_s < best.predicted.step_s < lower_bound(asked)
    assert best.predicted.step_s == pytest.approx(
        best.evidence.bound_s * (1 + best.evidence.gap), rel=1e-5
    )


def test_a_bound_that_a_plan_beats_is_not_claimed() -> None:
    asked = TINY["one device"]()
    best = search_problem(asked, "ilp")
    assert best.predicted and best.evidence
    wrong = SearchLog(best=best, bound_s=2 * best.predicted.step_s)
    told = with_evidence(asked, replace(best, evidence=None), wrong, "ilp")
    assert told.evidence and told.evidence.bound_s == 0 and told.evidence.gap is None
    assert "no bound is known" in str(told)
