"""What is said of a plan follows from its figures."""

import json
from dataclasses import replace

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import HostShare
from meshwright.ir.faults.mix import LLAMA_3
from meshwright.ir.plan import show
from meshwright.ir.plan.plan import FormChoice
from meshwright.ir.plan.predicted import Alternative
from meshwright.ir.plan.show import printed
from meshwright.tools.explain.binding import FULL, binding, levers
from meshwright.tools.explain.facts import Facts
from meshwright.tools.explain.saving import PlannedSaves
from meshwright.tools.explain.show import Explanation, as_data, render
from tests.tools.report.plans import GIB, many_ranks, piped

PLAN = piped(4, 2, 8, 6)


def said(plan, about):
    return next(s.text for s in binding(Facts.of(plan)) if s.about == about)


def with_memory(nbytes):
    """The first stage keeps so many activations more."""
    assert PLAN.predicted
    first, *others = PLAN.predicted.stages
    memory = replace(first.memory, activations_bytes=first.memory.activations_bytes + nbytes)
    stages = (replace(first, memory=memory), *others)
    return replace(PLAN, predicted=replace(PLAN.predicted, stages=stages))


def test_memory_binds_first_where_it_is_nearly_full():
    assert "(85%; 11.4 GiB to spare): activations 50 GiB" in said(PLAN, "memory")
    full = with_memory(10 * GIB)
    assert 76.6 / 78 > FULL
    assert binding(Facts.of(full))[0].about == "memory"
    assert said(full, "memory").startswith("memory binds: pipeline rank 0 holds 76.6 GiB of 78 GiB")
    assert "12.6 GiB too much" in said(with_memory(24 * GIB), "memory")


def test_micro_batches_in_flight_are_those_of_the_schedule():
    facts = Facts.of(PLAN)
    assert [facts.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    assert "4 micro-batches in flight, 12.5 GiB each" in said(PLAN, "memory")


def test_shares_of_the_step_sum_up():
    facts = Facts.of(PLAN)
    for own in facts.seconds:
        assert sum(own.values()) == pytest.approx(facts.step_s)
    assert said(PLAN, "computing").startswith("pipeline rank 3 sets the pace: of 315 ms, ")


def test_the_busiest_link_is_named():
    text = said(PLAN, "links")
    assert "nvlink: stage 0, gradients over dp, 4 GiB a rank, 20 ms (6.3% of the step)" in text


def test_what_the_next_forward_hides_is_told():
    assert PLAN.predicted
    first, *others = PLAN.predicted.stages
    predicted = replace(PLAN.predicted, stages=(replace(first, hidden_s=0.0315), *others))
    sync = FormChoice(form="dear", settings={"ahead": 4})
    late = replace(PLAN.stages[0], sync=sync)
    plan = replace(PLAN, stages=(late, *PLAN.stages[1:]), predicted=predicted)
    texts = [sentence.text for sentence in binding(Facts.of(plan))]
    told = "stage 0, dear ahead=4: the next step's forward hides 31.5 ms of gathers (10.0% of"
    assert any(text.startswith(told) for text in texts)
    assert not any("hides" in s.text and "forward" in s.text for s in binding(Facts.of(PLAN)))


def test_what_does_not_fit_would_fit_with_more_memory():
    assert PLAN.evidence
    better = Alternative(name="dp 8", step_s=0.25, peak_bytes=85 * GIB, why="does not fit")
    slower = Alternative(name="dp 2", step_s=0.5, peak_bytes=90 * GIB, why="does not fit")
    plan = replace(PLAN, evidence=replace(PLAN.evidence, alternatives=(better, slower)))
    found = levers(Facts.of(plan))
    assert "with 9 % more memory per device, dp 8 would fit: 250 ms, 20.6% less" in found
    assert not any("dp 2" in text for text in found)


def test_uneven_stages_are_told():
    assert PLAN.predicted and PLAN.predicted.detail
    detail = PLAN.predicted.detail
    ranks = list(detail.ranks)
    ranks[2] = replace(ranks[2], seconds={"forward": 0.1, "backward": 0.2, "wait": 0.015})
    uneven = replace(PLAN.predicted, detail=replace(detail, ranks=tuple(ranks)))
    plan = replace(PLAN, predicted=uneven)
    assert "pipeline rank 2 is busy for 300 ms" in said(plan, "waiting")
    assert any("stages of equal work" in text for text in levers(Facts.of(plan)))


def test_it_prints_and_equal_ranks_stand_together():
    text = printed(render(Explanation.of(many_ranks())), width=100)
    assert "What binds" in text and "dp 4 (1.5 s, 30 GiB): 20.0% slower" in text
    assert len(text.splitlines()) < 260


def test_a_plan_is_shown_by_the_same_memory():
    """What must fit of what a plan may use; not of the whole device, with the process."""
    assert PLAN.predicted
    first, *others = PLAN.predicted.stages
    first = replace(first, memory=replace(first.memory, process_bytes=3 * GIB // 2))
    shown = printed(
        show.render(replace(PLAN, predicted=replace(PLAN.predicted, stages=(first, *others))))
    )
    row = next(line for line in shown.splitlines() if line.split()[-1:] == ["78.00"])
    facts = Facts.of(PLAN)
    used = [facts.memory(rank).used_bytes / GIB for rank in range(4)]
    assert float(row.split()[-2]) == pytest.approx(used[0], abs=0.005)
    assert facts.room(0) == 78 * GIB and "A process takes 1.5 GiB beside that" in shown
    assert "1.50 " not in row


def test_data_has_the_same():
    found = Explanation.of(PLAN)
    data = json.loads(json.dumps(as_data(found, [])))
    assert data["ranks"][1]["memory"]["activations_bytes"] == 37.5 * GIB
    assert [s["text"] for s in data["binding"]] == [s.text for s in found.binding]


def test_a_plan_without_detail_is_explained_too():
    assert PLAN.predicted
    bare = replace(PLAN, predicted=replace(PLAN.predicted, detail=None))
    text = printed(render(Explanation.of(bare)), width=100)
    assert "pipeline rank" in text and "?" in text


def test_what_saving_costs_follows_from_the_fullest_rank():
    """Young's interval: sqrt(2 x held x between), of a copy of 30 GiB at 20 GB/s."""
    known, *rest = PLAN.predicted.stages
    memory = replace(known.memory, parameters_bytes=10 * GIB, optimizer_bytes=20 * GIB)
    predicted = replace(PLAN.predicted, stages=(replace(known, memory=memory), *rest))
    machines = Cluster.preset("a100-80", devices_per_node=8, num_nodes=PLAN.world_size // 8)
    device = replace(machines.device_types[0], host=HostShare(
        memory_bytes=GIB, link_bytes_per_s=20e9, update_bytes_per_s=1e9))  # fmt: skip
    machines = replace(machines, device_types=(device,))
    found = PlannedSaves.of(replace(PLAN, predicted=predicted), machines)
    assert found.copied_bytes == 30 * GIB and found.held_s == pytest.approx(30 * GIB / 20e9)
    assert found.between_s == pytest.approx(LLAMA_3.between_s(PLAN.world_size))
    assert found.interval_s == pytest.approx((2 * found.held_s * found.between_s) ** 0.5, rel=0.01)
    assert found.lost == pytest.approx((2 * found.held_s / found.between_s) ** 0.5, rel=0.01)
    assert "a save copies 30 GiB of the fullest rank to its host, 1.61 s" in found.text
