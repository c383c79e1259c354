"""Bags of rows, and look-ups with every option: each under each form equal to one process, or
refused by name."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.forms.sync import zero_of_tables
from meshwright.forms.tables import table_findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError, TraceError
from meshwright.ir.graph.bags import GivenBags, given_bags
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.tables import tables_of
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.trace.capture import resized
from meshwright.ir.trace.halving import has_apart
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search
from meshwright.runtime.check.data import batch_of, first_samples
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import RankFailed, alone, run_ranks
from meshwright.tools.dry.run import dry_run
from tests.form_files.bags import ROWS, STEPS, batch, model, plain
from tests.form_files.words import assert_equal

FORMS = {
    "dense": (None, None),
    "packed": ("packed_rows", "packed_rows"),
    "owned": ("owned_rows", "owned_rows"),
    "columns": ("owned_columns", "owned_columns"),
    "one of each": ("packed_rows", "owned_rows"),
    "late": ("late_rows", "late_columns"),
    "gathered": ("gathered_rows", "gathered_rows"),
}


def traced(of_bags: dict[str, Any], kind: str) -> Graph:
    """For plans, and for the jobs of ranks that are forked after them."""
    return _traced(tuple(of_bags.items()), kind)


@cache
def _traced(of_bags: tuple[tuple[str, Any], ...], kind: str) -> Graph:
    return trace(model(dict(of_bags)), batch(0, kind))


def plan_of(
    of_bags: dict[str, Any], kind: str, forms: str, ranks: int = 2, micro: int = 2,
    optimizer: str = "adamw",
) -> Plan:  # fmt: skip
    problem = make_problem(
        traced(of_bags, kind), Cluster.local(ranks), precision="fp64",
        optimizer=optimizer,
    )  # fmt: skip
    choice = uniform_choice(problem, num_microbatches=micro, dp_shard=ranks, zero=1)
    plan = build_plan(problem, choice, predict=False)
    said = {
        path: ParameterChoice(
            zero=zero_of_tables(form),  # type: ignore[arg-type]
            sync=FormChoice(form=form, settings={"ids": ids} if zero_of_tables(form) else {}),
        )
        for path, ids, form in zip(
            ("bags.weight", "items.weight"), ("ids", "item"), FORMS[forms], strict=True
        )
        if form
    }
    return replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))


def trained(plan: Plan, of_bags: dict[str, Any], kind: str) -> Any:
    job = compile_job(
        model(of_bags), plan, optimizer=plan.optimizer, lr=0.05, device="cpu", check=False,
        example_inputs=batch(0, kind), graph=traced(of_bags, kind),
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        after = batch(step + 1, kind) if step % 2 else None
        losses.append(float(job.step(batch(step, kind), next_batch=after)))
    state = full_state(job)
    job.close()
    return losses, state


def check(of_bags: dict[str, Any], kind: str, forms: str, **how: Any) -> None:
    plan = plan_of(of_bags, kind, forms, **how)
    found = run_ranks(how.get("ranks", 2), trained, plan, of_bags, kind)[0]
    assert_equal(found, alone(plain, of_bags, kind, plan.optimizer))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("of_bags", "kind", "forms"),
    [({"mode": "sum"}, "weighted", "dense"), ({"mode": "sum"}, "weighted", "packed"),
     ({"mode": "sum"}, "weighted", "owned"), ({"mode": "max"}, "even", "owned"),
     ({"mode": "sum"}, "weighted", "columns"), ({"mode": "max"}, "even", "columns"),
     ({"mode": "mean", "padding_idx": 0}, "even", "columns"),
     ({"mode": "mean", "padding_idx": 0}, "even", "owned"),
     ({"mode": "mean", "padding_idx": 0}, "even", "one of each"),
     ({"mode": "max", "padding_idx": 0}, "even", "packed")],
)  # fmt: skip
def test_bags_are_those_of_one_process(of_bags: dict[str, Any], kind: str, forms: str) -> None:
    """In one step a rank has padding only. The other table is scaled by how often rows occur."""
    check(of_bags, kind, forms)


def _each(cases: list[tuple[Plan, dict[str, Any], str]]) -> Any:
    return [trained(*case) for case in cases]


@pytest.mark.parametrize(
    ("kind", "forms"), [("given", tuple(FORMS)), ("ended", ("dense", "owned"))]
)
def test_given_bags_are_cut_by_samples(kind: str, forms: tuple[str, ...]) -> None:
    """Of any lengths, some empty, as many ids as each batch has, under every form: over replicas
    and micro-batches."""
    last = kind == "ended"
    of_bags = {"mode": "sum" if last else "mean", "include_last_offset": last}
    cases = [(plan_of(of_bags, kind, each, ranks=3), of_bags, kind) for each in forms]
    dry = dry_run(cases[0][0], traced(of_bags, kind))
    assert dry.ranks and not dry.findings
    wanted = alone(plain, of_bags, kind, "adamw")
    for found in run_ranks(3, _each, cases)[0]:
        assert_equal(found, wanted)


def test_sparse_gradients_are_asked_for() -> None:
    """A form says what goes of a gradient, not the module."""
    check({"mode": "sum", "sparse": True}, "even", "owned", optimizer="sgd")


def test_gradients_by_frequency() -> None:
    """Counted over all replicas."""
    check({"mode": "sum", "scale_grad_by_freq": True}, "even", "dense", micro=1)


def test_what_would_cut_them_is_refused() -> None:
    """Bags that the model makes of lengths: by the check, the search and the job, where there are
    micro-batches; a search that may choose has one. Then each replica looks all up."""
    of_bags, kind = {"mode": "mean", "lengths": True}, "lengths"
    graph = traced(of_bags, kind)
    plan, said = plan_of(of_bags, kind, "dense"), "its bags lie where offsets say"
    (finding,) = [f for f in plan.verify(graph) if said in f.message]
    assert "ids [samples, ids of each]" in finding.message
    more: dict[str, Any] = {"precision": "fp64", "progress": False}
    with pytest.raises(PlanError, match=said):
        search(graph, Cluster.local(2), constraints=("dp=2", "num_microbatches=2"), **more)
    assert search(graph, Cluster.local(2), constraints=("dp=2",), **more).num_microbatches == 1
    with pytest.raises(RankFailed, match=said):
        run_ranks(2, trained, plan, of_bags, kind)
    check(of_bags, kind, "owned", micro=1, ranks=3, optimizer="sgd")


class Few(nn.Module):
    """As many ids as bags."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 2, mode="sum")

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        return self.bags(ids, at.roll(1)).square().mean()


def test_rows_of_other_samples_are_not_left_old() -> None:
    """As many ids as bags look like samples, and bags that the model moves reach over ranks: no
    rank's own ids name what it reads. One that looks at a sample's ids beside each is the same."""
    graph = trace(Few(), (torch.arange(8), torch.tensor([0, 1, 1, 1, 6, 6, 7, 7])))
    (table,) = tables_of(graph)
    assert (table.path, table.lookups, table.ids) == ("bags.weight", 8, "")
    problem = make_problem(graph, Cluster.local(2), precision="fp32", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem, dp_shard=2, zero=1), predict=False)
    form = FormChoice(form="owned_rows", settings={"ids": "0"})
    said = {"bags.weight": ParameterChoice(zero=1, sync=form)}
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))
    (finding,) = table_findings(plan, graph)
    assert "others are read" in finding.message


class Looked(nn.Module):
    """A table that is looked at in some way."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.words, self._way = nn.Embedding(9, 2), way

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(self._way(ids)).square().mean() + ids.sum() * 0.0


@pytest.mark.parametrize(
    ("way", "known"),
    [(lambda x: x[:, 1:], True), (lambda x: x.transpose(0, 1), True),
     (lambda x: x.reshape(-1), True),
     (lambda x: x.permute(2, 0, 1)[0], True), (lambda x: x.reshape(8, 1, 6), True),
     (lambda x: x[None, :, 0], True), (lambda x: x.unsqueeze(-1).expand(8, 2, 3, 4), True),
     (lambda x: x[:1], False), (lambda x: x[3], False),
     (lambda x: x.transpose(0, 2)[:, :, 2], False),
     (lambda x: x.permute(1, 0, 2).reshape(-1), False), (lambda x: x.reshape(6, 8), False),
     (lambda x: x + 1, False)],
)  # fmt: skip
def test_an_input_names_rows_if_they_are_of_the_same_samples(way: Any, known: bool) -> None:
    (table,) = tables_of(trace(Looked(way), (torch.zeros(8, 2, 3, dtype=torch.int64),)))
    assert table.ids == ("0" if known else "")


class Given(nn.Module):
    """Bags that the batch says, of ids that something is made of before."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.bags, self.made = nn.EmbeddingBag(ROWS, 4, mode="sum"), made

    def forward(self, ids: Tensor, at: Tensor, more: Tensor) -> Tensor:
        ids, at, beside = self.made(ids, at, more)
        return self.bags(ids, at).square().mean() + beside


@pytest.mark.parametrize(
    ("made", "cut"),
    [(lambda ids, at, more: ((ids % 7).long(), at.clone(), 0.0), True),
     (lambda ids, at, more: (ids + more, at, 0.0), False),
     (lambda ids, at, more: (ids, at, (ids * 1.0).mean()), False),
     (lambda ids, at, more: (ids, at, (at * 1.0).mean()), False),
     (lambda ids, at, more: (ids.flip(0), at, 0.0), False)],
)  # fmt: skip
def test_bags_are_cut_where_each_id_is_by_itself_and_read_by_them_alone(
    made: Any, cut: bool
) -> None:
    ids, at = torch.arange(24) % 5, torch.arange(12) * 2
    found = given_bags(trace(Given(made), (ids, at, torch.arange(24) % 3)))
    assert found == ({"0": GivenBags("1", last=False)} if cut else {})


def test_layouts_that_cut_them_otherwise_are_refused() -> None:
    """A look-up whose ids lie whole on each replica would read its own, with all places."""
    graph = traced({"mode": "sum"}, "given")
    plan = plan_of({"mode": "sum"}, "given", "dense")
    said = "its bags lie where offsets say, and a layout cuts them otherwise"

    def findings(dp: str) -> list[str]:
        layouts = [
            replace(x, ops={key: {"dp": dp} if "bag" in key else own for key, own in x.ops.items()})
            for x in plan.layouts
        ]
        return [f.message for f in replace(plan, layouts=tuple(layouts)).verify(graph)]

    assert not any(said in text for text in findings("R|P S(0) S(0) -> S(0) R R R"))
    assert any(said in text for text in findings("R R R -> R R R R"))


class Rescaled(nn.Module):
    """A table with short rows."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.words = table

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids).square().mean()


@pytest.mark.parametrize("made", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_forward_rescales_are_refused(made: Any) -> None:
    with pytest.raises(TraceError, match="max_norm rescales rows"):
        trace(Rescaled(made(ROWS, 4, max_norm=1.0)), (batch(0)["ids"],))


class BagsAndProduct(nn.Module):
    """Bags that lie where the batch says, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(9, 2, mode="sum"), nn.Linear(2, 1)

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        return self.out(self.bags(ids, at)).square().mean()


def test_other_numbers_of_samples_have_bags_of_their_own() -> None:
    """A trace of more samples has as many ids for each as the example, on the average; a check uses
    the example's bags again, or some of them. No block that looks them up is run by halves."""
    ids, at = torch.arange(7), torch.tensor([0, 1, 4, 4])
    given = {"0": ids, "1": at}
    graph = trace(BagsAndProduct(), (ids, at), global_batch_size=8)
    bags = given_bags(graph)
    assert bags == {"0": GivenBags("1", last=False)} and graph.batch_size == 8
    sizes = resized(given, 8, bags)
    assert sizes.shapes == {"0": (16,), "1": (8,)} and sizes.batch_inputs == ("0", "1")
    few = first_samples(given, 2, 4, bags)
    assert few["0"].tolist() == [0, 1, 2, 3] and few["1"].tolist() == [0, 1]
    problem = make_problem(graph, Cluster.local(1), precision="fp64", optimizer="sgd")
    plan = build_plan(problem, uniform_choice(problem), predict=False)
    again = batch_of(plan, graph, given)
    assert again["0"].tolist() == [*ids, *ids]
    assert again["1"].tolist() == [0, 1, 4, 4, 7, 8, 11, 11]
    made = batch_of(plan, graph, None)
    assert made["1"].tolist() == [*range(0, 16, 2)] and len(made["0"]) == 16
    apart = [
        has_apart(graph, block) for block in graph.blocks
        if any("embedding_bag" in op.target for op in graph.block_ops(block))
    ]  # fmt: skip
    assert apart == [False]


def _handed(plan: Plan, of_bags: dict[str, Any], kind: str) -> Any:
    """Losses of a job that checks itself with other batches, is handed its own samples, and is
    asked for losses in between; what it says of bags that are none."""
    job = compile_job(
        model(of_bags), plan, optimizer=plan.optimizer, lr=0.05, device="cpu", check=True,
        example_inputs={name: x[: len(x) // 2] for name, x in batch(4, "given").items()}
        | ({"at": torch.tensor([0, 3, 3, 5, 9, 10])} if kind == "given" else batch(2, kind)),
    )  # fmt: skip
    losses, asked, said = [], [], ""
    for step in range(STEPS):
        own = job.shard(batch(step, kind))
        after = job.shard(batch(step + 1, kind)) if step % 2 else None
        losses.append(float(job.step(own, sharded=True, next_batch=after)))
        asked.append(float(job.eval(batch(step + 1, kind))))
    try:
        job.step(batch(0, kind) | {"at": batch(0, kind)["at"].flip(0)})
    except PlanError as error:
        said = str(error)
    state = full_state(job)
    job.close()
    return losses, state, asked, said, str(job.checked)


@pytest.mark.parametrize("kind", ["given", "ended"])
def test_loops_evaluation_and_checks_cut_given_bags(kind: str) -> None:
    """What a loader gives a rank has its own ids, and places in those."""
    of_bags = {"mode": "sum", "include_last_offset": kind == "ended"}
    plan = plan_of(of_bags, kind, "one of each", optimizer="adamw")
    losses, state, asked, said, checked = run_ranks(2, _handed, plan, of_bags, kind)[0]
    wanted, values = alone(plain, of_bags, kind, "adamw")
    assert_equal((losses, state), (wanted, values))
    assert asked[:-1] == pytest.approx(losses[1:], rel=1e-10)
    assert "one step of the plan" in checked, checked
    assert "begin with 0, never fall and be 31 at most" in said
