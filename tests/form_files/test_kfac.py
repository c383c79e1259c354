"""K-FAC with owners equals K-FAC in one process; what it costs is what is said."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.costmodel.estimate import estimate_all
from meshwright.forms.stepping import update_findings
from meshwright.forms.sync import given_up
from meshwright.forms.sync_findings import findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files import words
from tests.form_files.kfac_jobs import (
    CLIPPED,
    FREE,
    MOMENTUM,
    graph_of,
    image_batches,
    images,
    most_tracked,
    narrow,
    plain,
    plan_of,
    problem,
    resumed,
    train,
)

IMAGES = ("first.*", "second.*", "head.*")
SIZES: dict[str, tuple[int, Mapping[str, float], float, str, dict[str, Any]]] = {
    "two": (2, CLIPPED, 0.1, "layers", {}),
    "three, uneven": (3, CLIPPED, 0.1, "layers", {}),
    "copies of two": (4, CLIPPED, 0.1, "layers", {"dp_replicate": 2, "dp_shard": 2}),
    "two stages, halves of backwards": (4, FREE, 0.002, "layers", {
        "dp_shard": 2, "pp": 2, "schedule": "zero_bubble", "num_microbatches": 4}),
    "blocks that run again": (2, CLIPPED, 0.1, "layers", {"recompute": "full"}),
    "zero 0": (3, CLIPPED, 0.1, "layers", {"zero": 0, "dp_shard": 1, "dp_replicate": 3}),
    "zero 0, each all": (2, {**CLIPPED, "sends": "nothing"}, 0.1, "layers", {
        "zero": 0, "dp_shard": 1, "dp_replicate": 2}),
    "zero 0, cheapest": (2, {**CLIPPED, "sends": "cheapest", "message": 5e3, "value": 1.0}, 0.05,
        "images", {"zero": 0, "dp_shard": 1, "dp_replicate": 2, "patterns": IMAGES}),
    "zero 2": (3, CLIPPED, 0.1, "layers", {"zero": 2}),
    "zero 2, copies of two": (4, CLIPPED, 0.1, "layers", {
        "zero": 2, "dp_replicate": 2, "dp_shard": 2}),
    "eigenvectors": (2, {**CLIPPED, "base": "eigen"}, 0.1, "layers", {}),
    "eigenvectors, sent": (3, {**CLIPPED, "base": "eigen"}, 0.1, "layers", {
        "zero": 0, "dp_shard": 1, "dp_replicate": 3}),
    "uneven parts of the batch": (2, CLIPPED, 0.1, "layers", {"uneven": (3, 1)}),
    "uneven, zero 0": (2, CLIPPED, 0.1, "layers", {
        "uneven": (3, 1), "zero": 0, "dp_shard": 1, "dp_replicate": 2}),
    "courses": (2, {**CLIPPED, "damping": "0.003, 2: 0.03", "inv_update_steps": "1, 3: 2",
        "factor_update_steps": "1, 2: 2", "kl_clip": "0.001, 1: 0.01"}, 0.1, "layers", {}),
    "copies of parameters": (2, CLIPPED, 0.1, "layers", {"precision": "copies64"}),
    "copies of parameters, zero 0": (2, CLIPPED, 0.05, "images", {
        "precision": "copies64", "zero": 0, "dp_shard": 1, "dp_replicate": 2, "patterns": IMAGES}),
    "copies of parameters, zero 2": (2, CLIPPED, 0.1, "layers", {
        "precision": "copies64", "zero": 2}),
    "images": (2, CLIPPED, 0.05, "images", {"patterns": IMAGES}),
}  # fmt: skip


def errors(plan: Plan, case: str = "layers") -> list[Any]:
    return [*(f for f in findings(plan) if f.severity == "error"),
            *update_findings(plan, graph_of(case))]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", SIZES)
def test_it_equals_one_process(name: str) -> None:
    """With a running mean, inverses of every other step, and micro-batches."""
    ranks, settings, lr, case, sizes = SIZES[name]
    plan = plan_of(ranks, settings, case, **sizes)
    assert not [f for f in plan.verify(graph_of(case)) if f.severity == "error"]
    assert not errors(plan, case)
    losses, state, _ = run_ranks(ranks, train, plan, lr, case)[0]
    wanted, parameters = alone(plain, settings, lr, case)
    assert wanted[-1] < wanted[0], "it trains"
    assert losses == pytest.approx(wanted, rel=1e-10)
    for path, x in parameters.items():
        assert (state[path] - x).abs().max() <= 1e-10 * x.abs().max(), path


def test_narrow_copies_have_wide_factors() -> None:
    """Layers read bfloat16; sums, means and bases are float32, and training goes on as in that."""
    plan = plan_of(2, precision="bf16")
    losses, dtypes = run_ranks(2, narrow, plan, 0.1)[0]
    wide, *_ = run_ranks(2, train, plan_of(2), 0.1)[0]
    assert dtypes == {torch.float32}
    assert losses == pytest.approx(wide, rel=0.05) and losses != wide


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """With means and inverses as they were: the fourth step makes no new inverses."""
    for losses, later in run_ranks(2, resumed, plan_of(2), 0.1, str(tmp_path)):
        assert later == losses[3:]


def test_much_damping_leaves_the_gradient() -> None:
    """Divided by the damping, as the ratio of traces falls out."""
    settings = {**FREE, "damping": 1e6}
    plan = plan_of(2, settings, "images", IMAGES)
    losses, *_ = run_ranks(2, train, plan, 0.05 * 1e6, "images")[0]
    wanted = alone(_sgd, 0.05)
    assert losses == pytest.approx(wanted, rel=2e-3) and losses != pytest.approx(wanted, rel=1e-9)
    assert wanted[-1] < 0.98 * wanted[0]


def _sgd(lr: float) -> list[float]:
    trained = images()
    sgd = torch.optim.SGD(trained.parameters(), lr=lr, momentum=MOMENTUM)
    losses = []
    for batch in image_batches():
        sgd.zero_grad()
        loss = trained(*batch)
        loss.backward()
        sgd.step()
        losses.append(float(loss.detach()))
    return losses


def test_memory_and_messages_are_what_is_said() -> None:
    """Upper triangles of all factors, with two counts each, go once a step; each rank has sums of
    all, and its own layers' means and inverses."""
    for ranks in (2, 4):
        _memory_is_right(plan_of(ranks))
        norms = 3 * 2 * 8 * ranks * -(-12 // ranks)
        for *_, sent in run_ranks(ranks, train, plan_of(ranks), 0.1):
            assert sum(sent) == FACTORS + WHOLE + norms


PAIRS = [(13, 48), (49, 12)] * 3 + [(13, 3)]
FACTORS = 8 * sum(c * (c + 1) // 2 + o * (o + 1) // 2 + 2 for c, o in PAIRS)
WHOLE = 8 * sum(p * q for p, q in PAIRS)
NORMS = 8 * 3 * 2 * 12
BASES = 8 * sum(n * (n + 1) // 2 for pair in PAIRS for n in pair)
VECTORS = 8 * sum(n * n + n for pair in PAIRS for n in pair)


def _memory_is_right(plan: Plan) -> None:
    asked = problem(plan.world_size)
    predicted = estimate_all(graph_of("layers"), asked.cluster, plan, asked.tables).prediction
    most = max(run_ranks(plan.world_size, most_tracked, plan))
    assert predicted.stages[0].memory.tensor_bytes == pytest.approx(most, rel=0.01)


@pytest.mark.parametrize(
    ("said", "bases"),
    [({}, BASES), ({"base": "eigen"}, VECTORS), ({"sends": "nothing"}, 0)],
    ids=["inverses", "eigenvectors", "nothing"],
)
def test_all_ranks_precondition_with_what_one_sends(said: dict[str, Any], bases: int) -> None:
    """KAISA's fraction 1: gradients and factors are summed by all, bases go, and no gradient."""
    plan = plan_of(2, {**CLIPPED, "inv_update_steps": 1, **said}, **ALL_RANKS)
    _memory_is_right(plan)
    for *_, sent in run_ranks(2, train, plan, 0.1):
        assert sum(sent) == FACTORS + WHOLE + NORMS + bases


ALL_RANKS = {"zero": 0, "dp_shard": 1, "dp_replicate": 2}


def test_between_both_each_copy_sends_bases_of_its_own_layers() -> None:
    """KAISA's fraction one half, of four ranks."""
    plan = plan_of(4, {**CLIPPED, "inv_update_steps": 1}, dp_shard=2, dp_replicate=2)
    _memory_is_right(plan)
    found = run_ranks(4, train, plan, 0.1)
    norms = 3 * 2 * 8 * 12
    sent = [sum(one) - FACTORS - WHOLE - norms for *_, one in found]
    assert sent[0] == sent[2] and sent[1] == sent[3] and sent[0] + sent[1] == BASES


def test_it_is_taken_only_where_the_user_says_so() -> None:
    plan = plan_of(2)
    (said,) = given_up(plan)
    assert said.startswith("kfac: gradients of linear layers")
    pin = "parameters layers.*.up.* sync=kfac,zero=1"
    asked = make_problem(
        graph_of("layers"), problem(2).cluster, precision="fp64", constraints=(pin,)
    )
    assert any(str(c) == "parameters layers.*.up.* sync=kfac,zero=1" for c in asked.constraints)
    with pytest.raises(PlanError, match="goes with zero=0 or zero=1 or zero=2"):
        make_problem(graph_of("layers"), problem(2).cluster, constraints=(pin[:-1] + "3",))


def _stage(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, stages=tuple(replace(s, **changes) for s in plan.stages))


def test_what_cannot_be_is_refused() -> None:
    plan = plan_of(2)
    norms = plan_of(2, patterns=("layers.0.norm.*", *LAYERS_OF_ONE))
    assert not errors(norms), "what belongs to no layer is stepped as it is"
    wrong = {
        "compile": (_stage(plan, compile=True), "no compile"),
        "whole layers, and tp 2": (
            plan_of(4, dp_shard=2, tp=2), "tp 1"),
        "kl_clip limits": (plan_of(4, dp_shard=2, pp=2), "kl_clip 0"),
        "among replicas, and there is one": (plan_of(1, dp_shard=1, zero=0), "dp_shard 2"),
        "damping must be": (plan_of(2, {"damping": 0.0}), "damping 1e-12"),
    }  # fmt: skip
    for rule, (bad, near) in wrong.items():
        found = errors(bad)
        assert any(rule in f.message and near in f.nearest for f in found), (rule, found)


LAYERS_OF_ONE = ("layers.0.up.*", "layers.0.down.*")


def test_other_readers_of_a_matrix_are_refused() -> None:
    traced = trace(words.model(), words.batch(0))
    made = make_problem(traced, Cluster.local(2), precision="fp64", optimizer="sgd")
    plan = build_plan(made, uniform_choice(made, dp_shard=2, zero=1), predict=False)
    own = ParameterChoice(zero=1, sync=FormChoice(form="kfac"))
    plan = _stage(plan, by_parameter={"words.weight": own})
    (found,) = update_findings(plan, traced)
    assert "something else reads words.weight" in found.message
    assert "leave words.weight out" in found.nearest
