"""DeAR beside plain training in one process: exact, however its buckets are cut, and settled
wherever parameters are read."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.forms.flat import ShardedBucket
from meshwright.forms.sync.dear import in_forward_order
from meshwright.forms.sync_findings import check, findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import NonFinite, PlanError
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.plan.plan_io import dumps, loads, rehash
from meshwright.ir.trace.trace import trace
from meshwright.planner.pins.decision_text import parse_constraint
from meshwright.planner.pins.decisions_kept import broken
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.space import meshes
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.stage.stage import BlockModule
from meshwright.testing.nets import plan_for
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.dear_jobs import (
    BATCH,
    WIDTH,
    Words,
    assert_equal,
    data,
    dear,
    made,
    plain,
    take,
)

VARIANTS = {"parameters": {"dp_shard": 4, "zero": 1}, "gradients": {"dp_replicate": 4}}


@cache
def base(variant: str) -> Plan:
    return plan_for(Words, 4, inputs=data(0), **VARIANTS[variant])


def trained(plans: list[Plan], steps: int) -> list[tuple[list[float], dict[str, Tensor], int]]:
    found = []
    for plan in plans:
        job, scheduler = made(plan)
        losses = take(job, scheduler, 0, steps)
        (stage,) = job.parts.stages.values()
        found.append((losses, full_state(job), len(stage.sync._buckets)))
        job.close()
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_forty_steps_are_those_of_one_process(variant):
    sizes = {1: (1, 10), 3 * WIDTH * WIDTH * 8: (2, None), 2**30: (1, 1)}
    plans = [
        dear(base(variant), bucket_bytes=size, ahead=ahead) for size, (ahead, _) in sizes.items()
    ]
    losses, state = alone(plain, 40)
    found = run_ranks(4, trained, plans, 40, timeout_s=500)
    for number, (_, count) in enumerate(sizes.values()):
        ours, parameters, buckets = found[0][number]
        assert count in (None, buckets) and (count or 1 < buckets < 10)
        assert ours == pytest.approx(losses, rel=1e-10)
        assert all(rank[number][0] == ours for rank in found)
        assert_equal(parameters, state)


def read(plans: dict[str, Plan], others: list[Plan], folder: str) -> dict[str, Any]:
    """Per plan, what each way to read the parameters gives after three steps, and whether there was
    anything to complete before it."""
    found: dict[str, Any] = {}
    for kind, plan in plans.items():
        where = f"{folder}/{kind}"
        for way in ("full_state", "eval", "save", "export", "sync_to", "state_dict"):
            job, scheduler = made(plan)
            take(job, scheduler, 0, 3)
            behind = not job.parts.is_settled
            match way:
                case "eval":
                    value: Any = float(job.eval(data(50)))
                case "save":
                    job.save(where, scheduler)
                    value = None
                case "export":
                    job.export(f"{where}-export")
                    value = None
                case "sync_to":
                    job.sync_to()
                    value = {n: p.detach().clone() for n, p in job.model.named_parameters()}
                case "state_dict":
                    job.optimizer.state_dict()
                    value = None
                case _:
                    value = full_state(job)
            parameters_late = plan.stages[0].is_sharded
            assert job.parts.is_settled or (way == "state_dict" and parameters_late), way
            # Reading must not change what comes.
            take(job, scheduler, 3, 6)
            found[kind, way] = behind, value, full_state(job)
            job.close()
        for number, other in enumerate([plan, *others]):
            job, scheduler = made(other)
            take(job, scheduler, 0, 1)
            job.load(where, scheduler)
            take(job, scheduler, 3, 6)
            found[kind, "loaded", number] = True, None, full_state(job)
            job.close()
    return found


def test_reading_completes_what_is_under_way(tmp_path):
    plans = {kind: dear(base(kind), bucket_bytes=1) for kind in VARIANTS}
    others = [base("parameters"), dear(base("gradients"), bucket_bytes=2**30)]
    (_, after3), (_, after6) = alone(plain, 3), alone(plain, 6)
    found = run_ranks(4, read, plans, others, str(tmp_path), timeout_s=500)[0]
    model = Words()
    model.load_state_dict(after3, strict=False)
    wanted = float(model(*data(50)).detach())
    for key, (behind, value, end) in found.items():
        assert behind, key
        assert_equal(end, after6)
        if key[1] == "eval":
            assert value == pytest.approx(wanted, rel=1e-12)
        elif value is not None:
            assert_equal({n: x for n, x in value.items() if n in after3}, after3)


def counted(plans: list[Plan]) -> list[tuple[int, int, int]]:
    """Per plan: gathers of a step, how many were under way while another block ran, and blocks."""
    found = []
    for plan in plans:
        job, scheduler = made(plan)
        take(job, scheduler, 0, 1)
        log: list[tuple[str, int]] = []
        gather, forward = ShardedBucket.gather, BlockModule.forward
        modules = {id(b): i for i, b in enumerate(next(iter(job.parts.stages.values())).blocks)}

        def gathered(bucket: Any, *args: Any, log: Any = log, gather: Any = gather) -> Any:
            log.append(("gather", bucket.owner))
            return gather(bucket, *args)

        def entered(
            block: Any, *args: Any, log: Any = log, forward: Any = forward,
            modules: Any = modules, **more: Any,
        ) -> Any:  # fmt: skip
            log.append(("forward", modules[id(block)]))
            return forward(block, *args, **more)

        ShardedBucket.gather, BlockModule.forward = gathered, entered  # type: ignore[method-assign]
        try:
            take(job, scheduler, 1, 2)
        finally:
            ShardedBucket.gather, BlockModule.forward = gather, forward  # type: ignore[method-assign]
        starts = {owner: at for at, (what, owner) in enumerate(log) if what == "gather"}
        entries: dict[int, int] = {}
        for at, (what, index) in enumerate(log):
            if what == "forward":
                entries.setdefault(index, at)
        hidden = sum(
            any(start < entries[other] < entries[owner] for other in entries if other != owner)
            for owner, start in starts.items()
            if start < entries[owner]
        )
        found.append((len(starts), hidden, len(entries)))
        job.close()
    return found


def test_all_gathers_but_the_first_are_under_the_next_forward():
    plans = [dear(base(kind), bucket_bytes=1, ahead=1) for kind in VARIANTS]
    plans.append(base("parameters"))
    *late, at_once = run_ranks(4, counted, plans, timeout_s=300)[0]
    for owners, hidden, blocks in late:
        assert blocks >= 5 and owners == blocks and hidden == blocks - 1
    assert at_once[1] == 0


def stopped(plan: Plan) -> tuple[bool, dict[str, Tensor]]:
    job, scheduler = made(plan)
    take(job, scheduler, 0, 2)
    good = copy.deepcopy(full_state(job))
    held = next(h for h in job.parts.held if h.tensor.numel())
    with torch.no_grad():
        kept = held.tensor.detach().clone()
        held.tensor.fill_(float("inf"))
    for stage in job.parts.stages.values():
        stage.sync.written()
    with pytest.raises(NonFinite):
        job.step(data(70))
    settled = job.parts.is_settled
    with torch.no_grad():
        held.tensor.copy_(kept)
    for stage in job.parts.stages.values():
        stage.sync.written()
    job.settle()
    same = full_state(job)
    if job.parts.rank == 0:
        assert_equal(same, good)
    job.close()
    return settled, same


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_that_stops_leaves_nothing_under_way(variant):
    assert all(settled for settled, _ in run_ranks(4, stopped, dear(base(variant)), timeout_s=200))


def compared(plans: list[Plan]) -> list[Any]:
    """What the check before training says, and that it leaves no trace."""
    found = []
    for plan in plans:
        job, scheduler = made(plan, check=True)
        assert job.checked is not None and job.parts.is_settled
        losses = take(job, scheduler, 0, 3)
        found.append((job.checked.checked, job.checked.unchecked, losses))
        job.close()
    return found


def test_the_self_check_takes_it():
    losses, _ = alone(plain, 3)
    plans = [dear(base(variant)) for variant in VARIANTS]
    for ranks in run_ranks(4, compared, plans, timeout_s=300):
        for checked, unchecked, ours in ranks:
            assert any("plan" in what for what in checked), (checked, unchecked)
            assert ours == pytest.approx(losses, rel=1e-12)


class Counting(torch.optim.AdamW):
    """A class that nobody knows."""


def test_what_cannot_be_is_refused_with_the_nearest():
    plan = base("gradients")
    assert not list(findings(plan)) and not list(findings(dear(plan, ahead=3)))
    for settings, words in (({"ahed": 1}, "ahead 1"), ({"bucket_bytes": 0}, "bucket_bytes 1")):
        with pytest.raises(PlanError, match=words):
            check(dear(plan, **settings))
    sharded = replace(plan.stages[0], zero=2, sync=FormChoice(form="dear"))
    with pytest.raises(PlanError, match="zero 1, or no sync"):
        check(replace(plan, stages=(sharded,)))
    odd = replace(plan.stages[0], sync=FormChoice(form="dea"))
    with pytest.raises(PlanError, match="dear, or no sync"):
        check(replace(plan, stages=(odd,)))

    def refused(plan: Plan) -> str:
        model = Words()
        with pytest.raises(PlanError) as error:
            compile_job(model, plan, optimizer=Counting(model.parameters()), device="cpu")
        return str(error.value)

    assert "zero=1" in run_ranks(4, refused, dear(plan))[0]


def test_plans_say_it_and_old_ones_do_not_change():
    plan = rehash(base("parameters"))
    assert '"sync"' not in dumps(plan)
    late = dear(plan, ahead=2)
    assert late.hash != plan.hash and loads(dumps(late)) == late
    assert "dear ahead=2" in str(late) and "dear" not in str(plan)


def test_buckets_are_consecutive_in_the_order_of_the_forward():
    class Read:
        def __init__(self, owner: int, size: int) -> None:
            self.owner, self.whole = owner, torch.zeros(size)
            self.stepped_bytes = self.whole.nbytes

    slots: Any = [Read(owner, size) for owner, size in ((2, 5), (0, 3), (1, 4), (0, 2))]
    owners = [[slot.owner for slot in group] for group in in_forward_order(slots, 20)]
    assert owners == [[0, 0], [1, 2]]
    assert [len(group) for group in in_forward_order(slots, 1)] == [1, 1, 1, 1]
    assert [len(group) for group in in_forward_order(slots, 10**9)] == [4]


def test_a_pin_asks_for_it():
    problem = make_problem(
        trace(Words(), data(0)), Cluster.local(4), precision="fp64", optimizer="adamw",
        constraints=("sync=dear", "dp=4"),
    )  # fmt: skip
    found = {mesh.zero for mesh in meshes(problem, 4, BATCH)}
    assert found == {0, 1}, "zero 2 and 3 have their own time for gathers"
    choice = uniform_choice(problem, dp_shard=4, zero=1)
    plan = build_plan(problem, choice)
    assert plan.stages[0].sync == FormChoice(form="dear")
    assert "hides none of its gathers" in str(plan), "processes share cores"
    assert not broken(problem.constraints, plan, problem.graph)
    # Four processes on fewer cores hide nothing: it costs what ZeRO-1 does but for its buckets.
    usual = make_problem(problem.graph, problem.cluster, precision="fp64", optimizer="adamw")
    zero1, zero0 = (
        build_plan(usual, uniform_choice(usual, **size)).predicted
        for size in ({"dp_shard": 4, "zero": 1}, {"dp_replicate": 4})
    )
    whole = build_plan(problem, uniform_choice(problem, dp_replicate=4)).predicted
    assert plan.predicted and whole and zero1 and zero0
    assert plan.predicted.step_s == pytest.approx(zero1.step_s, rel=0.01)
    assert whole.step_s >= zero0.step_s
    bare = replace(plan, stages=(replace(plan.stages[0], sync=None),))
    assert [str(item) for item in broken(problem.constraints, bare, problem.graph)] == ["sync=dear"]
    with pytest.raises(PlanError, match="'dear'"):
        parse_constraint("sync=deer")
