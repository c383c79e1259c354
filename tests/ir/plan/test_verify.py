"""Each broken rule is found, named, and comes with the nearest legal value."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.plan.plan import InputSpec, Plan, ScheduleTable
from meshwright.ir.plan.verify import check, verify
from tests.ir.plans import CLUSTER, graph, plan, prediction


def with_stage(index: int, **changes: Any) -> Plan:
    stages = list(plan().stages)
    stages[index] = replace(stages[index], **changes)
    return plan(stages=tuple(stages))


def with_inputs(*inputs: InputSpec) -> Plan:
    return plan(model=replace(plan().model, inputs=inputs))


def with_prelude(**changes: Any) -> Plan:
    found = plan().layouts
    return plan(layouts=tuple(replace(x, **changes) if x.pattern == PRELUDE else x for x in found))


def test_a_sound_plan_breaks_no_rule() -> None:
    assert verify(plan(), graph(), CLUSTER) == ()
    assert plan().verify() == ()


@pytest.mark.parametrize(
    "broken,rule,says",
    [
        (plan(num_microbatches=3), "batch", "8 is not a multiple of 3 micro-batches; nearest: 2"),
        (plan(global_batch_size=0), "batch", "global_batch_size is 0; it must be between 1"),
        (with_inputs(), "model", "model.inputs is empty"),
        (with_inputs(InputSpec(name="x", shape=(), dtype="int64")), "model", "is []; dim 0 of"),
        (plan(num_microbatches=4), "schedule", "nearest: num_microbatches 2"),
        (plan(schedule=ScheduleTable(name="x", rows=("0F0 0B0", "1F0 1X0"))), "schedule", "1X0"),
        (plan(schedule=ScheduleTable(name="x", rows=("0B0 0F0",))), "schedule", "deadlocks"),
        (plan(schedule=ScheduleTable(name="x", rows=("0F0 0B0",))), "schedule", "runs 1 stages"),
        (with_stage(0, mesh={"dp": 3}), "mesh", "no mesh axis 'dp'; nearest: dp_"),
        (with_stage(0, mesh={"dp_replicate": 2}), "mesh", "given 3; nearest: dp_replicate 3"),
        (with_stage(0, mesh={"pp": 3}), "mesh", "axis pp is 3"),
        (with_stage(0, mesh={"tp": 1, "dp_shard": 3}), "mesh", "row-major over dp_shard, tp"),
        (with_stage(0, mesh={"tp_row": 3}), "layouts", "has tp_row 3, its layout 'h.* tp1'"),
        (with_stage(0, devices=(0, 1, 1)), "devices", "appears twice"),
        (with_stage(1, devices=(2,)), "devices", "share devices [2]"),
        (with_stage(1, devices=(4,)), "devices", "ranks [3] have none"),
        (with_stage(0, batch_shares=(2, 2)), "batch_shares", "2 batch shares for a dp axis of 3"),
        (with_stage(0, batch_shares=(2, 2, 0)), "batch_shares", "nearest: shares [2, 1, 1]"),
        (with_stage(0, batch_shares=(2, 2, 2)), "batch_shares", "sum to 6, a micro-batch has 4"),
        (with_stage(0, prefetch=-1), "prefetch", "must not be negative; nearest: prefetch 0"),
        (with_stage(0, layouts={"h.*": "h.* tp2"}), "layouts", "nearest: h.* tp1"),
        (with_stage(0, layouts={"h.*": "head tp1"}), "layouts", "is for head"),
        (with_stage(0, layouts={"h.*": "h.* tp1"}), "layouts", "names no layout for (prelude)"),
        (with_prelude(ops={"/mask": {"dp": "R -> R"}}), "layouts", "(prelude) has no op '/mask'"),
        (with_prelude(inputs=({},)), "layouts", "1 inputs, the block has 0"),
        (with_stage(1, first="h.9"), "blocks", "no block 'h.9'; nearest: h."),
        (with_stage(1, first="h.1"), "blocks", "nearest: first h.2"),
        (with_stage(1, last="h.2"), "blocks", "no stage runs head"),
        (with_stage(0, recompute={"h.**": "full"}), "recompute", "nearest: h.*"),
        (with_stage(0, saved={"h.**": {}}), "saved", "no block or pattern; nearest: h.*"),
        (with_stage(0, saved={"h.*": {"/rel": "offload"}}), "saved", "of h.*; nearest: /relu"),
        (with_stage(0, saved={"h.*": {"*": "offload", "*<": "keep"}}), "saved",
         "different things of '/relu<'"),
        (with_stage(0, saved={"h.*": {"*": "offload"}}, recompute={"h.1": "full"}), "saved",
         "h.1 is recomputed whole"),
        (plan(predicted=prediction(1)), "predicted", "1 stages for 2"),
        (plan(predicted=prediction(2, 10**12)), "memory", "needs 931.32 GiB"),
        (plan(model=replace(plan().model, fingerprint="zzz")), "model", "the plan is for Toy"),
        (plan(cluster=replace(plan().cluster, fingerprint="zzz")), "cluster", "given a100"),
    ],
)  # fmt: skip
def test_broken_rules(broken: Plan, rule: str, says: str) -> None:
    found = verify(broken, graph(), CLUSTER)
    assert any(f.rule == rule and says in str(f) for f in found), [str(f) for f in found]


def test_check_raises_all_errors_and_no_warnings() -> None:
    check(with_stage(0, zero=2), graph(), CLUSTER)
    with pytest.raises(PlanError, match=r"(?s)batch:.*blocks:"):
        check(replace(with_stage(1, last="h.2"), num_microbatches=3), graph())
