"""Synchronisation: buckets as the runtime makes them, and closed forms of what hides."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.codegen.lower.program import Param
from meshwright.costmodel.comm.comm import Level, Levels, collective_time
from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F, I, W
from meshwright.costmodel.stage.buckets import BUCKET_BYTES, Bucket, LocalParam, Owned, buckets
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.program import Do, play
from meshwright.costmodel.stage.replica_lines import ReplicaLines
from meshwright.costmodel.stage.sync import BlockTimes, Sync
from meshwright.forms import flat
from meshwright.forms.copied import copied
from meshwright.forms.running import Slot
from meshwright.forms.sync import exchange
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Kind
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.precision import precision
from tests.costmodel.stage.small_stage import BLOCK, LINK, NO_OVERHEADS, TWO


def sync(
    blocks: int = 3,
    *,
    zero: int = 0,
    prefetch: int = 0,
    nbytes: int = 0,
    blocks_of: tuple[BlockTimes, ...] = (),
    dp: Levels = TWO,
    copies: Levels = (),
    gathered: tuple[int, ...] = (),
    **more: object,
) -> Sync:
    """Equal blocks with parameters of `nbytes`, one bucket each, over two ranks."""
    count = len(blocks_of) or blocks
    replicas, sizes = (2 if more.get("buckets", True) else 1), gathered or (nbytes,) * count
    own = tuple(Bucket(i, nbytes, 1) for i in reversed(range(count)))
    own = more.pop("buckets", own)  # type: ignore[assignment]
    shards = 2 if zero else 1
    lines = ReplicaLines(dp=dp, shard=TWO if zero else (), copies=copies, ranks=2, shards=shards)
    made = Sync(
        groups=(FormGroup(exchange(f"zero{zero}", replicas), own, sizes, lines=lines),),
        prefetch=prefetch,
        blocks=blocks_of or (BLOCK,) * blocks,
        prelude_s=0.0,
        overheads=NO_OVERHEADS,
    )  # fmt: skip
    return replace(made, **more)  # type: ignore[arg-type]


def seconds(made: Sync, kind: int) -> float:
    return play(made.programs()[kind].steps, overlap=made.overlap)[0]


HELD = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=1, max_size=2).map(lambda x: tuple(sorted(set(x)))),
        st.builds(
            LocalParam,
            st.integers(1, 12).map(lambda n: n * BUCKET_BYTES // 4),
            st.sampled_from(["float32", "float32", "bfloat16"]),
            st.just(True),
        ),
    ),
    max_size=12,
)
"""Blocks that read a parameter, and the parameter."""


@settings(max_examples=60, deadline=None)
@given(HELD, st.sampled_from([0, BUCKET_BYTES]))
def test_buckets_are_those_of_the_runtime(
    held: list[tuple[tuple[int, ...], LocalParam]], limit: int
) -> None:
    param = Param("", "", Kind.PARAMETER, (), "float32", True, (), (), ())
    slots = []
    for users, on_rank in held:
        dtype = getattr(torch, on_rank.dtype)
        numel = on_rank.nbytes // dtype.itemsize
        whole = nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))
        slots.append(Slot(param, whole, users))
    expected = [
        (min(s.owner for s in found), sum(s.whole.nbytes for s in found), len(found))
        for found in flat.buckets(slots, limit)
    ]
    owned = [Owned.of([p for users, p in held if users[0] == block]) for block in range(6)]
    assert [(b.owner, b.nbytes, b.tensors) for b in buckets(owned, limit)] == expected
    assert flat.BUCKET_BYTES == BUCKET_BYTES


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_blocks_that_are_one_object_do_the_same(zero: int, prefetch: int) -> None:
    """Equal blocks of a stage share an object: what it does is worked out once."""
    block = replace(BLOCK, tensor_forward_s=0.5, overhead_s=0.1)
    other = replace(block, again_s=2.0)
    shared = (block, other, block, block, other)
    apart = tuple(replace(b) for b in shared)
    one, many = (
        sync(zero=zero, prefetch=prefetch, nbytes=1000, blocks_of=blocks).programs()
        for blocks in (shared, apart)
    )
    for kind in one:
        assert one[kind].steps == many[kind].steps
    waits = [s.job for s in one[F].steps if s.do is Do.WAIT]
    assert waits == (list(range(5)) if zero == 3 else [])


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_copies_and_sums_of_half_the_bytes_take_half_the_time(zero: int) -> None:
    """Bytes of units are those of what is stepped; messages are of what is sent."""
    wide = sync(zero=zero, nbytes=8000)
    group = wide.groups[0]
    half = replace(wide, groups=(
        replace(group, exchange=copied(group.exchange, precision("bf16-sums"))),
    ))  # fmt: skip
    for what, actions in (("gradients", (B + LAST,)), ("gather", () if zero == 3 else (None,))):
        for kind in actions:
            whole_s, half_s = (
                sum(s.seconds for s in steps if s.do in (Do.START, Do.TALK) and s.what == what)
                for steps in (
                    made.publish() if kind is None else made.programs()[kind].steps
                    for made in (wide, half)
                )
            )
            assert whole_s > 0.0 and half_s == pytest.approx(whole_s / 2)


def test_only_the_last_backward_reduces_below_level_2() -> None:
    for zero in (0, 1):
        programs = sync(zero=zero, nbytes=8).programs()
        assert not programs[B].uses_channel and not programs[W].uses_channel
        starts = [s for s in programs[B + LAST].steps if s.do is Do.START]
        assert len(starts) == len([s for s in programs[W + LAST].steps if s.do is Do.START]) == 3
    for zero in (2, 3):
        assert sync(zero=zero, nbytes=8).programs()[B].uses_channel
    assert not any(p.uses_channel for p in sync(nbytes=8, buckets=()).programs().values())


def test_buckets_hide_behind_the_blocks_before_them() -> None:
    """Three blocks of 4 s backward; an all-reduce takes 3 s."""
    made = sync(nbytes=300_000)
    one = collective_time(Primitive.ALL_REDUCE, 300_000, TWO)
    assert one == pytest.approx(3.0)
    took, left = play(made.programs()[B + LAST].steps)
    assert (took, left[0]) == (12.0, pytest.approx(one))
    slow = sync(nbytes=600_000)
    took, left = play(slow.programs()[B + LAST].steps)
    assert (took, left[0]) == (12.0, pytest.approx(3 * 6 - 8))


@pytest.mark.parametrize("nbytes", [100_000, 400_000, 1_000_000])
def test_prefetch(nbytes: int) -> None:
    """All exposed without; with one block ahead g1 + sum max(c, g) + c."""
    gather = collective_time(Primitive.ALL_GATHER, nbytes, TWO)
    plain, ahead = (sync(4, zero=3, prefetch=n, nbytes=nbytes) for n in (0, 1))
    assert seconds(plain, F) == pytest.approx(4 * (gather + 2))
    assert seconds(ahead, F) == pytest.approx(gather + 3 * max(2, gather) + 2)
    assert seconds(replace(ahead, prefetch=9), F) <= seconds(ahead, F) + 1e-9


def test_level_3_gathers_in_both_halves() -> None:
    made = sync(2, zero=3, nbytes=100_000)
    gather = collective_time(Primitive.ALL_GATHER, 100_000, TWO)
    assert seconds(made, I) == pytest.approx(2 * (gather + 2))
    # The second gather waits for the first scatter.
    scatter = collective_time(Primitive.REDUCE_SCATTER, 100_000, TWO)
    assert seconds(made, W) == pytest.approx(2 * (gather + 2) + scatter)


def test_gathers_that_go_beside_scatters_do_not_wait_for_them() -> None:
    made = replace(sync(2, zero=3, nbytes=100_000), side_by_side=True)
    gather = collective_time(Primitive.ALL_GATHER, 100_000, TWO)
    assert seconds(made, W) == pytest.approx(2 * (gather + 2))


def test_long_messages_slow_computing_down_more() -> None:
    """A bucket of 4 MB and one of 1 kB: nearly every byte goes with the long one."""
    link = replace(LINK, beside=((1e3, 1.1, 1.0), (1e6, 1.4, 2.0)))
    assert link.slowdowns(1e6) == link.slowdowns(1e9) == (1.4, 2.0)
    assert link.slowdowns(1.0) == link.slowdowns(1e3) == (1.1, 1.0)
    assert link.slowdowns(10**4.5) == pytest.approx((1.25, 1.5))
    made = sync(1, dp=(Level(2, link),), nbytes=1_000)
    assert (made.overlap.compute, made.overlap.channel) == (1.1, 1.0)
    (group,) = made.groups
    more = (*group.buckets, group.buckets[0]._replace(nbytes=4_000_000))
    long = replace(made, groups=(replace(group, buckets=more),))
    assert (long.overlap.compute, long.overlap.channel) == (1.4, 2.0)


@pytest.mark.parametrize("beside", [((1e6, 1.1, 1.0), (1e3, 1.4, 2.0)), ((1e3, 0.9, 1.0),)])
def test_what_was_measured_beside_must_make_sense(
    beside: tuple[tuple[float, float, float], ...],
) -> None:
    with pytest.raises(PlanError, match="beside"):
        replace(LINK, beside=beside)


def test_two_scatters_at_most_are_under_way() -> None:
    """Level 2, blocks of 4 s, scatters of 10 s: the third starts when the first is over."""
    made = sync(3, zero=2, nbytes=2_000_000)
    scatter = collective_time(Primitive.REDUCE_SCATTER, 2_000_000, TWO)
    assert scatter == pytest.approx(10.0)
    # 4 s, then the first scatter until 14 while two more blocks take 8 s.
    assert seconds(made, B) == pytest.approx(14.0)


def test_a_split_backward_has_its_own_price() -> None:
    block = replace(BLOCK, split_s=0.5, again_s=1.0, accumulate_s=0.25)
    made = sync(blocks_of=(block, block), buckets=())
    whole, halves = seconds(made, B), seconds(made, I) + seconds(made, W)
    assert halves == pytest.approx(whole + 2 * 0.5)
    assert whole == pytest.approx(2 * 5.0)
    # There is nothing to add to once per step.
    assert seconds(made, B + LAST) == pytest.approx(whole - 2 * 0.25)
    # Flat buckets of zeros are always added to; levels 2 and 3 have whole gradients for a moment.
    assert seconds(sync(blocks_of=(block, block)), B + LAST) == pytest.approx(whole)
    assert seconds(sync(zero=2, blocks_of=(block, block)), B) == pytest.approx(whole - 2 * 0.25)


def test_tensor_collectives_are_exposed_or_hidden() -> None:
    block = replace(BLOCK, tensor_forward_s=1.5, tensor_backward_s=5.0)
    exposed = sync(blocks_of=(block, block), buckets=())
    hidden = replace(exposed, tensor_overlapped=True)
    assert seconds(exposed, F) == pytest.approx(2 * 3.5)
    assert seconds(hidden, F) == pytest.approx(2 * 2.0)
    assert seconds(exposed, B) == pytest.approx(2 * 9.0)
    assert seconds(hidden, B) == pytest.approx(2 * (5.0 + 2.0))


def test_overlap_slows_both_down() -> None:
    link = replace(LINK, overlap_compute_slowdown=1.5, overlap_comm_slowdown=2.0)
    made = sync(2, nbytes=200_000, dp=(Level(2, link),))
    # After 4 s an all-reduce of 2 s takes 4 s, in which 8/3 of the other 4 s are done.
    took, left = play(made.programs()[B + LAST].steps, overlap=made.overlap)
    assert took == pytest.approx(4 + 4 + (4 - 4 / 1.5))
    assert left[0] == pytest.approx(2.0)


def test_the_end_of_a_step_by_level() -> None:
    """Level 1 gathers its parameters, levels 2 too, 3 and 0 do not."""
    gather = collective_time(Primitive.ALL_GATHER, 100_000, TWO)
    for zero, expected in ((0, 0.0), (1, 3 * gather), (2, 3 * gather), (3, 0.0)):
        made = sync(3, zero=zero, nbytes=100_000)
        assert play(tuple(made.publish()))[0] == pytest.approx(expected, abs=1e-6)
    replicas = sync(3, zero=1, nbytes=100_000, copies=TWO)
    part = collective_time(Primitive.ALL_REDUCE, 50_000, TWO)
    assert play(tuple(replicas.finish(())))[0] == pytest.approx(3 * part)
    tp = collective_time(Primitive.ALL_REDUCE, 70_000, TWO)
    assert play(tuple(sync(nbytes=8).finish([("tp", (70_000,), TWO)])))[0] == pytest.approx(
        tp, abs=1e-6
    )
