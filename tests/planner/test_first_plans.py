"""Plans that are found at once, and the meshes that they are found on."""

import random
from functools import cache
from itertools import count

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.deadline import TimeUp
from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.planner.across import first_plans, mesh_variants
from meshwright.planner.across.first_plans import first_choices
from meshwright.planner.across.mesh_variants import ways
from meshwright.planner.across.model_space import expert_forms
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import build_plan
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.search import search_problem


@cache
def _mixture() -> Graph:
    """Experts that are large beside what is computed with them."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
             "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 512,
             "num_local_experts": 64, "dtype": torch.bfloat16}  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes))
    ids = torch.zeros(1, 512, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    return trace(model, inputs, global_batch_size=256, precision="bf16")


def _problem() -> Problem:
    cluster = Cluster.preset("h100-sxm", num_nodes=4, devices_per_node=4)
    return make_problem(_mixture(), cluster, precision="bf16")


@cache
def _known() -> Problem:
    """One that was looked at whole."""
    problem = _problem()
    ways(problem)
    return problem


def test_expert_meshes_that_are_not_laid_out_would_not_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, every = ways(_known()), _problem()
    with monkeypatch.context() as all_kept:
        all_kept.setattr(mesh_variants, "MOST", 1000)
        ways(every)
    looked = mesh_variants._looked.of(every)[every.constraints]
    assert {*expert_forms(every)} <= {look.way.model for look in looked}
    assert mesh_variants._kept(every, looked) == found


def _stopped_after(looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up when so many meshes have been looked at."""
    look, numbers = mesh_variants._worth, count()

    def stopped(*asked: object) -> object:
        if next(numbers) >= looks:
            raise TimeUp
        return look(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(mesh_variants, "_worth", stopped)


def test_plans_on_the_meshes_known_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem()
    with monkeypatch.context() as patched:
        _stopped_after(5, patched)
        with pytest.raises(TimeUp):
            ways(problem)
        models = {stage.model for choice in first_choices(problem) for stage in choice.stages}
        assert (("ep", 4),) in models and (("ep", 16),) not in models
        plan = search_problem(problem, "ilp", time_limit_s=60)
    assert not plan.verify(problem.graph, problem.cluster)
    assert plan.evidence and not plan.evidence.exhausted
    # What was left out is looked at by the next search.
    assert ways(problem) == ways(_known())
    assert any((("ep", 16),) == stage.model
               for choice in first_choices(problem) for stage in choice.stages)  # fmt: skip


def test_guessed_steps_rank_plans_as_predicted_ones_do() -> None:
    """Between nodes that are slow beside their devices, what replicas send decides: without it,
    ranks correlate by .36."""
    slow = Cluster.preset("a10g", num_nodes=4, devices_per_node=4)
    pins = (parse_constraint("ep=1"), parse_constraint("tp=1"))
    problem = make_problem(_mixture(), slow, precision="bf16", constraints=pins)
    guess = first_plans._Guess(problem)
    drafts = random.Random(0).sample(list(first_plans._drafts(problem)), 40)
    plans = [
        build_plan(problem, obey(problem, first_plans._choice(problem, draft))) for draft in drafts
    ]
    steps_s = [plan.predicted.step_s for plan in plans if plan.predicted]
    guessed_s = [guess.of(draft)[1] for draft in drafts]
    ranks = [np.argsort(np.argsort(seconds)) for seconds in (guessed_s, steps_s)]
    assert np.corrcoef(*ranks)[0, 1] > 0.9
