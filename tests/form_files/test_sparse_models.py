"""Models with tables beside a dense part, planned as one: executed equal to one process, with rows
in forms that model axes allow, and with the bytes that the plan says."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.forms.rows import has_rows
from meshwright.forms.sync import facts_of_tables, for_tables, running, zero_of_tables
from meshwright.forms.sync_findings import findings
from meshwright.forms.tables import table_findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.tables import tables_of
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.finishing.tables import variants
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import in_detail, predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.build import check_tables
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks
from meshwright.tools.check import Checked, check_plan
from tests.form_files.sparse_models import OPTIMIZER, STEPS, batch, model, plain
from tests.form_files.words import assert_equal


def slow(ranks: int) -> Cluster:
    """Devices with a wire so slow that its bytes decide."""
    cluster = Cluster.preset("v100-16", num_nodes=ranks, devices_per_node=1)
    assert cluster.between_nodes
    wire = replace(
        cluster.between_nodes, bandwidth_bytes_per_s=1e6, latency_s=1e-6, launch_s=1e-6, curves=()
    )
    return replace(cluster, between_nodes=wire)


@cache
def traced(kind: str) -> Graph:
    return trace(model(kind), batch(kind, 0))


def trained(kind: str, plan: Plan) -> Any:
    job = compile_job(
        model(kind), plan, optimizer=plan.optimizer, lr=0.05, device="cpu", check=False,
        example_inputs=batch(kind, 0), graph=traced(kind),
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        after = batch(kind, step + 1) if step % 2 else None
        losses.append(float(job.step(batch(kind, step), next_batch=after)))
    state = full_state(job)
    job.close()
    return losses, state


def forms_of(plan: Plan) -> dict[str, str]:
    return {
        path: choice.sync.form
        for stage in plan.stages for path, choice in stage.by_parameter.items() if choice.sync
    }  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "ranks", "pins"),
    [("recommender", 4, ("dp=2", "tp=2")), ("recommender", 4, ("dp=2", "pp=2")),
     ("language", 2, ("dp=2", "zero=1")), ("language", 4, ("dp=2", "tp=2", "zero=1"))],
)  # fmt: skip
def test_tables_and_the_dense_part_are_planned_as_one(kind: str, ranks: int, pins: Any) -> None:
    counts = mw.count_rows(model(kind), [batch(kind, step) for step in range(4)])
    plan = mw.search(
        traced(kind), slow(ranks), optimizer=OPTIMIZER[kind],
        precision="fp64", progress=False, rows=counts, constraints=pins,
    )  # fmt: skip
    large = {"recommender": ("users.weight", "items.weight"), "language": ("words.weight",)}[kind]
    assert all(forms_of(plan)[path] in for_tables() for path in large), forms_of(plan)
    assert len({stage.sync_form for stage in plan.stages} - set(for_tables())) >= 1
    assert_equal(run_ranks(ranks, trained, kind, plan)[0], alone(plain, kind))


class Narrow(nn.Module):
    """A table whose columns two ranks cannot share, or can."""

    def __init__(self, width: int, rows: int = 4000) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(rows, width), nn.Linear(width, 16)
        self.down = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.words(ids)))).square().mean()


def test_rows_that_model_axes_split_are_no_table_of_owners() -> None:
    """Search has another form; a plan that says so is refused by the check as by the job."""
    ids = torch.arange(24).reshape(8, 3)
    graph, counts = trace(Narrow(3).double(), (ids,)), RowCounts(zipf=1.1)
    plan = mw.search(
        graph, slow(4), optimizer="adam", precision="fp64", progress=False, rows=counts,
        constraints=("dp=2", "tp=2"),
    )  # fmt: skip
    splits = [x.parameters["weight"]["tp"] for x in plan.layouts if x.pattern == "words"]
    assert splits == ["S(0)"] and not zero_of_tables(forms_of(plan)["words.weight"])
    problem = make_problem(graph, slow(4), optimizer="adam", precision="fp64", rows=counts)
    (stage,) = plan.stages
    stage = replace(stage, by_parameter={}, mesh={**stage.mesh, "dp_replicate": 1, "dp_shard": 2})
    tried = [
        form
        for found in variants(problem, replace(plan, stages=(stage,)))
        for form in forms_of(found).values()
    ]
    assert set(tried) == {form for form in for_tables() if not zero_of_tables(form)}
    form = FormChoice(form="owned_rows", settings={"ids": "0"})
    said = {"words.weight": ParameterChoice(zero=1, sync=form)}
    wrong = replace(plan, stages=(replace(stage, by_parameter=said),))
    words = "rows are not split over model axes, and words.weight is none"
    errors = [f for f in check_plan(Checked(wrong, ()), graph).findings if f.severity == "error"]
    assert [words in str(finding) for finding in errors] == [True], errors
    with pytest.raises(PlanError, match=words):
        check_tables(wrong, graph)
    assert not list(table_findings(plan, graph))


ROWS, WIDTH = 64, 4


def ids_of(shares: tuple[int, ...], step: int) -> Tensor:
    """Distinct rows for each rank, as many of each owner's half."""
    draw = np.random.default_rng(step)
    found = []
    for share in shares:
        halves = [draw.choice(ROWS // 2, share // 2, replace=False) + h for h in (0, ROWS // 2)]
        found.append(np.concatenate(halves))
    return torch.from_numpy(np.concatenate(found))[:, None]


def again_ids(step: int, ranks: int = 2) -> Tensor:
    """Of 8 rows of each of 2 ranks, or 4 of each of 4, as many of either owner, half are read again
    in the next step."""
    found, each = [], 4 // ranks
    for rank in range(ranks):
        for half in (0, ROWS // 2):
            first = half + each * rank
            odd = first + 16 + 8 * (step % 2)
            found += [*range(first, first + each), *range(odd, odd + each)]
    return torch.tensor(found)[:, None]


@cache
def narrow(samples: int) -> Graph:
    """For plans, and for the jobs of ranks that are forked after them."""
    return trace(Narrow(WIDTH, ROWS).double(), (torch.arange(samples)[:, None],))


def sent_and_received(
    plan: Plan, shares: tuple[int, ...], again: bool = False
) -> dict[str, list[int]]:
    """Bytes of rows and their numbers that go to other ranks, and that come, in the third step;
    `copies`: that are told to other owners of the same, or summed with theirs."""
    batches = [
        (again_ids(step, len(shares)) if again else ids_of(shares, step),) for step in range(4)
    ]
    job = compile_job(Narrow(WIDTH, ROWS).double(), plan, optimizer="adam", device="cpu",
                      check=False, graph=narrow(sum(shares)))  # fmt: skip
    found: dict[str, list[int]] = {}
    pending, exchange, add = job.recorder.pending, dist.all_to_all_single, dist.all_reduce
    last: list[int] = []

    def noted(what: Any, *more: Any) -> Any:
        sums = found.setdefault(what.purpose, [0, 0]) if last else []
        sums[:] = map(sum, zip(sums, last, strict=True))
        last.clear()
        return pending(what, *more)

    def counted(out: Tensor, x: Tensor, received: Any, sent: Any, **more: Any) -> Any:
        me, row = dist.get_rank(more["group"]), x[:1].nbytes or out[:1].nbytes
        if x.shape == (2,):  # numbers of rows of each rank
            pass
        elif more["group"] is job.parts.lines[0].copies.group:
            found.setdefault("copies", [0])[0] += row * (sum(sent) - sent[me])
        else:
            last[:] = (row * (sum(each) - each[me]) for each in (sent, received))
        return exchange(out, x, received, sent, **more)

    def summed(x: Tensor, *more: Any, **named: Any) -> Any:
        if named.get("group") is job.parts.lines[0].copies.group and named.get("group"):
            found.setdefault("copies", [0])[0] += x.nbytes
        return add(x, *more, **named)

    job.recorder.pending, dist.all_to_all_single = noted, counted  # type: ignore[assignment,method-assign]
    dist.all_reduce = summed  # type: ignore[assignment]
    for step in range(3):
        found.clear()
        job.step(batches[step], next_batch=batches[step + 1])
    dist.all_to_all_single, dist.all_reduce = exchange, add  # type: ignore[method-assign]
    job.close()
    return found


@pytest.mark.parametrize("shares", [(8, 8), (12, 4)])
def test_bytes_are_those_of_the_plan(shares: tuple[int, ...]) -> None:
    """Of half the columns under tp, and of the rank that has most samples: it sends so much of its
    gradients, and so much comes of its rows."""
    graph = narrow(sum(shares))
    counts = RowCounts(zipf=1.0)
    problem = make_problem(graph, slow(4), precision="fp64", optimizer="adam", rows=counts)
    plan = build_plan(problem, uniform_choice(problem, dp_shard=2, tp=2))
    stage = replace(plan.stages[0], batch_shares=shares)
    plan = replace(plan, stages=(stage,))
    plan = replace(plan, predicted=predict_plan(problem, plan))
    plan = next(x for x in variants(problem, plan) if "owned_rows" in forms_of(x).values())
    said = plan.stages[0].by_parameter["words.weight"]
    (table,), each = tables_of(graph), max(shares)
    assert said.sync
    drawn = counts.distinct("words.weight", ROWS, each)
    assert drawn and said.sync.settings["rows_each"] == pytest.approx(drawn / ROWS, rel=1e-3)
    assert said.sync.settings["row_bytes"] == table.row_bytes // 2 == 16
    form = replace(said.sync, settings={**said.sync.settings, "rows_each": each / ROWS})
    own = {"words.weight": replace(said, sync=form)}
    plan = in_detail(
        problem, replace(plan, stages=(replace(plan.stages[0], by_parameter=own),))
    )  # fmt: skip
    assert plan.predicted and plan.predicted.detail
    traffic = plan.predicted.detail.kinds[0].traffic
    expected = {t.purpose: t.nbytes for t in traffic if t.form == "owned_rows"}
    found = run_ranks(4, sent_and_received, plan, shares)
    assert found[0]["gradients"][0] == expected["gradients"] == each // 2 * 16
    numbers = each // 2 * 8  # it asks by them, and rows come
    assert found[0]["parameters"][1] - (shares[1] // 2) * 8 + numbers == expected["parameters"]


def test_copies_of_owners_send_no_more() -> None:
    """What a rank hands in goes among owners only."""
    shares = (4, 4, 4, 4)
    graph = narrow(sum(shares))
    problem = make_problem(graph, slow(4), precision="fp64", optimizer="adam")
    plan = build_plan(problem, uniform_choice(problem, dp_replicate=2, dp_shard=2))
    form = FormChoice(
        form="owned_rows", settings={"ids": "0", "rows_each": 4 / ROWS, "row_bytes": 32}
    )
    own = {"words.weight": ParameterChoice(zero=1, sync=form)}
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter=own),))
    plan = in_detail(problem, replace(plan, predicted=predict_plan(problem, plan)))
    assert plan.predicted and plan.predicted.detail
    traffic = plan.predicted.detail.kinds[0].traffic
    found = {t.purpose: t.nbytes for t in traffic if t.axis == "dp_shard"}
    assert found == {"gradients": 2 * 32, "parameters": 2 * (32 + 8)}


def test_rows_of_one_value_are_rows() -> None:
    """A model axis may leave as much of them."""
    assert has_rows(torch.ones(5, 1)) and not has_rows(torch.ones(5))


def late_plan(
    prior: float, limit: float | None = None, form: str = "late_rows", copies: int = 1
) -> Plan:
    graph = narrow(16)
    problem = make_problem(
        graph, slow(2 * copies), precision="fp64", optimizer="adam", max_grad_norm=limit
    )  # fmt: skip
    sizes = {"dp_shard": 2} | ({"dp_replicate": copies} if copies > 1 else {})
    plan = build_plan(problem, uniform_choice(problem, zero=1, **sizes))
    said = {"ids": "0", "rows": 16 / ROWS, "rows_each": 8 / copies / ROWS, "row_bytes": 32,
            "prior": prior}  # fmt: skip
    said = {name: value for name, value in said.items() if name in facts_of_tables(form)}
    own = ParameterChoice(zero=1, sync=FormChoice(form=form, settings=said))  # type: ignore[arg-type]
    stage = replace(plan.stages[0], by_parameter={"words.weight": own})
    plan = replace(plan, stages=(stage,))
    return in_detail(problem, replace(plan, predicted=predict_plan(problem, plan)))


@pytest.mark.parametrize(
    ("form", "answer", "numbers"), [("late_rows", 1, 4 * 8), ("late_columns", 0, 8 * 8)]
)
def test_bytes_of_late_rows(form: str, answer: int, numbers: int) -> None:
    """Owners of rows answer for each row of a step with a byte; those of columns are all told of
    all rows, and need not."""
    plan = late_plan(0.5, form=form)
    assert plan.predicted and plan.predicted.detail
    traffic = plan.predicted.detail.kinds[0].traffic
    table = {"gradients": 4 * (32 + answer), "parameters": 4 * 32 + numbers}
    found: dict[str, int] = {}
    for sent in traffic:
        if sent.form == form:
            found[sent.purpose] = found.get(sent.purpose, 0) + sent.nbytes
    assert found == table
    counted = run_ranks(2, sent_and_received, plan, (8, 8), True)
    for rank in (0, 1):
        assert {name: both[0] for name, both in counted[rank].items()} == table


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("form", "answer", "numbers", "told", "late"),
    [("late_rows", 1, 2 * 8, 4 * 8, 1), ("late_columns", 0, 4 * 8, 8 * 8, 1),
     ("owned_rows", 0, 2 * 8, 4 * 8, 0), ("owned_columns", 0, 4 * 8, 8 * 8, 0)],
)  # fmt: skip
def test_bytes_of_rows_among_copies_of_owners(
    form: str, answer: int, numbers: int, told: int, late: int
) -> None:
    """Two copies of two owners tell each other which rows they are asked for, and sum those; where
    some rows go first, their whole parts later. The dense part is summed beside."""
    dense = (16 // 2 * 4 + 16 // 2 + 16 + 1) * 8  # rows of its parameters, of which one has one row
    plan = late_plan(0.5, form=form, copies=2)
    assert plan.predicted and plan.predicted.detail
    said: dict[tuple[str, str], int] = {}
    for sent in plan.predicted.detail.kinds[0].traffic:
        key = (sent.purpose if sent.axis == "dp_shard" else sent.axis, sent.form)
        said[key] = said.get(key, 0) + sent.nbytes
    assert said["gradients", form] == 2 * (32 + answer)
    assert said["parameters", form] == 2 * 32 + numbers
    some, whole = 16 // 2 * 32, ROWS // 2 * 32  # an owner's, of 16 rows of all ranks, and of all
    assert said["dp_replicate", form] == told + some + late * whole
    for rank in run_ranks(4, sent_and_received, plan, (4, 4, 4, 4), True):
        assert rank["gradients"][0] == said["gradients", form]
        assert rank["parameters"][0] == said["parameters", form]
        assert rank["copies"][0] == said["dp_replicate", form] + dense


@pytest.mark.parametrize("form", ["late_rows", "late_columns", "owned_rows", "owned_columns"])
def test_owners_have_their_part_of_two_whatever_copies_they_have(form: str) -> None:
    """What they do and hold is priced by ranks that own something, and not by all replicas."""
    said = {"rows": 16 / ROWS, "rows_each": 8 / ROWS, "row_bytes": 32, "prior": 0.5}
    said = {name: value for name, value in said.items() if name in facts_of_tables(form)}
    of: Any = running(form)
    two, with_copies, four = (
        of.describe(replicas, 1, said, shards=shards).rows
        for replicas, shards in ((2, 0), (4, 2), (4, 0))
    )
    assert two == with_copies != four


def test_what_is_late_is_hidden_by_the_next_step() -> None:
    """All of the wire's time for it."""
    steps = [plan.predicted.step_s for prior in (1e-6, 0.5, 0.9999)
             if (plan := late_plan(prior)).predicted]  # fmt: skip
    whole = 8 * 32 / 2 / 1e6
    assert steps[2] - steps[0] == pytest.approx(whole, rel=0.15)
    assert steps[2] - steps[1] == pytest.approx(whole / 2, rel=0.15)


def test_the_check_says_that_a_norm_undoes_it() -> None:
    (said,) = [f for f in findings(late_plan(0.5, limit=1.0)) if "lets none" in f.message]
    assert said.severity == "warning" and "owned_rows" in said.nearest
    assert not [f for f in findings(late_plan(0.5)) if "lets none" in f.message]
