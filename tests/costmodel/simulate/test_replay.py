"""What a plan keeps of its prediction: the step again from the plan alone, and what it sends."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest

from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.explain.detail import KIND_NAMES
from meshwright.costmodel.explain.utilisation import Utilisation, step_flops
from meshwright.costmodel.simulate.replay import replay
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import in_detail
from meshwright.planner.problem.problem import Problem
from tests.planner.problems import cluster, mlp, problem

PLANS = {
    "plain": {},
    "replicas": {"dp_replicate": 4, "num_microbatches": 2},
    "sharded": {"dp_shard": 4, "zero": 3, "num_microbatches": 2},
    "tensor": {"tp": 2, "dp_shard": 2, "zero": 1},
    "pipeline": {"pp": 4, "num_microbatches": 4},
    "gpipe": {"pp": 2, "dp_replicate": 2, "schedule": "gpipe", "num_microbatches": 2},
    "zero bubble": {"pp": 4, "schedule": "zero_bubble", "num_microbatches": 4},
    "interleaved": {"pp": 2, "dp_shard": 2, "zero": 2, "schedule": "interleaved",
                    "num_microbatches": 2},
    "recomputed": {"pp": 2, "tp": 2, "num_microbatches": 2, "recompute": "full"},
}  # fmt: skip


@cache
def asked() -> Problem:
    return problem(mlp(8), cluster(4))


@cache
def kept(name: str) -> Plan:
    """As it comes from a file."""
    choice = uniform_choice(asked(), **PLANS[name])  # type: ignore[arg-type]
    plan = in_detail(asked(), build_plan(asked(), choice))
    return plan_io.loads(plan_io.dumps(plan))


@pytest.mark.parametrize("name", PLANS)
def test_the_step_again_takes_as_long(name):
    plan, given = kept(name), asked()
    found = estimate_all(given.graph, given.cluster, plan, given.tables)
    again = replay(plan)
    assert again.timeline.step_s == pytest.approx(found.stepped.timeline.step_s, rel=1e-4)
    for own, other in zip(again.timeline.entries, found.stepped.timeline.entries, strict=True):
        assert [e.action for e in own] == [e.action for e in other]
        starts = [e.start_s for e in other]
        assert [e.start_s for e in own] == pytest.approx(starts, rel=1e-3, abs=1e-3 * starts[-1])


@pytest.mark.parametrize("name", PLANS)
def test_seconds_of_each_rank_sum_to_the_step(name):
    plan = kept(name)
    assert plan.predicted and plan.predicted.detail
    for rank in plan.predicted.detail.ranks:
        assert sum(rank.seconds.values()) == pytest.approx(plan.predicted.step_s, rel=1e-4)


@pytest.mark.parametrize("name", PLANS)
def test_memory_over_time_peaks_where_the_prediction_says(name):
    plan = kept(name)
    assert plan.predicted
    again = replay(plan)
    for rank in range(len(plan.schedule.rows)):
        stage = again.timeline.table.owners.index(rank)
        memory = plan.predicted.stages[stage].memory
        point = max(again.memory(rank), key=lambda point: point.held.total)
        held = point.held.total + memory.parameters_bytes + memory.optimizer_bytes
        # The curve ends with the schedule; the optimizer's step may hold a little more.
        assert held <= memory.tensor_bytes
        assert held >= 0.8 * (memory.tensor_bytes - memory.inputs_bytes)


@pytest.mark.parametrize("name", ["tensor", "recomputed", "pipeline"])
def test_collectives_of_all_actions_are_what_the_rank_spends_in_blocks(name):
    plan = kept(name)
    assert plan.predicted and plan.predicted.detail
    detail, timeline = plan.predicted.detail, replay(plan).timeline
    for rank, seconds in enumerate(detail.ranks):
        found = 0.0
        for position in timeline.table.rows[rank]:
            item = timeline.table.items[position]
            found += detail.stage(item.stage).collectives.get(KIND_NAMES[item.kind], 0.0)
        assert found == pytest.approx(seconds.seconds.get("tensor", 0.0), rel=1e-3)
        assert (found > 0) == (name != "pipeline")


def test_a_plan_says_how_much_of_its_devices_it_uses():
    plan, given = kept("tensor"), asked()
    use = Utilisation.kept(plan)
    assert use and use.flops == pytest.approx(step_flops(given.graph), rel=1e-5)
    assert use.peak_flops == pytest.approx(4 * given.cluster.device(0).peak("float32"), rel=1e-5)
    assert use.mfu(2.0) == pytest.approx(use.flops / 2.0 / use.peak_flops)
    assert plan.predicted
    assert Utilisation.kept(replace(plan, predicted=replace(plan.predicted, detail=None))) is None


def sent(name: str, **what: str) -> int:
    """Bytes of the first stage's rank."""
    predicted = kept(name).predicted
    assert predicted and predicted.detail
    rows = predicted.detail.stage(0).traffic
    return sum(r.nbytes for r in rows if all(getattr(r, k) == v for k, v in what.items()))


def trained_bytes() -> int:
    return sum(t.nbytes for t in asked().graph.parameters if t.requires_grad)


def test_replicas_send_their_gradients_once():
    assert sent("replicas") == pytest.approx(2 * 3 / 4 * trained_bytes(), rel=1e-6)
    assert sent("replicas", purpose="gradients", axis="dp", link="wire") == sent("replicas")


def test_zero_3_gathers_twice_and_scatters_once_per_microbatch():
    assert sent("sharded", purpose="parameters") == pytest.approx(
        2 * 2 * 3 / 4 * trained_bytes(), rel=1e-6
    )
    assert sent("sharded", purpose="gradients") == pytest.approx(
        2 * 3 / 4 * trained_bytes(), rel=1e-6
    )


def test_a_pipeline_sends_its_border_for_every_microbatch():
    graph = asked().graph
    border = graph.tensors[graph.blocks[1].outputs[0]]
    assert prod(border.shape)
    # Over a whole step each sample crosses once.
    assert sent("pipeline", purpose="stages", axis="pp") == border.nbytes


def test_recomputed_blocks_communicate_again():
    plan = build_plan(asked(), uniform_choice(asked(), pp=2, tp=2, num_microbatches=2))
    detail = in_detail(asked(), plan).predicted.detail  # type: ignore[union-attr]
    once = sum(r.nbytes for r in detail.stage(0).traffic if r.purpose == "tensors")
    assert once < sent("recomputed", purpose="tensors") <= 2 * once
