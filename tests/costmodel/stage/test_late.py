"""Gathers under the next step's first forward: limit cases, bounds, and buckets as they run."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from meshwright.costmodel.stage.buckets import Bucket, LocalParam, Owned, forward_buckets
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.late import Late, late_of
from meshwright.costmodel.stage.program import play
from meshwright.costmodel.stage.replica_lines import ReplicaLines
from meshwright.costmodel.stage.sync import Sync
from meshwright.forms.running import Slot
from meshwright.forms.sync import exchange, exchange_of
from meshwright.forms.sync.dear import in_forward_order
from meshwright.ir.plan.plan import FormChoice, Stage
from tests.costmodel.stage.small_stage import BLOCK, NO_OVERHEADS, TWO

BLOCKS = 4


def dear(nbytes: int, *, zero: int = 1, ahead: int = 1, forward_s: float = 1.0) -> Sync:
    """Equal blocks with a bucket of `nbytes` each, over two ranks; computing takes `forward_s`."""
    choice = FormChoice(form="dear", settings={"ahead": ahead, "bucket_bytes": 1})
    stage = Stage(
        first="a", last="b", mesh={"dp_shard": 2}, devices=(0, 1), batch_shares=(1, 1), zero=zero,
        sync=choice,
    )  # fmt: skip
    block = replace(BLOCK, forward_s=forward_s, tensor_forward_s=0.0)
    own = tuple(Bucket(i, nbytes, 1) for i in reversed(range(BLOCKS)))
    lines = ReplicaLines(dp=TWO, shard=TWO, ranks=2, shards=2)
    return Sync(
        groups=(FormGroup(exchange_of(stage), own, (0,) * BLOCKS, lines=lines),), prefetch=0,
        blocks=(block,) * BLOCKS, prelude_s=0.0,
        overheads=NO_OVERHEADS,
    )  # fmt: skip


def gather_s(sync: Sync) -> float:
    (group,) = sync.groups
    (send,) = group.exchange.late
    return sync.collective_s(send.primitive, group.buckets[0].nbytes, group.lines.levels(send.axis))


@pytest.mark.parametrize("zero", [0, 1])
def test_a_long_forward_hides_all_gathers_but_the_first(zero: int) -> None:
    sync = dear(1 << 20, zero=zero, forward_s=1e3)
    late = late_of(sync)
    assert late.exposed_s == pytest.approx(gather_s(sync))
    assert late.hidden_s == pytest.approx((BLOCKS - 1) * gather_s(sync))


def test_a_forward_of_no_length_hides_nothing() -> None:
    sync = dear(1 << 20, forward_s=0.0)
    assert late_of(sync).exposed_s == pytest.approx(BLOCKS * gather_s(sync))
    assert late_of(sync).hidden_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("forward_s", [0.0, 1.0, 10.0, 30.0, 100.0])
def test_running_further_ahead_never_hurts_and_parts_make_the_whole(forward_s: float) -> None:
    found = [late_of(dear(1 << 22, ahead=n, forward_s=forward_s)) for n in (1, 2, 3, 4, 9)]
    exposed = [late.exposed_s for late in found]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(exposed))
    whole = BLOCKS * gather_s(dear(1 << 22))
    assert all(late.exposed_s + late.hidden_s == pytest.approx(whole) for late in found)


def test_forms_without_late_messages_hide_nothing() -> None:
    late = dear(1 << 20)
    zero1 = replace(late, groups=(replace(late.groups[0], exchange=exchange("zero1", 2)),))
    assert late_of(zero1) == Late()
    # What ZeRO-1 sends after its step, DeAR sends under the forward: the same bytes and copies.
    late = late_of(dear(1 << 20))
    assert play(tuple(zero1.publish()))[0] == pytest.approx(late.exposed_s + late.hidden_s)
    assert not list(dear(1 << 20).publish())


@pytest.mark.parametrize("limit", [1, 4096, 10_000, 1 << 30])
def test_buckets_are_those_of_the_runtime(limit: int) -> None:
    """Of blocks with two dtypes and tensors of all sizes; to the byte, by first reader."""
    sizes = {0: (torch.float32, (700, 12, 5000)), 1: (torch.bfloat16, (900, 3)),
             3: (torch.float32, (512, 8, 2048, 64))}  # fmt: skip
    slots = [
        Slot(None, torch.nn.Parameter(torch.zeros(n, dtype=dtype)), (call,))  # type: ignore[arg-type]
        for call, (dtype, own) in sizes.items()
        for n in own
    ]
    owned = [
        Owned.of([LocalParam(n * dtype.itemsize, str(dtype), True) for n in own])
        for call in range(4)
        for dtype, own in [sizes.get(call, (torch.float32, ()))]
    ]
    runs = [
        (bucket[0].owner, sum(slot.whole.nbytes for slot in bucket), len(bucket))
        for bucket in in_forward_order(slots, limit)
    ]
    assert [tuple(bucket) for bucket in reversed(forward_buckets(owned, limit))] == runs
