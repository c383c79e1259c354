"""Parameters of one stage that differ in how replicas agree on them and where they are."""

from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any
from uuid import uuid4

import pytest
import torch

from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.explain.detail import detail_of
from meshwright.forms.updates import update
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.parameters import choice_of, groups_of, stage_for
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.equality import check_each_equal
from meshwright.testing.fresh import python
from meshwright.testing.models import CASES
from meshwright.testing.spawn import alone, run_ranks
from meshwright.tools.dry.run import dry_run
from tests.form_files.small import batches, difference, graph, model, tracked
from tests.overlap_plans import planned

WHOLE, PART, HALF, FULL = (ParameterChoice(zero=zero) for zero in (0, 1, 2, 3))
DEAR = FormChoice(form="dear", settings={"bucket_bytes": 2048})
LATE = ParameterChoice(zero=1, sync=DEAR)
LATE_GRADIENTS = ParameterChoice(zero=0, sync=DEAR)
MIXED: dict[str, dict[str, ParameterChoice]] = {
    "one whole": {"head.weight": WHOLE},
    "one in shards": {"layers.1.up.weight": FULL},
    "norms whole, the middle late": {"layers.*.norm.*": WHOLE, "layers.1.up.*": LATE},
    "all four": {
        "layers.0.*": FULL, "layers.1.*": HALF, "layers.2.up.*": LATE_GRADIENTS, "head.*": WHOLE,
    },
}  # fmt: skip


def problem(ranks: int = 2, optimizer: str = "adamw") -> Problem:
    return make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer=optimizer)


def plan_of(said: dict[str, ParameterChoice], made: Problem, **sizes: Any) -> Plan:
    """Two micro-batches with zero 1, but for what is said."""
    choice = uniform_choice(made, num_microbatches=2, **{"zero": 1, **sizes})
    plan = build_plan(made, choice, predict=False)
    stages = tuple(replace(stage, by_parameter=said) for stage in plan.stages)
    return replace(plan, stages=stages)


@pytest.mark.parametrize("name", MIXED)
def test_training_is_that_of_one_process(name: str) -> None:
    plan = plan_of(MIXED[name], problem(), dp_shard=2)
    assert not [f for f in plan.verify(graph()) if f.severity == "error"]
    assert difference(plan) <= 1e-9


def test_uneven_replicas_of_shards_and_copies_of_them() -> None:
    """Three ranks with a sample more on one; 2 x 2 of which half are copies."""
    for ranks, sizes in ((3, {"dp_shard": 3}), (4, {"dp_replicate": 2, "dp_shard": 2})):
        plan = plan_of(MIXED["all four"], problem(ranks), **sizes)
        assert difference(plan) <= 1e-9


@pytest.mark.parametrize("more", [{"tp": 2}, {"pp": 2}])
def test_beside_other_axes(more: dict[str, int]) -> None:
    """Tied embeddings whole, or gathered alone, in two stages; norms late."""
    found = []
    for said in (
        {"transformer.wte.weight": WHOLE, "*.ln_*.weight": LATE},
        {"transformer.wte.weight": FULL, "*.c_fc.*": LATE_GRADIENTS},
    ):
        sizes = {"tp": 1, "pp": 1} | more
        traced, plan = planned("gpt2", 12, "none", dp_shard=2, zero=1, num_microbatches=2, **sizes)
        stages = []
        for index, stage in enumerate(plan.stages):
            paths = [
                traced.tensors[name].fqn
                for block in plan.stage_blocks(traced, index) for name in block.params
            ]  # fmt: skip
            own = {
                p: c
                for p, c in said.items()
                if groups_of(replace(stage, by_parameter={p: c}), paths)[-1][0].zero == c.zero
                or p in paths
            }
            stages.append(replace(stage, by_parameter=own))
        plan = replace(plan, stages=tuple(stages))
        assert not [f for f in plan.verify(traced) if f.severity == "error"]
        found.append((plan, traced))
    for each in check_each_equal(CASES["gpt2"], found, steps=3):
        assert each.worst_of_both <= 1e-9, str(each)


def test_memory_is_what_is_tracked() -> None:
    made = problem()
    plans = [plan_of(said, made, dp_shard=2) for said in MIXED.values()]
    counted = run_ranks(2, tracked, plans)
    for number, plan in enumerate(plans):
        predicted = estimate_all(graph(), made.cluster, plan, made.tables).prediction
        most = max(rank[number] for rank in counted)
        assert predicted.stages[0].memory.tensor_bytes == pytest.approx(most, rel=0.01)


def _dry(rank: int, store: Any, plans: list[Plan]) -> list[tuple[int, tuple[Any, ...]]]:
    done = [dry_run(plan, graph()) for plan in plans]
    return [(max(r.memory.peak_bytes for r in run.ranks), run.findings) for run in done]


def test_a_dry_run_of_a_pattern_for_all_is_that_of_the_stage() -> None:
    made = problem()
    for choice in (WHOLE, FULL, LATE):
        said = plan_of({"*": choice}, made, dp_shard=2)
        own = replace(said.stages[0], by_parameter={}, zero=choice.zero, sync=choice.sync)
        mixed = plan_of({"head.*": choice}, made, dp_shard=2)
        plans = [said, replace(said, stages=(own,)), mixed]
        ((one, two, three),) = run_ranks(1, _dry, plans, init=False)
        assert one == two and not three[1]


def test_a_pattern_for_all_is_the_stage_that_says_it() -> None:
    """In time, memory and traffic, to the last bit."""
    made = problem(4)
    for choice in (WHOLE, PART, HALF, FULL, LATE, LATE_GRADIENTS):
        said = plan_of({"*": choice}, made, dp_shard=2, dp_replicate=2)
        own = replace(
            said,
            stages=tuple(
                replace(s, by_parameter={}, zero=choice.zero, sync=choice.sync) for s in said.stages
            ),
        )
        two = [estimate_all(graph(), made.cluster, plan, made.tables) for plan in (said, own)]
        assert two[0].prediction == two[1].prediction
        sent = [detail_of(made.tables, plan).kinds for plan in (said, own)]
        assert [k.traffic for k in sent[0]] == [k.traffic for k in sent[1]]


def test_parts_of_the_traffic_are_those_of_whole_stages() -> None:
    """Of each parameter the bytes are what they are where all are treated so."""
    made = problem()
    traffic = {}
    for name, said in {
        "mixed": {"head.*": WHOLE}, "part": {"*": PART}, "whole": {"*": WHOLE},
    }.items():  # fmt: skip
        plan = plan_of(said, made, dp_shard=2)
        (kind,) = detail_of(made.tables, plan).kinds
        traffic[name] = sum(t.nbytes for t in kind.traffic if t.purpose == "gradients")
    head = 8 * (3 * 12 + 3)
    assert traffic["whole"] == 2 * traffic["part"]
    assert traffic["mixed"] == traffic["part"] + head / 2


def test_files_say_it_and_older_ones_do_not_change() -> None:
    made = problem()
    plan = plan_of(MIXED["all four"], made, dp_shard=2)
    assert loads(dumps(plan)).stages == plan.stages
    order = dict(reversed(MIXED["all four"].items()))
    again = plan_of(order, made, dp_shard=2)
    assert loads(dumps(again)).hash == loads(dumps(plan)).hash
    assert "by_parameter" not in dumps(plan_of({}, made, dp_shard=2))


def test_paths_outrank_patterns() -> None:
    stage = plan_of({"layers.*": WHOLE, "layers.1.up.bias": FULL}, problem(), dp_shard=2).stages[0]
    zeros = [
        stage_for(stage, p).zero for p in ("layers.0.up.bias", "layers.1.up.bias", "head.bias")
    ]
    assert zeros == [0, 3, 1]


@pytest.mark.parametrize(
    ("said", "rule", "near"),
    [
        ({"layers.7.*": WHOLE}, "none of its parameters", "layers."),
        ({"layers.*": WHOLE, "*.weight": FULL}, "different things of 'layers.0", "name 'layers.0"),
        ({"*": ParameterChoice(zero=3, sync=DEAR)}, "has its own time for gathers", "zero 1"),
        ({"*": ParameterChoice(sync=FormChoice(form="deer"))}, "no form of sync", "dear"),
        ({"*": ParameterChoice(store=FormChoice(form="wohle"))}, "no store", "no store"),
        ({"*": ParameterChoice(update="admaw")}, "no optimizer", "update adamw"),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, ParameterChoice], rule: str, near: str) -> None:
    plan = plan_of(said, problem(), dp_shard=2)
    found = [f for f in plan.verify(graph()) if f.severity == "error"] or _sync_errors(plan)
    assert rule in found[0].message and near in found[0].nearest, found


def _sync_errors(plan: Plan) -> list[Any]:
    from meshwright.forms.sync_findings import findings

    return [f for f in findings(plan) if f.severity == "error"]


UPDATES = {
    "layers.0.*": ParameterChoice(zero=1, update="sgd_momentum"),
    "layers.1.up.*": ParameterChoice(zero=3, update="rmsprop"),
    "*.norm.*": ParameterChoice(zero=1, update="sgd"),
}


def _stepped(said: dict[str, ParameterChoice]) -> dict[str, ParameterChoice]:
    """Patterns that name each parameter once."""
    return {name: choice for name, choice in said.items() if name != "layers.0.*"} | {
        f"layers.0.{part}.*": said["layers.0.*"] for part in ("up", "down")
    }


def _several(plan: Plan, folder: str) -> tuple[list[float], dict[str, Any], list[float]]:

    def made(**more: Any) -> Any:
        return compile_job(
            model(), plan, lr=0.01, max_grad_norm=0.5, device="cpu", graph=graph(), **more
        )

    job = made(check=True)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 2, 0.5)
    losses = []
    for number, batch in enumerate(batches()):
        losses.append(float(job.step(batch)))
        scheduler.step()
        if number == 2:
            job.save(folder)
    state = full_state(job)
    assert job.checked and not any("the plan" in each for each in job.checked.unchecked)
    job.close()
    again = made()
    again.load(folder)
    later = []
    for number, batch in enumerate(batches()[3:], 3):
        later.append(float(again.step(batch)))
        for group in again.optimizer.param_groups if number % 2 else ():
            group["lr"] *= 0.5
    again.close()
    return losses, state, later


def _several_plain(stepped: dict[str, str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    trained = model()
    optimizers = [
        update(name).make(
            [p for n, p in trained.named_parameters() if stepped[n] == name], 0.01, fused=False
        )
        for name in sorted(set(stepped.values()))
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    losses = []
    for batch in batches():
        trained.zero_grad()
        loss = trained(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        for one in (*optimizers, *schedulers):
            one.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in trained.named_parameters()}


def test_parameters_are_stepped_as_their_patterns_say(tmp_path: Path) -> None:
    """With clipping over all, a scheduler, a checkpoint and the self-check."""
    plan = plan_of(_stepped(UPDATES), problem(), dp_shard=2)
    assert not [f for f in plan.verify(graph()) if f.severity == "error"]
    stage = plan.stages[0]
    stepped = {
        name: (choice_of(stage.by_parameter, name) or ParameterChoice(update="adamw")).update
        for name, _ in model().named_parameters()
    }
    assert len(set(stepped.values())) == 4
    losses, wanted = alone(_several_plain, stepped)
    for found, state, later in run_ranks(2, _several, plan, str(tmp_path / "kept")):
        assert found == pytest.approx(losses, rel=1e-10)
        assert later == pytest.approx(losses[3:], rel=1e-10)
        for name, x in wanted.items() if state else ():  # rank 0 has it
            assert (state[name] - x).abs().max() <= 1e-10 * x.abs().max(), name


def test_stages_that_share_a_parameter_step_it_alike() -> None:
    """Else its copies would part."""
    traced, plan = planned("gpt2", 12, "none", tp=1, pp=2, dp_shard=2, zero=1, num_microbatches=2)
    own = ParameterChoice(zero=1, update="sgd")
    first = replace(plan.stages[0], by_parameter={"transformer.wte.weight": own})
    (said,) = (f for f in replace(plan, stages=(first, plan.stages[1])).verify(traced)
               if f.severity == "error")  # fmt: skip
    assert "share transformer.wte.weight" in said.message and "update sgd in both" in said.nearest
    second = replace(plan.stages[1], by_parameter={"transformer.wte.weight": own})
    both = replace(plan, stages=(first, second))
    assert not [f for f in both.verify(traced) if f.severity == "error"]


def test_steps_are_priced_by_their_optimizers() -> None:
    """Bytes of state are those of each; seconds lie between those of one alone and the other."""
    made = problem()
    sgd, adamw = (ParameterChoice(zero=0, update=name) for name in ("sgd", "adamw"))
    found = [
        estimate_all(
            graph(), made.cluster, plan_of(said, made, dp_replicate=2, zero=0), made.tables
        ).prediction.stages[0]
        for said in ({"*": adamw}, {"layers.*": adamw, "head.*": sgd}, {"*": sgd})
    ]
    head = 8 * (3 * 12 + 3)
    states = [stage.memory.optimizer_bytes for stage in found]
    assert states[0] - states[1] == 2 * head and states[2] == 0
    assert found[0].optimizer_s > found[1].optimizer_s > found[2].optimizer_s


def test_an_optimizer_of_the_users_own_is_refused_where_the_plan_says_several() -> None:
    plan = plan_of(_stepped(UPDATES), problem(), dp_shard=2)
    assert all("pass no optimizer" in each for each in run_ranks(2, _tuned, plan, False))


STORE = """
from meshwright.forms.exchange_rows import (Event, Hold)
from meshwright.forms.running import ParameterStore
from meshwright.forms.flat import held_whole

COUNT = {}

def describe(replicas, settings={}):
    return (Hold(kind="parameters", since=Event.BEGIN, until=Event.NEXT_BEGIN, whole=1),)

def check(stage):
    for name in stage.store.settings:
        if name != "level":
            yield f"no setting {name!r}", "level 1"

def build(slots, lines, stage):
    return Counting(held_whole(slots, lines))

class Counting(ParameterStore):
    '''Empties parameters while no block reads them: a store that only it can read.'''

    def __init__(self, held):
        super().__init__(held)
        self.users, self.kept = 0, [h.tensor.detach().clone() for h in held]

    def before_forward(self, call, ahead):
        self.users += 1
        COUNT["before"] = COUNT.get("before", 0) + 1

    before_backward = before_forward

    def close(self, call):
        self.users -= 1
        assert self.users >= 0
        COUNT["closed"] = COUNT.get("closed", 0) + 1
"""
SCRIPT = """
import sys
from dataclasses import replace
from importlib import import_module
from meshwright.forms.sync_findings import findings
from meshwright.ir.plan.plan import FormChoice, ParameterChoice
from meshwright.ir.plan.plan_io import dumps, loads
from meshwright.costmodel.estimate import estimate_all
from tests.form_files.test_by_parameter import plan_of, problem
from tests.form_files.small import batches, difference, graph, model, tracked
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks

NAME = sys.argv[1]
made = problem()
usual = plan_of({}, made, dp_shard=2)
for plan in (
    replace(usual, stages=(replace(usual.stages[0], store=FormChoice(form=NAME)),)),
    plan_of({"layers.1.*": ParameterChoice(zero=0, store=FormChoice(form=NAME))}, made, dp_shard=2),
):
    assert not list(findings(plan))
    assert loads(dumps(plan)).stages == plan.stages
    price = estimate_all(graph(), made.cluster, plan, made.tables).prediction
    assert price.step_s > 0
    assert difference(plan) <= 1e-9

    def counts():
        job = compile_job(
            model(), plan, optimizer="adamw", device="cpu", graph=graph(), check=False)
        job.step(batches()[0])
        job.close()
        return dict(import_module(f"meshwright.forms.storage.{NAME}").COUNT)

    found = run_ranks(2, counts)[0]
    assert found["before"] == found["closed"] > 0, found
wrong = replace(usual, stages=(replace(usual.stages[0], zero=3, store=FormChoice(form=NAME)),))
(said,) = findings(wrong)
assert "every rank has whole, and zero3 takes others" in said.message and "shards" in said.nearest
wrong = FormChoice(form=NAME, settings={"levle": 2})
(said,) = findings(replace(usual, stages=(replace(usual.stages[0], store=wrong),)))
assert "levle" in said.message
print("done")
"""


def test_a_store_of_a_users_own_is_one_file(tmp_path: Path) -> None:
    name = f"s{uuid4().hex[:8]}"
    (tmp_path / f"{name}.py").write_text(STORE)
    done = python("-c", dedent(SCRIPT), name, MESHWRIGHT_STORAGE=str(tmp_path))
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-4000:]


def _through_a_checkpoint(folder: str, plans: tuple[Plan, Plan]) -> float:
    """Three steps under one plan, two more under the other."""
    first, second = (
        compile_job(model(), plan, optimizer="adamw", lr=0.01, device="cpu", graph=graph(),
                    check=False)
        for plan in plans
    )  # fmt: skip
    whole = [float(first.step(batch)) for batch in batches()[:3]]
    first.save(folder)
    whole += [float(first.step(batch)) for batch in batches()[3:]]
    second.load(folder)
    again = [float(second.step(batch)) for batch in batches()[3:]]
    state = full_state(first), full_state(second)
    first.close()
    second.close()
    far = [abs(a - b) for a, b in zip(whole[3:], again, strict=True)]
    return max(far + [float((state[0][n] - x).abs().max()) for n, x in state[1].items()])


def test_a_checkpoint_does_not_know_of_it(tmp_path: Path) -> None:
    made = problem()
    plans = plan_of(MIXED["all four"], made, dp_shard=2), plan_of({}, made, dp_shard=2)
    for number, pair in enumerate((plans, plans[::-1])):
        found = run_ranks(2, _through_a_checkpoint, str(tmp_path / str(number)), pair)
        assert max(found) <= 1e-10


def test_tuning_refuses_sizes_that_differ() -> None:
    other = ParameterChoice(zero=1, sync=replace(DEAR, settings={"bucket_bytes": 4096}))
    plan = plan_of({"layers.*": LATE, "head.*": other}, problem(), dp_shard=2)
    said = run_ranks(2, _tuned, plan)
    assert all("buckets of [2048, 4096] bytes" in each for each in said)


def _tuned(plan: Plan, tune: bool = True) -> str:
    try:
        compile_job(model(), plan, optimizer="adamw", device="cpu", graph=graph(), tune=tune)
    except PlanError as error:
        return str(error)
    return ""
