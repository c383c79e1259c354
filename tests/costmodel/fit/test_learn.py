"""A profile learns from a run: expected times come closer, what a run cannot tell stays."""

from dataclasses import replace

import pytest

from meshwright.costmodel.explain.compare import Expected, expected_of
from meshwright.costmodel.fit.learn import BlockUse, Learned, learn
from meshwright.costmodel.ops.overheads import CPU_FRAGMENTATION
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import Work
from meshwright.ir.profile.measured import Measured
from meshwright.ir.profile.profile import (
    BlockRecord,
    CollectiveRecord,
    GroupShape,
    MemoryRecord,
    OptimizerRecord,
    Profile,
)
from tests.costmodel.explain.runs import MACHINE, flat, predicted_plan, run_of
from tests.costmodel.fit.timings import block

PAIR = GroupShape(size=2, per_node=2)
USES = {0: [BlockUse("a", False), BlockUse("b", False)], 1: [BlockUse("b", True)] * 2}


PROFILE = Profile(machine=MACHINE, blocks={"a": block("a", 0.03), "b": block("b", 0.02)})


def expect(profile: Profile) -> Expected:
    """Sums of the blocks of `USES`, whose second stage recomputes."""
    a, b = profile.blocks["a"], profile.blocks["b"]
    seconds = {
        (0, Work.FORWARD): a.forward.median_s + b.forward.median_s,
        (0, Work.BACKWARD): a.backward.median_s + b.backward.median_s,
    }
    if b.no_grad_forward:
        seconds[1, Work.FORWARD] = 2 * b.no_grad_forward.median_s
        seconds[1, Work.BACKWARD] = 2 * (b.forward.median_s + b.backward.median_s)
    return replace(expected_of(predicted_plan()), actions=seconds)


def learned_from(
    plan: Plan, runs: tuple[Measured, ...], profile: Profile = PROFILE
) -> tuple[Learned, ...]:
    return learn(profile, plan, USES, expect(profile), runs, lambda stage, axis: (PAIR, 1))


def with_records(profile: Profile, found: tuple[Learned, ...]) -> Profile:
    blocks = {r.key: r for r in found if isinstance(r, BlockRecord)}
    return replace(profile, blocks={**profile.blocks, **blocks})


def of_kind(found: tuple[Learned, ...], kind: type) -> list[Learned]:
    return [record for record in found if isinstance(record, kind)]


def only_stage_0(plan: Plan) -> tuple[Measured, ...]:
    return run_of(plan, 0), run_of(plan, 1)


def test_actions_of_a_stage_are_expected_as_they_were_measured():
    plan = predicted_plan()
    found = with_records(PROFILE, learned_from(plan, only_stage_0(plan)))
    after = expect(found).actions
    # The slower replica took 0.0625 s and 0.1 s.
    assert after[0, Work.FORWARD] == pytest.approx(0.0625)
    assert after[0, Work.BACKWARD] == pytest.approx(0.1)
    forward = found.blocks["a"].forward
    assert forward.median_s == pytest.approx(0.03 * 1.25)
    assert forward.spread == pytest.approx(0.05 + 0.25 / 2)
    assert found.fingerprint != PROFILE.fingerprint


def test_learning_the_same_again_changes_nothing():
    plan = predicted_plan()
    once = with_records(PROFILE, learned_from(plan, only_stage_0(plan)))
    twice = with_records(once, learned_from(plan, only_stage_0(plan), once))
    assert twice.blocks["a"].forward.median_s == pytest.approx(once.blocks["a"].forward.median_s)


def test_a_block_of_two_stages_takes_the_middle_of_what_they_say():
    plan = predicted_plan()
    runs = (*only_stage_0(plan), replace(run_of(plan, 2), rank=2))
    found = {r.key: r for r in learned_from(plan, runs) if isinstance(r, BlockRecord)}
    # Stage 0 says 1.25 and 1.0; stage 1, which recomputes, says 0.05 / 0.02 and 0.08 / 0.12.
    assert found["b"].no_grad_forward.median_s == pytest.approx(0.01 * 2.5)
    both = (1.0 * 0.08 / 0.12) ** 0.5
    assert found["b"].backward.median_s == pytest.approx(0.04 * both)
    assert found["a"].backward.median_s == pytest.approx(0.06)


def test_a_stage_that_stands_in_collectives_tells_nothing_about_its_blocks():
    plan = predicted_plan()
    runs = tuple(
        replace(m, actions=tuple(replace(a, blocked=flat(0.03)) for a in m.actions))
        for m in only_stage_0(plan)
    )
    assert not of_kind(learned_from(plan, runs), BlockRecord)


def test_a_stage_with_a_block_that_the_profile_lacks_tells_nothing():
    plan = predicted_plan()
    lacks = replace(PROFILE, blocks={"b": PROFILE.blocks["b"]})
    found = learn(
        lacks, plan, USES, expect(PROFILE), only_stage_0(plan), lambda stage, axis: (PAIR, 1)
    )
    assert not of_kind(found, BlockRecord)


def test_collectives_that_were_waited_for_are_learned_from_the_last_rank():
    plan = predicted_plan()
    (found,) = [
        r for r in learned_from(plan, only_stage_0(plan)) if isinstance(r, CollectiveRecord)
    ]
    assert (found.operation, found.nbytes, found.group, found.groups_at_once) == (
        "all_reduce", 1000, PAIR, 1
    )  # fmt: skip
    assert found.time.median_s == pytest.approx(0.032) and not found.loaded


def test_collectives_that_hid_are_not_learned():
    plan = predicted_plan()
    runs = tuple(
        replace(m, collectives=tuple(replace(c, exposed_s=0.001) for c in m.collectives))
        for m in only_stage_0(plan)
    )
    assert not of_kind(learned_from(plan, runs), CollectiveRecord)


def test_optimizer_steps_are_learned_by_size():
    plan = predicted_plan()
    (found,) = of_kind(learned_from(plan, only_stage_0(plan)), OptimizerRecord)
    assert (found.optimizer, found.num_tensors, found.nbytes) == ("adam", 4, 100)
    assert found.time.median_s == pytest.approx((0.02 + 0.025) / 2)


def test_of_ranks_that_share_cores_a_step_is_learned_as_with_a_core_each():
    plan = predicted_plan()
    found = learn(
        PROFILE, plan, USES, expect(PROFILE), only_stage_0(plan), lambda stage, axis: (PAIR, 1), 2.0
    )
    (step,) = of_kind(found, OptimizerRecord)
    assert step.time.median_s == pytest.approx((0.02 + 0.025) / 2 / 2)


def test_memory_beyond_the_tensors_is_learned():
    """80 bytes come and go; the job adds 600 and 1200 where 500 were expected."""
    plan = predicted_plan()
    moving, gradients = of_kind(learned_from(plan, only_stage_0(plan)), MemoryRecord)
    assert moving.name == f"fragmentation {plan.model.fingerprint}"
    assert gradients.name == f"fragmentation_gradients {plan.model.fingerprint}"
    assert moving.value == pytest.approx(CPU_FRAGMENTATION + (600 + 1200 - 2 * 500) / 2 / 80)
    assert gradients.value == 0.0
    quiet = tuple(
        replace(m, memory=replace(m.memory, resident_peak_bytes=1)) for m in run_of_all(plan)
    )
    assert [r.value for r in of_kind(learned_from(plan, quiet), MemoryRecord)] == [0.0, 0.0]


def run_of_all(plan: Plan) -> tuple[Measured, ...]:
    return tuple(run_of(plan, rank) for rank in range(3))
