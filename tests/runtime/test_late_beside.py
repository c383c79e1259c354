"""Late gathers beside all else that a plan may ask for: equal to one process, in float64, and with
the bytes that were predicted, also in a dry run."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from meshwright.codegen.passes import compiled
from meshwright.forms.sync.dear import _Settling
from meshwright.forms.sync_findings import check
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.placed_kernels import put_in
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES
from meshwright.testing.spawn import run_ranks
from meshwright.tools.dry.run import dry_run
from tests.form_files.policies import policy
from tests.form_files.small import difference, graph, tracked
from tests.overlap_plans import planned
from tests.runtime.fused_graphs import graph_of

pytestmark = pytest.mark.filterwarnings("ignore:offload on cpu")
SETTINGS = {"bucket_bytes": 4096, "ahead": 2}


def late(plan: Plan, **changes: Any) -> Plan:
    sync = FormChoice(form="dear", settings=SETTINGS)
    stages = tuple(replace(stage, sync=sync, **changes) for stage in plan.stages)
    plan = replace(plan, stages=stages)
    check(plan)
    return plan


ZEROS: dict[str, dict[str, int]] = {
    "parameters": {"dp_shard": 2, "zero": 1}, "gradients": {"dp_replicate": 2}
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("overlap", ["gradients", "linear", "blocks"])
def test_overlap(overlap: str) -> None:
    found, sizes = [], ({"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 0})
    for more in sizes:
        traced, plan = planned("gpt2", 12, overlap, tp=2, num_microbatches=2, **more)
        found.append((late(plan), traced))
    for each in check_each_equal(CASES["gpt2"], found, steps=3):
        assert each.worst_of_both <= 1e-9, str(each)


def test_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    found = []
    for zero in (0, 1):
        traced, plan = planned("gpt2", 12, "none", tp=1, dp_shard=2, zero=zero, num_microbatches=2)
        found.append((late(plan, compile=True), traced))
    for each in check_each_equal(CASES["gpt2"], found, steps=3):
        assert each.worst_of_both <= 1e-9, str(each)


def test_fused_kernels() -> None:
    """By their references: what packs and steps buckets, too."""
    traced = graph_of("llama")
    problem = make_problem(traced, Cluster.local(2), precision="fp64")
    found = []
    for sizes in ZEROS.values():
        choice = uniform_choice(problem, num_microbatches=2, **sizes)
        plan = late(build_plan(problem, choice))
        plan = replace(plan, kernels=put_in(problem, plan))
        used = {f.kernel for f in plan.kernels if f.places}
        assert {"bucket_update", "swiglu"} <= used
        assert ("bucket" in used) == plan.stages[0].is_sharded
        found.append((plan, traced))
    for each in check_each_equal(CASES["llama"], found, steps=3):
        assert each.worst_of_both <= 1e-9, str(each)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("variant", "name"),
    [("parameters", "offload"), ("parameters", "recompute"), ("gradients", "selective"),
     ("gradients", "offload")],
)  # fmt: skip
def test_what_is_saved(variant: str, name: str) -> None:
    problem = make_problem(graph(), Cluster.local(2), precision="fp64", optimizer="adamw")
    choice = uniform_choice(problem, num_microbatches=2, **ZEROS[variant])
    saved = {b.pattern: policy(problem, b, name) for b in graph().blocks}
    plan = late(build_plan(problem, choice), saved={p: said for p, said in saved.items() if said})
    assert difference(plan) <= 1e-9


def test_replicas_with_unequal_shares() -> None:
    """Three replicas of four micro-batches' two samples and one."""
    problem = make_problem(graph(), Cluster.local(3), precision="fp64", optimizer="adamw")
    for sizes in ({"dp_shard": 3, "zero": 1}, {"dp_replicate": 3}):
        plan = late(build_plan(problem, uniform_choice(problem, num_microbatches=2, **sizes)))
        assert len(set(plan.stages[0].batch_shares)) > 1
        assert difference(plan) <= 1e-9


def test_stages_that_agree_in_ways_of_their_own() -> None:
    """One as ZeRO says, the other late."""
    problem = make_problem(graph(), Cluster.local(4), precision="fp64", optimizer="adamw")
    choice = uniform_choice(problem, pp=2, num_microbatches=2, dp_shard=2, zero=1)
    plan = late(build_plan(problem, choice))
    for stages in (
        (replace(plan.stages[0], sync=None), plan.stages[1]),
        (plan.stages[0], replace(plan.stages[1], sync=None)),
    ):
        assert difference(replace(plan, stages=stages)) <= 1e-9


SIZES = (1, 4096, 1 << 30)


def sized() -> list[Plan]:
    """Both variants with buckets of each size."""
    problem = make_problem(graph(), Cluster.local(2), precision="fp64", optimizer="adamw")
    found = []
    for variant, nbytes in product(ZEROS.values(), SIZES):
        plan = build_plan(problem, uniform_choice(problem, num_microbatches=2, **variant))
        sync = FormChoice(form="dear", settings={"bucket_bytes": nbytes, "ahead": 1})
        plan = replace(plan, stages=(replace(plan.stages[0], sync=sync),))
        found.append(replace(plan, predicted=predict_plan(problem, plan)))
    return found


def test_memory_is_what_is_tracked_and_what_a_dry_run_counts() -> None:
    plans, blocks = sized(), set(range(len(graph().blocks)))
    counted = run_ranks(2, tracked, plans)
    (dry,) = run_ranks(1, _dry, plans, init=False)
    for number, (plan, (peak, waited)) in enumerate(zip(plans, dry, strict=True)):
        assert plan.predicted
        most = max(rank[number] for rank in counted)
        assert most == pytest.approx(plan.predicted.stages[0].memory.tensor_bytes, rel=0.04)
        assert peak == pytest.approx(most, rel=0.02)
        # The dry run takes a second step, whose forward waits for what the first one has left.
        nbytes = SIZES[number % len(SIZES)]
        assert waited == {1: blocks, 1 << 30: {0}}.get(nbytes, waited)
        assert {0} <= waited <= blocks and (nbytes == 1 << 30 or len(waited) > 1)


def _dry(rank: int, store: Any, plans: list[Plan]) -> list[tuple[int, set[int]]]:
    """Of each, the most bytes, and the blocks before which something landed."""
    waited: set[int] = set()
    before = _Settling.before_forward

    def watched(sync: Any, call: int, ahead: Any) -> None:
        due = len(sync._late.due)
        before(sync, call, ahead)
        if len(sync._late.due) < due:
            waited.add(call)

    _Settling.before_forward = watched  # type: ignore[method-assign]
    found = []
    try:
        for plan in plans:
            waited.clear()
            done = dry_run(plan, graph())
            found.append((max(rank.memory.peak_bytes for rank in done.ranks), set(waited)))
    finally:
        _Settling.before_forward = before  # type: ignore[method-assign]
    return found
