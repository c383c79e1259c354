"""Forms of synchronisation in searches: tried wherever they suit, taken where they clearly gain,
never with a step below the bound."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from meshwright.costmodel.stage.placement import stage_costs
from meshwright.costmodel.stage.stage_model import SyncPrices
from meshwright.forms import sync, sync_findings
from meshwright.forms.sync import chosen, dear, offers
from meshwright.forms.sync_findings import of_stage
from meshwright.forms.updates import Reach
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.beside import bounded
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.choice_space import ChoiceSpace
from meshwright.planner.bounds.bound import lower_bound
from meshwright.planner.bounds.frames import frames
from meshwright.planner.pins.obey import obey
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.schedule_tools import SCHEDULES
from meshwright.planner.search.finish import changed, variants
from meshwright.planner.search.offers import TIE
from meshwright.planner.search.search import search_problem
from tests.planner.gpus import on_gpus
from tests.planner.problems import TINY, mlp, problem

FEW = 10
SETTINGS = ({"ahead": 1, "bucket_bytes": 1}, {"ahead": 8, "bucket_bytes": 1 << 12},
            {"ahead": 2, "bucket_bytes": 1 << 30})  # fmt: skip


def with_forms(asked: Problem) -> Iterator[Plan]:
    """Choices of the space, taken evenly, with each form in all stages that it suits."""
    choices = ChoiceSpace(asked)
    every = [
        c for frame in frames(asked) for c in choices.of(frame) if any(s.dp > 1 for s in c.stages)
    ]
    for choice in every[:: max(1, len(every) // FEW)]:
        plan = build_plan(asked, obey(asked, choice))
        for form, settings in product(chosen(), SETTINGS):
            made = FormChoice(form=form, settings=settings)
            stages = tuple(
                stage if any(of_stage(replace(stage, sync=made), plan.optimizer))
                else replace(stage, sync=made) for stage in plan.stages
            )  # fmt: skip
            if stages != plan.stages:
                found = changed(asked, plan, stages=stages)
                if not excess_bytes(asked, found):
                    yield found


def check_below(asked: Problem) -> int:
    """How many steps were compared with the bounds."""
    usual_s, late_s = lower_bound(asked), lower_bound(asked, late=True)
    all_s = lower_bound(asked, waits=False)
    assert 0 < all_s <= late_s * (1 + 1e-9) and late_s <= usual_s
    found = list(with_forms(asked))
    for plan in found:
        assert plan.predicted
        assert late_s <= plan.predicted.step_s * (1 + 1e-5), plan
    return len(found)


@pytest.mark.parametrize("name", [n for n in TINY if n not in ("one device", "tensor", "sharded")])
def test_bounds_of_tiny_problems(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_below(TINY[name]())
    if name != "pipeline":  # whose three devices are no even groups
        monkeypatch.setattr(
            "meshwright.planner.bounds.frames.UNITS", 0
        )  # bounds as on large clusters
    check_below(on_gpus(name))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_under_every_schedule(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.planner.bounds.frames.UNITS", 0)
    pins = (f"schedule={schedule}", "pp=2", "num_microbatches<=4")
    machine = on_gpus("two devices").cluster
    node = replace(machine.nodes[0], devices=("toy",) * 4)
    machine = replace(machine, nodes=(node,))
    assert check_below(problem(mlp(4), machine, constraints=pins)) >= 3


def slow(*pins: str, rows: int = 4096, network: str = "ethernet-25g") -> Problem:
    """Eight GPUs on a slow network."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(1024, 1024) for _ in range(12)]
        x = torch.zeros(rows, 1024)
    graph = trace(torch.nn.Sequential(*layers), {"input": x}, lambda y, _: y.square().mean())
    machine = Cluster.preset("v100-16", num_nodes=8, devices_per_node=1, network=network)
    return make_problem(graph, machine, constraints=("dp=8", "pp=1", "num_microbatches=1", *pins))


def test_every_search_tries_them_and_says_what_is_hidden() -> None:
    pins = ((), ("sync=zero",), ("sync=dear",))
    free, kept, asked = (search_problem(slow(*pin)) for pin in pins)
    assert free.predicted and kept.predicted and free.evidence and kept.evidence
    assert kept.stages[0].sync is None and free.stages == asked.stages
    choice = free.stages[0].sync
    assert choice and choice.settings["bucket_bytes"] < 25 << 20, "one bucket hides nothing"
    assert free.predicted.step_s < kept.predicted.step_s * (1 - TIE)
    hidden_s = free.predicted.stages[0].hidden_s
    assert hidden_s > 0.1 * (kept.predicted.step_s - free.predicted.step_s)
    assert kept.predicted.stages[0].hidden_s == 0.0
    assert "of its gathers under the next forward" in str(free) and "gathers under" not in str(kept)
    assert bounded(free) == "no plan whose blocks wait for their collectives"
    assert 0.0 < free.evidence.bound_s <= free.predicted.step_s < kept.evidence.bound_s


def test_ties_keep_what_zero_says() -> None:
    """So much to compute that too little is waited for: with a pin it is known how little."""
    large = {"rows": 1 << 19, "network": "infiniband-ndr"}
    free, asked = (
        search_problem(slow("zero=1", *pins, **large))  # type: ignore[arg-type]
        for pins in ((), ("sync=dear",))
    )
    assert asked.stages[0].sync is not None
    assert free.predicted and asked.predicted and free.stages[0].sync is None
    assert free.predicted.step_s <= asked.predicted.step_s * (1 + TIE)


def test_settings_are_as_good_as_the_best_of_all() -> None:
    for zero in (0, 1):
        asked = slow()
        plan = build_plan(asked, uniform_choice(asked, dp_shard=8, zero=zero))
        (found,) = variants("late_sync", asked, plan)
        costs = stage_costs(asked.tables, plan, 0)
        prices = SyncPrices(asked.tables, plan.stages[0], costs)
        values = offers("dear", list(costs.cost.params.values()))
        every = [
            prices.waited_s(FormChoice(form="dear", settings=dict(zip(values, each, strict=True))))
            for each in product(*values.values())
        ]
        assert found.stages[0].sync
        assert prices.waited_s(found.stages[0].sync) <= min(every) * 1.01
        assert max(every) > 1.1 * min(every), "what is chosen matters"


def test_a_form_that_changes_what_is_computed_is_left_to_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dear, "EXACT", False)
    sync.is_exact.cache_clear()
    sync.is_searched.cache_clear()
    try:
        free, asked = (search_problem(slow(*pins)) for pins in ((), ("sync=dear",)))
    finally:
        sync.is_exact.cache_clear()
        sync.is_searched.cache_clear()
    assert free.stages[0].sync is None and free.evidence and free.evidence.gap is not None
    assert asked.stages[0].sync == FormChoice(form="dear"), "settings are not changed either"


def test_what_is_stepped_bucket_by_bucket_must_not_look_at_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = slow()
    plan = build_plan(asked, uniform_choice(asked, dp_replicate=8))
    stage = replace(plan.stages[0], sync=FormChoice(form="dear"))
    assert not list(of_stage(stage, "adamw")) and list(variants("late_sync", asked, plan))
    usual = sync_findings.update("adamw")
    monkeypatch.setattr(sync_findings, "update", lambda name: replace(usual, reach=Reach.GROUP))
    (finding,) = of_stage(stage, "adamw")
    assert "bucket after bucket" in finding.message and finding.nearest == "no sync"
    assert not list(variants("late_sync", asked, plan))
    (finding,) = of_stage(replace(stage, zero=1, mesh={"dp_shard": 8}), "adamw")
    assert "each rank steps its part" in finding.message
