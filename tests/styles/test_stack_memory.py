"""What a software stack's memory holds beside what a plan says."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.memory.memory_group import MemoryGroup
from meshwright.costmodel.memory.stack_bytes import SteppedGroup, late_bytes, stack_bytes
from meshwright.forms.sync import exchange
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Kind
from meshwright.ir.plan.plan import model_mesh
from meshwright.ir.plan.predicted import RankMemory
from meshwright.ir.stack_memory import LateFrees, StackMemory
from meshwright.ir.styles import style
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from tests.styles.small_llama import HIDDEN, WIDTH, WORDS, small_llama

CLUSTER = Cluster.preset("h100-sxm", num_nodes=1)
TRAINED = 1 << 20


def memory(*told: Any, **layout: Any) -> RankMemory:
    """Of the fullest rank of `memories`."""
    return max(memories(*told, **layout), key=lambda found: found.total_bytes)


def memories(
    monkeypatch: pytest.MonkeyPatch,
    habits: StackMemory,
    *pins: str,
    stepped: str = "",
    precision: str = "bf16",
    keeps_narrow: bool = False,
    **layout: Any,
) -> list[RankMemory]:
    """Of each stage, as a stack with these habits runs a layout."""
    problem = make_problem(
        small_llama(precision), CLUSTER, constraints=("sync=zero", *pins), precision=precision
    )
    plan = build_plan(problem, uniform_choice(problem, **layout), predict=False)
    with monkeypatch.context() as patch:
        stack = replace(style(""), memory=habits, stepped=stepped, keeps_narrow=keeps_narrow)
        patch.setattr("meshwright.costmodel.cost_cache.known_style", lambda name: stack)
        tables = CostTables(small_llama(precision), CLUSTER, plan.precision)
        stages = estimate_all(small_llama(precision), CLUSTER, plan, tables).prediction.stages
    return [stage.memory for stage in stages]


NONE = StackMemory()


def test_what_is_reserved_beyond_is_a_share_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = memory(monkeypatch, NONE, dp_shard=8, zero=1)
    more = memory(monkeypatch, StackMemory(reserved=0.1), dp_shard=8, zero=1)
    allocated = plain.total_bytes - plain.process_bytes - plain.fragmentation_bytes
    assert more.total_bytes - plain.total_bytes == pytest.approx(0.1 * allocated, abs=2)


def test_what_is_cast_for_products_is_kept_as_it_was_cast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a layer of this model the products read two norms and what the gate makes, which nobody
    else keeps; attention keeps what it has made, too, so that the cast comes on top."""
    told = {"precision": "fp8-tensorwise", "dp_replicate": 8, "zero": 0}
    plain = memory(monkeypatch, NONE, **told)
    narrow = memory(monkeypatch, NONE, keeps_narrow=True, **told)
    tokens, layers = 32 * 64 // 8, 4
    halved, added = 2 * WIDTH + HIDDEN, WIDTH
    saved = plain.activations_bytes - narrow.activations_bytes
    assert saved == layers * tokens * (halved - added)
    wide = {**told, "precision": "bf16"}
    assert memory(monkeypatch, NONE, keeps_narrow=True, **wide) == memory(monkeypatch, NONE, **wide)


def test_what_is_stepped_in_half_the_bytes_has_half_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = {"dp_shard": 8, "zero": 3}
    wide = memory(monkeypatch, NONE, **layout)
    narrow = memory(monkeypatch, NONE, stepped="bfloat16", **layout)
    assert narrow.optimizer_bytes == pytest.approx(wide.optimizer_bytes / 2, rel=1e-6)
    tensors = small_llama().tensors.values()
    buffers = sum(x.nbytes for x in tensors if x.kind is Kind.BUFFER)  # stay as they are
    trained = sum(x.numel for x in tensors if x.kind is Kind.PARAMETER)
    wide_bytes, narrow_bytes = (x.parameters_bytes - buffers for x in (wide, narrow))
    assert narrow_bytes == pytest.approx(wide_bytes / 2, rel=1e-6)
    assert narrow.total_bytes < wide.total_bytes
    whole = {"dp_replicate": 8, "zero": 0}  # of what is stepped in bfloat16 there is no copy in it
    wide, narrow = (memory(monkeypatch, NONE, stepped=x, **whole) for x in ("", "bfloat16"))
    copied, single = (x.parameters_bytes - buffers for x in (wide, narrow))
    assert (copied, single) == (6 * trained, 2 * trained)
    with pytest.raises(PlanError, match="half"):
        replace(style(""), stepped="half")


def test_gradients_that_stay_are_all_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = {"dp_shard": 8, "zero": 1, "num_microbatches": 4}
    plain = memory(monkeypatch, NONE, **layout)
    held = memory(monkeypatch, StackMemory(holds_gradients=True), **layout)
    # At its peak the backward has made at least those of the head, in half precision.
    head = WORDS * WIDTH * 2
    assert head <= held.total_bytes - plain.total_bytes < plain.gradients_bytes / 2


def test_steps_take_what_ranks_step() -> None:
    whole, part = (
        SteppedGroup(exchange("zero0", 4), TRAINED, 1 << 16, 4, 4),
        SteppedGroup(exchange("zero1", 4), TRAINED, 1 << 16, 4, 4),
    )
    flat = StackMemory(stepping=2.0, stepping_flat=0.5, norms=1.0, stepping_bytes=100)
    assert stack_bytes(flat, [whole]).stepping == 2.5 * TRAINED + (1 << 16) + 100
    assert stack_bytes(flat, [part]).stepping == 2.5 * TRAINED / 4 + (1 << 16) + 100
    sharded = SteppedGroup(exchange("zero3", 4), TRAINED, 1 << 16, 4, 4)
    assert stack_bytes(flat, [sharded]).stepping == 2.0 * TRAINED / 4 + (1 << 16) + 100
    apart = stack_bytes(replace(flat, stepping_apart=True), [part])
    assert (apart.stepping, apart.apart) == (0, stack_bytes(flat, [part]).stepping)


def test_buckets_and_gathers_are_of_the_forms_that_have_them() -> None:
    habits = StackMemory(bucket_copies=0.5, gathers=(1.0, 0.5), gathers_flat=0.25)
    for form, ranks, always, stepping, apart in (
        ("zero0", 4, 0.5, 0.0, 0.0), ("zero0", 1, 0.0, 0.0, 0.0),
        ("zero1", 4, 0.0, 1.125, 0.25), ("zero3", 4, 0.0, 0.0, 0.0),
    ):  # fmt: skip
        group = SteppedGroup(exchange(form, ranks), TRAINED, 1, ranks, ranks)
        found = stack_bytes(habits, [group])
        assert found == (always * TRAINED, stepping * TRAINED, apart * TRAINED, 0)


def test_what_is_reserved_apart_is_given_back_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = CLUSTER.device_types[0].memory_bytes
    plain = memory(monkeypatch, NONE, dp_shard=8, zero=1)
    apart = StackMemory(stepping=16.0, stepping_bytes=2**40, stepping_apart=True)
    assert memory(monkeypatch, apart, dp_shard=8, zero=1).total_bytes == room
    needed = StackMemory(stepping_bytes=2**40)
    assert memory(monkeypatch, needed, dp_shard=8, zero=1).total_bytes > room > (plain.total_bytes)


@dataclass(frozen=True)
class Sending:
    forward_s: float = 1.0
    behind_s: float = 0.5
    scattered_bytes: int = 100


FREES = LateFrees(ahead_forward=10.0, ahead_backward=5.0)


def test_values_are_late_by_what_the_cpu_is_ahead() -> None:
    few, many = [Sending()] * 4, [Sending()] * 40
    assert late_bytes(None, few, 1, 8) == 0 == late_bytes(FREES, [], 1, 8)
    assert late_bytes(FREES, few, 1, 1) == 100 * 4 * 0.5
    assert late_bytes(FREES, few, 1, 8) == 100 * (4 + 3)  # and the queue's rest of the backward
    assert late_bytes(FREES, many, 1, 8) == 100 * 10 == late_bytes(FREES, many, 4, 8)
    assert late_bytes(FREES, few, 2, 8) == 100 * 8
    level = [Sending(behind_s=0.0)] * 4
    assert late_bytes(FREES, level, 2, 8) == 0 and late_bytes(FREES, level, 3, 8) == 100 * 4
    in_step = replace(FREES, in_step=True)
    assert late_bytes(in_step, level, 1, 8) == 0 < late_bytes(in_step, few, 1, 8)


def test_collectives_in_place_have_no_flat_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lean = StackMemory(in_place=True)
    for level, saves in ((1, 0), (2, 0), (3, WORDS * WIDTH)):
        plain = memory(monkeypatch, NONE, dp_shard=8, zero=level)
        found = memory(monkeypatch, lean, dp_shard=8, zero=level)
        assert plain.total_bytes - found.total_bytes >= saves
        assert found.communication_bytes < max(1, plain.communication_bytes)


def test_parameters_that_are_gathered_in_place_come_out_of_nothing() -> None:
    group = MemoryGroup(exchange("zero3", 4), (), (100, 60), (100, 60), (40, 40))
    assert [*group.arriving(1, lambda nbytes: nbytes // 4, in_place=True)] == [100, 60]
    assert [*group.arriving(1, lambda nbytes: nbytes // 4, in_place=False)] == [200, 120]


def test_shares_are_checked() -> None:
    with pytest.raises(PlanError, match="from 0 to 16"):
        StackMemory(stepping=17.0)
    with pytest.raises(PlanError, match="from 0 to 16"):
        StackMemory(reserved=-0.1)
    with pytest.raises(PlanError, match="no size below 0"):
        StackMemory(loss_hole_bytes=-1)


def test_a_packed_tensor_lives_as_long_as_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = memory(monkeypatch, NONE, num_microbatches=8)
    packed = memory(monkeypatch, StackMemory(keeps_packed=True), num_microbatches=8)
    # Keys and values of 4 samples of 64 tokens, in each of the four layers.
    assert packed.activations_bytes - plain.activations_bytes == 4 * 2 * (4 * 64 * WIDTH * 2)


def test_a_loss_whose_classes_ranks_share_takes_what_the_stack_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack = StackMemory(split_loss_bytes=14)
    assert memory(monkeypatch, stack, dp_shard=8) == memory(monkeypatch, NONE, dp_shard=8)
    layout: dict[str, Any] = {"model": model_mesh({"tp": 8}), "variant": "halves"}
    plain = memory(monkeypatch, NONE, **layout)
    more = memory(monkeypatch, stack, **layout)
    logits = 32 * 64 * WORDS // 8
    # Sums of its gradients come when it has run.
    assert more.workspace_bytes + more.gradients_bytes == 14 * logits > plain.workspace_bytes


def test_reduced_gradients_stay_reserved_in_a_pool_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = StackMemory(gradients_apart=True)
    trained = sum(t.numel for t in small_llama().parameters if t.requires_grad) * 4
    plain = memory(monkeypatch, NONE, dp_shard=8, zero=3)
    more = memory(monkeypatch, apart, dp_shard=8, zero=3)
    assert more.total_bytes - plain.total_bytes == pytest.approx(trained / 8, rel=0.01)
    # Of several micro-batches those of the one before are there anyway; of whole ones none is made.
    for layout in ({"zero": 3, "num_microbatches": 2}, {"zero": 1}):
        both = [memory(monkeypatch, x, dp_shard=8, **layout) for x in (NONE, apart)]
        assert both[0].total_bytes == both[1].total_bytes


def test_flat_buckets_are_made_where_nobody_else_has_copies_too() -> None:
    habits = StackMemory(flat_alone_bytes=3 << 18)
    for ranks, nbytes, found in ((1, TRAINED, 3 << 18), (1, 1 << 10, 1 << 10), (4, TRAINED, 0)):
        group = SteppedGroup(exchange("zero1", ranks), nbytes, 1, ranks, ranks)
        assert stack_bytes(habits, [group]).apart == found


def test_what_a_losss_forward_frees_stays_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    hole = StackMemory(loss_hole_bytes=2, kept_output_bytes=2)
    plain, more = (memory(monkeypatch, x, dp_shard=8, zero=1) for x in (NONE, hole))
    assert more.total_bytes - plain.total_bytes == 2 * (4 * 64 * WORDS)
    assert more.activations_bytes == plain.activations_bytes


def test_the_last_stage_keeps_logits_of_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    layout: dict[str, Any] = {"pp": 2, "dp_shard": 4, "zero": 1, "num_microbatches": 4}
    keeps = StackMemory(loss_hole_bytes=2, kept_output_bytes=2)
    (first, plain), (same, more) = (memories(monkeypatch, x, **layout) for x in (NONE, keeps))
    assert first == same
    # Two samples a micro-batch; what stays is no hole.
    assert more.activations_bytes - plain.activations_bytes == 4 * 2 * (2 * 64 * WORDS)
    assert more.total_bytes - plain.total_bytes == 4 * 2 * (2 * 64 * WORDS)


def test_what_is_no_layer_may_stay_gathered() -> None:
    sizes = (100, 10, 10, 80)
    alone = MemoryGroup(exchange("zero3", 4), (), sizes, sizes, (40, 4, 4, 40))
    rest = replace(alone, rest=frozenset({0, 3}))
    assert [*alone.gathered(1, 1)] == [110, 20, 90, 80]
    assert [*rest.gathered(1, 1)] == [190, 200, 190, 180]
    assert [*rest.gathered(-1, 0)] == [180, 190, 190, 180]
    assert [*rest.arriving(1, lambda n: 0, in_place=False)] == [0, 200, 200, 0]
    assert [*alone.arriving(1, lambda n: 0, in_place=False)] == [200, 20, 20, 160]
