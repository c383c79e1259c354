"""Muon on matrices that have owners equals Muon in one process; what it costs is what is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.costmodel.estimate import estimate_all
from meshwright.forms.exchange_rows import Shaped
from meshwright.forms.owner_bucket import owners_of
from meshwright.forms.stepping import owner_notes, update_findings
from meshwright.forms.sync import exchange_of
from meshwright.forms.sync_findings import findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.plan.plan_io import dumps, loads, rehash
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.finish import finished
from meshwright.planner.search.search import search_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks
from meshwright.tools.check import Checked, check_plan
from meshwright.tools.dry.run import dry_run
from tests.form_files.owned_matrices import (
    BYTES,
    MATRICES,
    begin,
    go_on,
    most_tracked,
    plain,
    plan_of,
    problem,
    train,
)
from tests.form_files.small import batches, graph, model

PLANS: dict[str, tuple[Any, ...]] = {
    "whole": (2, 0, 1), "three, uneven": (3, 2, 0), "four": (4, 3, 3),
    "copies of two": (4, 2, 2, {"dp_replicate": 2, "dp_shard": 2}),
}  # fmt: skip


def made(ranks: int, zero: int, rest: int, sizes: dict[str, int] | None = None) -> Plan:
    return plan_of(ranks, zero, rest, **(sizes or {}))


@pytest.fixture(scope="module")
def wanted() -> Any:
    return alone(plain)


@pytest.mark.parametrize("name", PLANS)
def test_sharded_muon_is_that_of_one_process(name: str, wanted: Any) -> None:
    """With clipping over all parameters, and ranks with unequal shares of the batch."""
    plan = made(*PLANS[name])
    assert not [f for f in plan.verify(graph()) if f.severity == "error"]
    assert not [*findings(plan), *update_findings(plan, graph())]
    found = run_ranks(plan.world_size, train, plan)
    losses, state, _, _ = found[0]
    assert losses == pytest.approx(wanted[0], rel=1e-10)
    for path, x in wanted[1].items():
        assert (state[path] - x).abs().max() <= 1e-10 * x.abs().max(), path
    owners = plan.stages[0].mesh.get("dp_shard", 1) if PLANS[name][1] else 1
    copies = plan.world_size // owners
    held = [own for _, _, own, _ in found]
    assert sum(held) == copies * BYTES // 8, "each matrix has state at its owner, and nowhere else"
    if owners > 1:
        assert max(held) * 8 == -(-6 // owners) * BYTES // 6


def test_what_is_sent_is_what_is_said() -> None:
    """Each step sums the matrices' gradients at owners, and hands on the matrices."""
    rest = 8 * sum(p.numel() for p in model().parameters()) - BYTES
    for ranks, zero, times in ((2, 1, 1), (3, 2, 2)):
        for *_, sent in run_ranks(ranks, train, plan_of(ranks, zero, 0)):
            assert sum(sent) == rest + (times + 1) * BYTES, "times micro-batches"


def test_memory_is_what_is_tracked() -> None:
    """Also of the rank that has most, where four share six matrices."""
    for ranks, levels in ((2, ((1, 1), (1, 0))), (4, ((1, 1), (2, 2)))):
        plans = [plan_of(ranks, *own) for own in levels]
        tracked = run_ranks(ranks, most_tracked, plans)
        for number, plan in enumerate(plans):
            asked = problem(ranks)
            found = estimate_all(graph(), asked.cluster, plan, asked.tables).prediction
            most = max(rank[number] for rank in tracked)
            assert found.stages[0].memory.tensor_bytes == pytest.approx(most, rel=0.01)


def test_state_moves_with_its_matrix_to_another_plan(tmp_path: Path, wanted: Any) -> None:
    """From three owners to two that have all of a matrix, and to no owners."""
    run_ranks(3, begin, plan_of(3, 1, 1), str(tmp_path))
    for plan in (plan_of(2, 3, 3), plan_of(2, 0, 1)):
        losses, state = run_ranks(2, go_on, plan, str(tmp_path))[0]
        assert losses == pytest.approx(wanted[0][3:], rel=1e-10)
        for path, x in wanted[1].items():
            assert (state[path] - x).abs().max() <= 1e-10 * x.abs().max(), path


def test_the_price_is_that_of_the_busiest_owner() -> None:
    """Of seven matrices on four ranks one rank has two; products of matrices have a price."""
    shapes = tuple(Shaped((64, 32), 4 * 64 * 32) for _ in range(7))
    stage = plan_of(4, 1, 1).stages[0]
    own = replace(stage, by_parameter={}, sync=FormChoice(form="by_owner"), zero=1)
    exchange = exchange_of(own, shapes)
    assert exchange.largest == exchange.busiest == pytest.approx(2 / 7)
    assert sorted(owners_of([s.shape for s in shapes], 4, "products")) == [0, 0, 1, 1, 2, 2, 3]
    mixed = (*shapes[:2], Shaped((256, 256), 4 * 256 * 256))
    assert exchange_of(own, mixed).busiest > 0.9
    seconds, state = [], []
    for zero in (0, 1):
        tables, plan = problem(4), plan_of(4, zero, 1)
        found = estimate_all(graph(), tables.cluster, plan, tables.tables).prediction.stages[0]
        seconds.append(found.optimizer_s)
        state.append(found.memory.optimizer_bytes)
    assert seconds[1] < 0.75 * seconds[0], "two of six in place of all, beside AdamW"
    assert state[0] - state[1] == BYTES - BYTES / 3


def test_search_gives_matrices_owners() -> None:
    """Where the user says only that they are stepped by Muon; more may be pinned."""
    pins = tuple(f"parameters {name} update=muon" for name in MATRICES)
    for more in ((), tuple(f"{pin},sync=by_owner,zero=1" for pin in pins)):
        asked = problem(4, constraints=more or pins)
        shape = uniform_choice(asked, num_microbatches=2, dp_replicate=4)
        base = build_plan(asked, shape)
        tried = [base, *finished(asked, base)]
        zeros = {
            c.zero for p in tried for c in p.stages[0].by_parameter.values()
            if c.sync and c.sync.form == "by_owner" and c.update == "muon"
        }  # fmt: skip
        assert zeros == ({1} if more else {1, 2, 3})
    plan = search_problem(problem(4, constraints=pins))
    assert all(dict(stage.model).get("tp", 1) == 1 for stage in plan.stages)
    assert not [f for f in check_plan(Checked(plan, ()), graph()).findings if f.severity == "error"]
    assert loads(dumps(plan)).stages == plan.stages


def test_what_muon_does_not_step_is_said_before_a_search() -> None:
    """Vectors; and pins that the user did not give say why they are there."""
    with pytest.raises(PlanError, match=r"muon steps .* 2 dims, and .*nearest: .* update=adamw'"):
        make_problem(graph(), Cluster.local(2), optimizer="muon")
    others = tuple(
        f"parameters {x.fqn} update=adamw" for x in graph().parameters if len(x.shape) != 2
    )
    asked = make_problem(
        graph(), Cluster.local(2), optimizer="muon", constraints=(*others, "zero=1")
    )
    with pytest.raises(Infeasible) as error:
        search_problem(asked)
    said = str(error.value)
    assert said.startswith("no plan meets 'zero=0' and 'zero=1' together; 'zero=0' is pinned since")
    assert "a step of muon depends on the whole parameter; 'parameters PATTERN sync=by_o" in said
    assert "without 'zero=1'" in said and "without 'zero=0'" not in said


def test_the_check_says_how_they_are_shared_out() -> None:
    (note,) = owner_notes(plan_of(4, 1, 1), graph())
    assert "6 parameters stepped whole by muon, each by one of 4 owners" in note.message
    assert "33.3% of the work, where 25.0% is even" in note.message
    plan = rehash(plan_of(2, 1, 1))
    assert any(
        "stepped whole" in f.message for f in check_plan(Checked(plan, ()), graph()).findings
    )


def _dry(rank: int, store: Any, plan: Plan) -> tuple[list[int], list[Any]]:
    run = dry_run(plan, graph())
    return [len(r.ranks) for r in run.ranks], list(run.findings)


def test_a_dry_run_takes_each_owner_for_itself() -> None:
    ((ranks, wrong),) = run_ranks(1, _dry, plan_of(4, 1, 1), init=False)
    assert ranks == [1, 1, 1, 1] and not wrong


OWNED = FormChoice(form="by_owner")


@pytest.mark.parametrize(
    ("said", "rule", "near"),
    [
        ({"head.*": ParameterChoice(update="muon")}, "steps parameters of 2 dims", "update adamw"),
        ({"head.weight": ParameterChoice(zero=1, update="muon")}, "depends on the whole",
         "sync by_owner and zero 1"),
        ({"*": ParameterChoice(zero=0, sync=OWNED)}, "zero is 0", "zero 1"),
        ({"*": ParameterChoice(zero=1, sync=replace(OWNED, settings={"balance": "byte"}))},
         "balance must be one of products, values, inverses", "balance values"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(said: dict[str, ParameterChoice], rule: str, near: str) -> None:
    plan = plan_of(2, 1, 1)
    plan = replace(plan, stages=tuple(replace(s, by_parameter=said) for s in plan.stages))
    wrong = [*findings(plan)] or [*update_findings(plan, graph())]
    assert rule in wrong[0].message and near in wrong[0].nearest, wrong


def test_parts_of_which_blocks_read_copies_are_refused_by_the_check() -> None:
    """Not by a job that begins, alone."""
    plan = plan_of(2, 1, 1)
    said = {"*": ParameterChoice(zero=3, sync=OWNED)}
    plan = replace(plan, stages=tuple(replace(s, by_parameter=said) for s in plan.stages))
    assert not [*findings(plan)]
    (wrong,) = findings(replace(plan, precision="bf16"))
    assert "by_owner has parts of parameters and knows of no copies" in wrong.message
    assert wrong.nearest == "zero 1, or a precision without copies"


def test_a_matrix_that_a_model_axis_splits_is_refused() -> None:
    asked = problem(4)
    plan = build_plan(asked, uniform_choice(asked, num_microbatches=2, dp_shard=2, tp=2, zero=1))
    said = {MATRICES[0]: ParameterChoice(zero=1, sync=OWNED, update="muon")}
    plan = replace(plan, stages=tuple(replace(s, by_parameter=said) for s in plan.stages))
    (wrong,) = update_findings(plan, graph())
    assert "is split over tp" in wrong.message and "tp 1" in wrong.nearest


def _two_of_the_users(plan: Plan) -> tuple[list[float], Any]:
    """Muon and AdamW of the user's own, with a scheduler over one of them."""
    trained = model()
    named = dict(trained.named_parameters())
    own = [n for n in named if n.endswith(("up.weight", "down.weight"))]
    muon = torch.optim.Muon([named[n] for n in own], lr=0.02, weight_decay=0.3)
    rest = {"decay": [], "none": []}
    for name, p in named.items():
        if name not in own:
            rest["decay" if p.ndim > 1 else "none"].append(p)
    adamw = torch.optim.AdamW(
        [{"params": rest["decay"]}, {"params": rest["none"], "weight_decay": 0.0}], lr=0.01
    )
    scheduler = torch.optim.lr_scheduler.StepLR(muon, 2, 0.5)
    if plan.world_size == 1:  # in plain PyTorch
        losses = []
        for batch in batches():
            trained.zero_grad()
            loss = trained(*batch)
            loss.backward()
            muon.step()
            adamw.step()
            scheduler.step()
            losses.append(float(loss.detach()))
        return losses, {name: x.detach().clone() for name, x in named.items()}
    job = compile_job(
        trained, plan, optimizer=[muon, adamw], device="cpu", graph=graph(), check=True
    )
    losses = []
    for batch in batches():
        losses.append(float(job.step(batch)))
        scheduler.step()
    found = full_state(job)
    job.close()
    return losses, found


def test_optimizers_of_the_users_own() -> None:
    """Each over some parameters, with groups; the plan says who owns what."""
    said = {name: ParameterChoice(zero=1, sync=OWNED) for name in MATRICES}
    plan = plan_of(2, 1, 1)
    plan = replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))
    losses, state = run_ranks(2, _two_of_the_users, plan)[0]
    one = build_plan(problem(1), uniform_choice(problem(1)), predict=False)
    wanted = alone(_two_of_the_users, one)
    assert losses == pytest.approx(wanted[0], rel=1e-10)
    for path, x in wanted[1].items():
        assert (state[path] - x).abs().max() <= 1e-10 * x.abs().max(), path


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    own = model().head.weight
    both = torch.optim.Muon([own]), torch.optim.AdamW([own])
    with pytest.raises(PlanError, match="AdamW steps a parameter that an optimizer before it"):
        compile_job(model(), None, optimizer=both, device="cpu")
    with pytest.raises(PlanError, match="has a str in it"):
        compile_job(model(), None, optimizer=[both[0], "adamw"], device="cpu")


def _own_optimizer(plan: Plan) -> str:
    def muon(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(groups[0]["params"])

    try:
        compile_job(model(), plan, optimizer=muon, device="cpu", graph=graph(), check=False)
    except (PlanError, ValueError) as error:
        return str(error)
    return ""


def test_rows_of_matrices_are_still_refused() -> None:
    """An optimizer of the user's that looks at whole matrices, where ranks have rows of them."""
    asked = problem(2)
    plan = build_plan(asked, uniform_choice(asked, num_microbatches=2, dp_shard=2, zero=1))
    assert all("2D" in each for each in run_ranks(2, _own_optimizer, plan))
