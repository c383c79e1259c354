"""Averages that arrive late: equal to workers that are emulated in one process, step by step."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.stage.late import lagging_s
from meshwright.forms.sync import changes, is_exact
from meshwright.forms.sync_findings import findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.whole import differing_copies
from meshwright.testing.models import CASES as MODELS
from meshwright.testing.spawn import alone, run_ranks
from meshwright.tools.check import Checked, check_plan
from tests.form_files.small import Batch, batches, graph, model
from tests.overlap_plans import planned

STEPS, LR, DECAY = 9, 0.05, 0.8
Found = tuple[list[float], dict[str, Tensor]]


def data(step: int) -> Batch:
    return batches()[step % 5]


def plan_of(ranks: int, settings: dict[str, Any], optimizer: str = "sgd", **sizes: int) -> Plan:
    problem = make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer=optimizer)
    choice = uniform_choice(problem, num_microbatches=2, **(sizes or {"dp_replicate": ranks}))
    plan = build_plan(problem, choice, predict=False)
    sync = FormChoice(form="dasgd", settings=settings)
    return replace(plan, stages=tuple(replace(stage, sync=sync) for stage in plan.stages))


def job_of(plan: Plan, **more: Any) -> Any:
    return compile_job(
        model(), plan, optimizer=plan.optimizer, lr=LR, device="cpu", graph=graph(), check=False,
        **more,
    )  # fmt: skip


def spoiled(step: int, at: int = 5) -> Batch:
    """The data of a step; of one of them a sample that only the last replica reads is no number."""
    x, y = data(step)
    if step == at:
        x = x.clone()
        x[-1, 0] = float("inf")
    return x, y


def _left_out(plan: Plan) -> Found:
    """With a rate that falls each step; the replica that finds no number leaves the step out."""
    job = job_of(plan, on_nonfinite="skip")
    schedule, losses = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, DECAY), []
    for step in range(STEPS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses.append(float(job.step(spoiled(step))))
        schedule.step()
    state = full_state(job)
    job.close()
    return losses, state


def trained(plan: Plan, steps: int = STEPS, reads: tuple[int, ...] = ()) -> Found:
    """Losses, and parameters in the end; after some steps somebody looks at them."""
    job = job_of(plan)
    losses = []
    for step in range(steps):
        losses.append(float(job.step(data(step))))
        if step in reads:
            full_state(job)
            job.eval(data(0))
    state = full_state(job)
    job.close()
    return losses, state


class Worker:
    """One replica."""

    def __init__(self, optimizer: str) -> None:
        self.model = model()
        kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
        self.optimizer = kinds[optimizer](self.model.parameters(), lr=LR)
        self.snapshot: list[Tensor] = []

    @property
    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def emulated(
    shares: tuple[int, ...], optimizer: str, every: int = 4, delay: int = 2,
    rule: str = "corrected", keep: float = 0.5, outer: tuple[float, float] | None = None,
    micro: int = 2, decay: float = 1.0, left_out: int | None = None,
) -> Found:  # fmt: skip
    """All replicas one after another. A replica has its share of each micro-batch; the last one
    leaves out a step. Losses are those of the first, or their means where averages are at once."""
    workers = [Worker(optimizer) for _ in shares]
    weights = [share / sum(shares) for share in shares]
    losses = []
    anchor = workers[0].values
    speed = [torch.zeros_like(x) for x in anchor]
    average: list[Tensor] = []
    started = 0

    def average_of_all() -> list[Tensor]:
        values = [w.values for w in workers]
        return [
            sum(weight * v[i] for weight, v in zip(weights, values, strict=True))  # type: ignore[misc]
            for i in range(len(anchor))
        ]

    for step in range(1, STEPS + 1):
        for worker in workers:
            worker.optimizer.param_groups[0]["lr"] = LR * decay ** (step - 1)
        parts = [torch.chunk(x, micro) for x in data(step - 1)]
        cut = [[torch.split(part, list(shares)) for part in tensor] for tensor in parts]
        found = [
            worker.step(tuple(torch.cat([part[i] for part in tensor]) for tensor in cut))  # type: ignore[arg-type]
            for i, worker in enumerate(workers)
            if step - 1 != left_out or worker != workers[-1]
        ]
        found += [float("nan")] * (len(workers) - len(found))
        mean = sum(w * loss for w, loss in zip(weights, found, strict=True))
        losses.append(found[0] if delay else mean)
        for now in (False, True):
            if now and step % every == 0:
                average, started = average_of_all(), step
                for worker in workers:
                    worker.snapshot = worker.values
            if average and step == started + delay and now == (delay == 0):
                if outer is not None:
                    lr, momentum = outer
                    moved = [a - x for a, x in zip(anchor, average, strict=True)]
                    speed = [momentum * v + m for v, m in zip(speed, moved, strict=True)]
                    anchor = [
                        a - lr * (m + momentum * v)
                        for a, m, v in zip(anchor, moved, speed, strict=True)
                    ]
                    average = anchor
                for worker in workers:
                    _merge(worker, average, rule, keep)
                average = []
    names = [name for name, _ in workers[0].model.named_parameters()]
    return losses, dict(zip(names, average_of_all(), strict=True))


def _merge(worker: Worker, average: list[Tensor], rule: str, keep: float) -> None:
    with torch.no_grad():
        for p, s, a in zip(worker.model.parameters(), worker.snapshot, average, strict=True):
            if rule == "corrected":
                p += a - s
            else:
                p.copy_(a if rule == "overwrite" else keep * p + (1 - keep) * a)


def assert_equal(found: Found, wanted: Found) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    for name, x in wanted[1].items():
        assert (found[1][name] - x).abs().max() <= 1e-10 * x.abs().max(), name


CASES: dict[str, dict[str, Any]] = {
    "corrected": {"every": 4, "delay": 2},
    "at once": {"every": 3, "delay": 0},
    "mixed": {"every": 2, "delay": 1, "rule": "mix", "keep": 0.75},
    "overwritten": {"every": 4, "delay": 3, "rule": "overwrite"},
}


@pytest.mark.sampled
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_emulation_of_all_replicas(name: str, optimizer: str) -> None:
    plan = plan_of(2, CASES[name], optimizer)
    assert not list(findings(plan))
    wanted = alone(partial(emulated, (2, 2), optimizer, **CASES[name]))
    assert_equal(run_ranks(2, trained, plan)[0], wanted)


def test_replicas_with_unequal_shares() -> None:
    plan = plan_of(3, CASES["corrected"])
    shares = plan.stages[0].batch_shares
    assert len(set(shares)) > 1
    wanted = alone(partial(emulated, shares, "sgd", **CASES["corrected"]))
    assert_equal(run_ranks(3, trained, plan)[0], wanted)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_inside_a_replica(zero: int) -> None:
    plan = plan_of(4, CASES["corrected"], "adamw", dp_replicate=2, dp_shard=2, zero=zero)
    wanted = alone(partial(emulated, (2, 2), "adamw", **CASES["corrected"]))
    assert_equal(run_ranks(4, trained, plan)[0], wanted)


def test_outer_steps() -> None:
    settings = {"every": 3, "delay": 1, "outer_lr": 0.7, "outer_momentum": 0.9}
    wanted = alone(partial(emulated, (2, 2), "sgd", every=3, delay=1, outer=(0.7, 0.9)))
    assert_equal(run_ranks(2, trained, plan_of(2, settings))[0], wanted)


def test_averages_of_every_step_at_once_are_plain_training() -> None:
    """Without momentum."""
    usual = plan_of(2, {})
    usual = replace(usual, stages=(replace(usual.stages[0], sync=None),))
    found = [run_ranks(2, trained, p)[0] for p in (plan_of(2, {"every": 1, "delay": 0}), usual)]
    assert_equal(found[0], found[1])


def test_who_looks_at_parameters_changes_nothing() -> None:
    plan = plan_of(2, CASES["corrected"], "adamw")
    assert_equal(
        run_ranks(2, trained, plan, STEPS, (0, 1, 4, 5))[0], run_ranks(2, trained, plan)[0]
    )


def test_fragments_take_turns() -> None:
    """Each is averaged in every round, at other steps; with as many as tensors all differ."""
    found = []
    for n in (1, 2, 4):
        plan = plan_of(2, {"every": 4, "delay": 1, "fragments": n})
        each = [losses for losses, _ in run_ranks(2, trained, plan)]
        found.append([sum(losses) / 2 for losses in zip(*each, strict=True)])
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-12)
    assert len({round(losses[-1], 9) for losses in found}) == 3
    assert max(abs(losses[-1] / found[0][-1] - 1) for losses in found) < 0.05


def _broken(plan: Plan, folder: str, at: int) -> Found:
    job = job_of(plan)
    losses = [float(job.step(data(step))) for step in range(at)]
    job.save(folder)
    job.close()
    job = job_of(plan)
    job.load(folder)
    losses += [float(job.step(data(step))) for step in range(at, STEPS)]
    state = full_state(job)
    job.close()
    return losses, state


@pytest.mark.sampled
@pytest.mark.parametrize("at", [3, 5])
@pytest.mark.parametrize("sizes", [{}, {"dp_replicate": 2, "dp_shard": 2, "zero": 1}])
def test_a_run_that_goes_on_is_the_same_run(sizes: dict[str, int], at: int, tmp_path: Any) -> None:
    """Broken off while replicas differ, before or while an average is under way; each has its own
    moments."""
    ranks = 4 if sizes else 2
    plan = plan_of(ranks, CASES["corrected"], "adamw", **sizes)
    whole = run_ranks(ranks, trained, plan)[0]
    assert_equal(run_ranks(ranks, _broken, plan, str(tmp_path / "kept"), at)[0], whole)


@pytest.mark.parametrize(
    ("settings", "sizes", "said", "near"),
    [
        ({"every": 4, "delay": 4}, {}, "no shorter than the round", "delay 3"),
        ({"every": 0}, {}, "every must be a whole number from 1", "every 1"),
        ({"every": 2.5}, {}, "every must be a whole number", "every 2"),
        ({"rule": "corect"}, {}, "one of corrected, mix, overwrite", "rule corrected"),
        ({"fragments": 5}, {}, "more than the steps of a round", "fragments 4"),
        ({"delya": 1}, {}, "no setting 'delya'", "delay 2"),
        ({}, {"dp_shard": 2, "zero": 1}, "along dp_replicate, which is 1", "dp_replicate 2"),
    ],
)
def test_what_cannot_be_is_refused(
    settings: dict[str, Any], sizes: dict[str, int], said: str, near: str
) -> None:
    (finding,) = findings(plan_of(2, settings, **sizes))
    assert said in finding.message and near in finding.nearest, finding


def _clipped(plan: Plan) -> str:
    try:
        job_of(plan, max_grad_norm=1.0)
    except PlanError as error:
        return str(error)
    return ""


def test_clipping_is_refused() -> None:
    assert "dasgd" in run_ranks(2, _clipped, plan_of(2, {}))[0]


def test_only_who_asks_gets_it() -> None:
    assert not is_exact("dasgd") and changes("dasgd") == "delayed"


def slow(ranks: int) -> Cluster:
    """Nodes of one device between which nothing is fast."""
    cluster = Cluster.preset("v100-16", num_nodes=ranks, devices_per_node=1)
    assert cluster.between_nodes
    wire = replace(cluster.between_nodes, bandwidth_bytes_per_s=1e8, curves=())
    return replace(cluster, between_nodes=wire)


def test_search_takes_it_only_where_it_is_allowed() -> None:
    pins = ("pp=1", "model=1", "dp=4")

    def found(**more: Any) -> Plan:
        problem = make_problem(
            graph(), slow(4), precision="fp64", optimizer="sgd", constraints=pins, **more
        )
        return search_problem(problem, progress=False)

    plain, late = found(), found(allow=("delayed",))
    assert plain.predicted and late.predicted and late.evidence
    assert not plain.gives_up and plain.stages[0].sync_form != "dasgd"
    assert late.stages[0].sync_form == "dasgd"
    assert late.predicted.step_s < 0.8 * plain.predicted.step_s
    assert late.evidence.gap is None and "replicas train alone" in late.gives_up[0]
    assert "gives up: dasgd: replicas train alone" in "\n".join(str(late).splitlines()[:6])
    assert found(allow=("delayed",), max_grad_norm=1.0).stages[0].sync_form != "dasgd"
    with pytest.raises(PlanError, match="nearest is 'delayed'"):
        found(allow=("dealyed",))


def test_an_edited_plan_is_told_what_it_gives_up() -> None:
    """And says so once it has been checked with its model and cluster."""
    plan = rehash(replace(plan_of(2, {}), gives_up=()))
    checked = check_plan(Checked(plan, ()), graph(), Cluster.local(2))
    (said,) = (finding for finding in checked.findings if finding.rule == "gives_up")
    assert said.severity == "warning" and "replicas train alone" in said.message
    assert checked.fresh and "replicas train alone" in checked.fresh.gives_up[0]
    again = check_plan(Checked(checked.fresh, ()), graph(), Cluster.local(2))
    assert not [finding for finding in again.findings if finding.rule == "gives_up"]


def test_what_is_hidden_and_what_is_not() -> None:
    """An average takes nothing as long as the steps until it is waited for last; of one that takes
    longer, the rest shows once in a round."""
    cluster = slow(2)

    def priced(every: int, delay: int, rate: float) -> Any:
        wire = replace(cluster.between_nodes, bandwidth_bytes_per_s=rate)  # type: ignore[type-var]
        problem = make_problem(
            graph(), replace(cluster, between_nodes=wire), precision="fp64", optimizer="sgd"
        )
        choice = uniform_choice(problem, num_microbatches=1, dp_replicate=2)
        plan = build_plan(problem, choice, predict=False)
        sync = FormChoice(form="dasgd", settings={"every": every, "delay": delay})
        plan = replace(plan, stages=(replace(plan.stages[0], sync=sync),))
        return estimate_all(graph(), problem.cluster, plan, problem.tables)

    alone_s = priced(4, 2, 1e15).prediction.step_s
    (sync,) = [model.sync for model in priced(4, 2, 1e6).models]
    whole_s = 4 * lagging_s(sync)
    assert whole_s > 10 * alone_s
    steps = [priced(4, delay, 1e6).prediction.step_s for delay in (1, 2, 3)]
    # A step without averages, if each has the rest of one in four: equal for all delays.
    bare = [(step - whole_s / 4) / (1 - delay / 4) for delay, step in enumerate(steps, 1)]
    assert bare == pytest.approx([alone_s] * 3, rel=1e-3), "nobody meets in a step"
    assert priced(4, 2, 1e15).prediction.step_s == pytest.approx(alone_s)
    steps = [priced(4, 2, 10.0**rate).prediction.step_s for rate in range(6, 16)]
    assert steps == sorted(steps, reverse=True)


def test_stages_of_a_pipeline() -> None:
    """Two replicas of two stages."""
    plan = plan_of(4, CASES["corrected"], "adamw", pp=2, dp_replicate=2)
    wanted = alone(partial(emulated, (2, 2), "adamw", **CASES["corrected"]))
    assert_equal(run_ranks(4, trained, plan)[0], wanted)


@pytest.mark.parametrize(
    ("case", "sizes"), [("corrected", {"dp_shard": 2, "zero": 1}), ("mixed", {})]
)
def test_tensor_parallel_replicas(case: str, sizes: dict[str, int]) -> None:
    """Two replicas of two ranks, or of four with ZeRO among them, each of which averages its part
    of a parameter."""
    ranks = 4 * sizes.get("dp_shard", 1)
    plan = plan_of(ranks, CASES[case], "adamw", tp=2, dp_replicate=2, **sizes)
    assert any("S(" in str(layout.parameters) for layout in plan.layouts), "parameters are split"
    wanted = alone(partial(emulated, (2, 2), "adamw", **CASES[case]))
    assert_equal(run_ranks(ranks, trained, plan)[0], wanted)


def test_a_step_that_is_left_out_and_a_rate_that_falls() -> None:
    """One replica leaves out what it finds, alone, while an average is on its way; rounds, and a
    schedule of rates, count all steps."""
    plan = plan_of(2, CASES["corrected"], "adamw")
    found = run_ranks(2, _left_out, plan)[0]
    how = {**CASES["corrected"], "decay": DECAY, "left_out": 5}
    assert_equal(found, alone(partial(emulated, (2, 2), "adamw", **how)))


def _copies(plans: list[Plan], traced: Any) -> list[tuple[str, ...] | str]:
    """Of each: parameters of which ranks have different copies once all has settled."""
    found: list[tuple[str, ...] | str] = []
    case = MODELS["gpt2"]
    for plan in plans:
        try:
            job = compile_job(
                case.model(), plan, optimizer="adamw", lr=LR, device="cpu", graph=traced,
                check=False,
            )  # fmt: skip
        except PlanError as error:
            found.append(str(error))
            continue
        for _ in range(5):
            job.step(case.example(plan.global_batch_size))
        job.settle()
        found.append(differing_copies(job, 1e-12))
        job.close()
    return found


def test_a_parameter_of_two_stages() -> None:
    """Its copies stay equal, or the plan is refused: sums of its gradients are of one replica."""
    traced, plan = planned("gpt2", 12, "none", tp=1, pp=2, dp_replicate=2, num_microbatches=2)
    late = FormChoice(form="dasgd", settings=CASES["corrected"])
    same = replace(plan, stages=tuple(replace(stage, sync=late) for stage in plan.stages))
    other = replace(plan, stages=(same.stages[0], plan.stages[1]))
    copies, said = run_ranks(4, _copies, [same, other], traced)[0]
    assert copies == () and "share transformer.wte.weight" in said


def test_memory_is_what_is_tracked() -> None:
    plans = [plan_of(2, {**case, "outer_momentum": outer}, "adamw")
             for case in CASES.values() for outer in (0.0, 0.9)]  # fmt: skip
    tracked = run_ranks(2, _tracked, plans)
    for number, plan in enumerate(plans):
        problem = make_problem(graph(), Cluster.local(2), precision="fp64", optimizer="adamw")
        found = estimate_all(graph(), problem.cluster, plan, problem.tables).prediction
        most = max(rank[number] for rank in tracked)
        assert found.stages[0].memory.tensor_bytes == pytest.approx(most, rel=0.01), number


def _tracked(plans: list[Plan]) -> list[int]:
    """The most bytes of each in a round."""
    found = []
    for plan in plans:
        job, most = job_of(plan), 0
        for step in range(5):
            job.step(data(step))
        for step in range(5, 9):
            job.track_memory(data(step))
            assert job.tensor_memory is not None
            most = max(most, job.tensor_memory.peak_bytes)
        found.append(most)
        job.close()
    return found
