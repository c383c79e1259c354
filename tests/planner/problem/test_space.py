"""Meshes that a search tries are priced as the stages that plans have."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.costmodel.comm.comm import Levels, ranks_of
from meshwright.costmodel.stage.placement import spots, stage_costs
from meshwright.forms.exchange import Exchange
from meshwright.forms.storage import for_stages
from meshwright.forms.sync import chosen, exchange_of, goes_with, pinnable, suits
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import FormChoice, Stage, sync_name
from meshwright.ir.plan.schedule import Schedule
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.places import Places
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.across.stage_sync import StageSync, Trained
from meshwright.planner.across.stage_tables import StageTables
from meshwright.planner.bounds.leaf_bound import LeafBound
from meshwright.planner.pins.known import DECISIONS
from meshwright.planner.problem.candidates import Choice, build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.space import Mesh, mesh_of, meshes
from tests.planner.problems import cluster, mlp, problem


@pytest.mark.parametrize(("copies", "shards"), [(4, 1), (1, 4), (2, 2)])
def test_a_form_does_the_same_in_both(copies: int, shards: int) -> None:
    """Among copies of owners only those of dp_shard own something."""
    asked, known, stored = problem(mlp(), cluster(4)), 0, 0
    for zero in (0, 1) if shards > 1 else (0,):
        choice = uniform_choice(asked, dp_replicate=copies, dp_shard=shards, zero=zero)
        (stage,) = build_plan(asked, choice, predict=False).stages
        for form in chosen():
            if suits(form, zero):
                known += 1
                found = replace(stage, sync=FormChoice(form=form))
                usual = sync_name(zero, shards)
                for store in ("", *(s for s in for_stages() if goes_with(usual, 4, zero, s))):
                    made = in_store(found, store)
                    tried = Mesh(copies, shards, (), zero, sync=form, store=store)
                    same(tried.exchange, exchange_of(made))
                    stored += made.store is not None
    assert known > 5 and stored > known


def in_store(stage: Stage, store: str) -> Stage:
    """The stage of a plan whose pins ask for a store; as it is where there is none, or another."""
    apply = DECISIONS["store"].apply
    assert apply
    return apply(stage, store, lambda: Schedule("none", ()))


def same(tried: Exchange, found: Exchange) -> None:
    for field in fields(found):
        got, wanted = (getattr(each, field.name) for each in (tried, found))
        assert got == wanted, (found.form, field.name)


class Normed(nn.Module):
    """Replicas meet in its forward, where they do not train alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()


def normed(*pins: str) -> Problem:
    with torch.device("meta"):
        return problem(trace(Normed(), (torch.zeros(8, 8),)), cluster(4), constraints=pins)


def uniform(asked: Problem, mesh: Mesh) -> Choice:
    return uniform_choice(asked, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard,
                          zero=mesh.zero, num_microbatches=1)  # fmt: skip


def test_levels_at_which_a_form_has_no_copies_are_left_out() -> None:
    """Or refused, where they are asked for."""
    graph = trace(Normed(), (torch.zeros(8, 8),), precision="bf16")
    pins = "pp=1", "model=1", "sync=by_owner"
    free, asked = (
        problem(graph, cluster(4), precision="bf16", constraints=(*pins, *more))
        for more in ((), ("zero=3",))
    )
    assert {mesh.zero for mesh in meshes(free, 4, 8)} == {1, 2}
    with pytest.raises(PlanError, match="knows of no copies; nearest is zero 1"):
        list(meshes(asked, 4, 8))


@pytest.mark.parametrize("form", pinnable())
def test_a_form_that_is_pinned_is_priced_so_all_through_a_search(form: str) -> None:
    """Tables, bounds and plans know of the same rows, and of the same ranks that blocks meet."""
    pins = "pp=1", "model=1", "dp=4", f"sync={form}"
    asked = normed(*pins)
    runs, known = RunCosts(asked), 0
    tables, leaf = StageTables(runs, Places(asked, (0, 1, 2, 3))), LeafBound(runs)
    for mesh in meshes(asked, 4, 8):
        known += 1
        choice = uniform(asked, mesh)
        plan = build_plan(asked, choice)
        (stage,) = plan.stages
        assert mesh.sync == stage.sync_form == form and plan.predicted
        same(mesh.exchange, exchange_of(stage))
        same(mesh_of(asked, choice.stages[0]).exchange, exchange_of(stage))
        assert (tables.case(0, mesh, 1).spot,) == spots(asked.tables, stage)
        cost = stage_costs(asked.tables, plan, 0).cost
        bound_s = leaf.seconds(choice)
        assert cost.forward_s + cost.backward_s <= bound_s <= plan.predicted.step_s
    assert known


class Centred(nn.Module):
    """Its forward sums over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return self.down(x - x.mean(0)).square().mean()


def test_replicas_that_train_alone_sum_over_samples_of_their_own() -> None:
    """In blocks and in bounds: links of no others are used."""
    with torch.device("meta"):
        graph = trace(Centred(), (torch.zeros(8, 8),))
    told, bounds_s = [], []
    for form, shards in (("zero", 1), ("dasgd", 2), ("dasgd", 1)):
        pins = "pp=1", "model=1", "dp=4", f"dp_shard={shards}", "zero=0", f"sync={form}"
        asked = problem(graph, cluster(4, slow=True), constraints=pins)
        choice = uniform_choice(
            asked, dp_replicate=4 // shards, dp_shard=shards, zero=0, num_microbatches=1
        )
        plan = build_plan(asked, choice)
        told.append(stage_costs(asked.tables, plan, 0).cost.comm_forward_s)
        bounds_s.append(LeafBound(RunCosts(asked)).seconds(choice))
        assert plan.predicted and bounds_s[-1] <= plan.predicted.step_s
    assert told[0] > told[1] > told[2] == 0
    assert bounds_s == sorted(bounds_s, reverse=True) and len(set(bounds_s)) == 3


class Masked(nn.Module):
    """Its loss is over a total of the batch, which is known before the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.up(x).square().mean(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("form", "shards", "meet"), [("zero", 1, 4), ("dasgd", 2, 2), ("dasgd", 1, 1)]
)
def test_numbers_of_a_step_are_of_a_replica_that_trains_alone(
    form: str, shards: int, meet: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss, and totals of the batch: both are messages of 8 bytes among so many ranks."""
    with torch.device("meta"):
        graph = trace(Masked(), (torch.zeros(8, 8), torch.zeros(8)))
    pins = "pp=1", "model=1", "dp=4", f"dp_shard={shards}", "zero=0", f"sync={form}"
    asked, seen = problem(graph, cluster(4), constraints=pins), []

    def told(_: object, nbytes: int, levels: Levels) -> float:
        seen.append((nbytes, ranks_of(levels)))
        return 0.0

    monkeypatch.setattr("meshwright.costmodel.estimate.collective_time", told)
    choice = uniform_choice(
        asked, dp_replicate=4 // shards, dp_shard=shards, zero=0, num_microbatches=1
    )
    assert build_plan(asked, choice).predicted
    assert len(seen) > 1 and set(seen) == {(8, meet)}


@pytest.mark.parametrize("form", ["dear", "dasgd"])
def test_what_goes_late_takes_what_nothing_hides(form: str) -> None:
    """Beside the next forward, or beside steps, of which it is sent in some."""
    asked = normed("pp=1", "model=1", "dp=4", "dp_shard=1", f"sync={form}")
    runs = RunCosts(asked)
    tables = StageTables(runs, Places(asked, (0, 1, 2, 3)))
    mesh = next(mesh for mesh in meshes(asked, 4, 8) if mesh.zero == 0)
    case, exchange = tables.case(0, mesh, 1), mesh.exchange
    sync = StageSync(
        mesh, case.lines[()], runs.overheads(case.at), tables.collective, asked.tables.bucket_bytes
    )
    none, whole = np.zeros((1, 1)), np.full((1, 1), 1e9)
    trained = Trained(whole, whole, none, none, none)

    def once_s(beside_s: float) -> float:
        return float(sync.once_s(trained, none, none + beside_s, none + beside_s)[0, 0])

    hidden = len(exchange.late) + sum(send.lag / send.every for send in exchange.lagging)
    assert hidden > 0
    assert once_s(0.0) - once_s(1e-3) == pytest.approx(hidden * 1e-3, rel=1e-6)
    assert once_s(1e6) == once_s(1e7), "no more than there is"
