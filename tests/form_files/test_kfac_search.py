"""A search that is asked for K-FAC chooses who preconditions what, and what is sent, by time."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.finishing.owned_work import variants
from meshwright.planner.pins.decisions_kept import broken
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.search.search import search_problem


class Layers(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def graph(width: int, samples: int) -> Graph:
    with torch.device("meta"):
        return trace(Layers(width), (torch.zeros(samples, width), torch.zeros(samples, width)))


def problem(*pins: str, nodes: int = 1, width: int = 512) -> Problem:
    cluster = Cluster.preset("v100-16", num_nodes=nodes, devices_per_node=4 // nodes)
    return make_problem(
        graph(width, 64), cluster, precision="fp32", optimizer="sgd_momentum", constraints=pins
    )


def chosen(plan: Plan) -> tuple[int, int, int, str]:
    (stage,) = plan.stages
    assert stage.sync and stage.sync.form == "kfac"
    sends = str(stage.sync.settings.get("sends", "bases"))
    return stage.zero, stage.mesh["dp_shard"], stage.mesh["dp_replicate"], sends


def test_no_plan_that_is_found_trains_by_less() -> None:
    """All splits of four replicas, each with each thing to send, as a user would write them."""
    for nodes, width in ((1, 256), (4, 1024)):
        asked = problem("sync=kfac", "dp=4", nodes=nodes, width=width)
        found = search_problem(asked)
        known = []
        for shard, sends in product((1, 2, 4), ("bases", "nothing")):
            shape = {"dp_shard": shard, "dp_replicate": 4 // shard, "zero": int(shard > 1)}
            made = build_plan(asked, uniform_choice(asked, **shape), predict=False)
            choice = FormChoice(form="kfac", settings={"sends": sends})
            known.append(predict_plan(asked, _with(made, choice)).step_s)
        assert found.predicted and found.predicted.step_s <= min(known) * 1.01


def _with(plan: Plan, choice: FormChoice) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], sync=choice),))


def test_a_level_that_is_pinned_stays() -> None:
    zero, shard, replicate, sends = chosen(search_problem(problem("sync=kfac", "dp=4", "zero=0")))
    assert (zero, shard, replicate) == (0, 1, 4)
    assert sends in ("bases", "nothing", "cheapest")


def test_one_replica_would_not_train_by_it() -> None:
    """Nor would stages know the length of the whole step."""
    (stage,) = search_problem(problem("sync=kfac")).stages
    assert stage.dp > 1
    asked = problem("sync=kfac")
    alone = make_problem(asked.graph, Cluster.local(1), precision="fp32", optimizer="sgd_momentum")
    plan = build_plan(alone, uniform_choice(alone), predict=False)
    assert any(str(one) == "sync=kfac" for one in broken(asked.constraints, plan, asked.graph))


def test_messages_that_are_dear_are_not_sent() -> None:
    """What a search tells the form: a start costs as much as many multiplications on a slow
    network."""
    asked = problem("sync=kfac", "dp=4", nodes=4)
    made = build_plan(asked, uniform_choice(asked, dp_replicate=4), predict=False)
    plan = _with(made, FormChoice(form="kfac"))
    tried = [v for v in variants(asked, plan) if chosen(v)[3] == "cheapest"]
    settings = tried[0].stages[0].sync
    assert settings and float(settings.settings["message"]) > 512**3
    assert tried[0].predicted
    nothing = next(v for v in variants(asked, plan) if chosen(v)[3] == "nothing")
    assert nothing.predicted and tried[0].predicted.step_s == pytest.approx(
        nothing.predicted.step_s, rel=0.05
    )


def test_factors_are_priced_by_the_rows_that_layers_read() -> None:
    """On all ranks products of what is read and of gradients, each with itself; at owners inverses
    and products with these."""
    asked, times = problem("sync=kfac", "dp=4"), {}
    for samples in (64, 64 * 64):
        cluster = asked.cluster
        bigger = make_problem(
            graph(512, samples), cluster, precision="fp32", optimizer="sgd_momentum"
        )
        plain = build_plan(bigger, uniform_choice(bigger, dp_shard=4, zero=1), predict=False)
        seconds = [
            predict_plan(bigger, plan).step_s
            for plan in (plain, _with(plain, FormChoice(form="kfac")))
        ]
        times[samples] = seconds[1] - seconds[0]
    rate = asked.cluster.device(0).peak("float32")
    more = 6 * 2 * (512**2 + 513**2) * (64 * 63) / 4 / rate
    assert more < times[64 * 64] - times[64] < 3 * more


class _WithTable(Layers):
    """A table before the layers, which K-FAC knows nothing of."""

    def __init__(self) -> None:
        super().__init__(16)
        self.table = nn.Embedding(8, 16)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.table(ids), y)


def test_a_search_refuses_what_a_job_would_refuse() -> None:
    """And trains by K-FAC where a pattern leaves the table out."""
    with torch.device("meta"):
        given = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 16)
        traced = trace(_WithTable(), given)

    def asked(*pins: str) -> Problem:
        return make_problem(
            traced, Cluster.local(2), precision="fp32", optimizer="sgd", constraints=("dp=2", *pins)
        )

    with pytest.raises(PlanError, match=r"reads table.weight; nearest: patterns that leave"):
        search_problem(asked("sync=kfac"))
    plan = search_problem(asked("parameters layers.*.weight sync=kfac,zero=0"))
    (choice,) = plan.stages[0].by_parameter.values()
    assert choice.sync and choice.sync.form == "kfac"
