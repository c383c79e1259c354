"""Memory over time against curves counted by hand, and the peak against the curve."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.memory.memory_group import MemoryGroup
from meshwright.costmodel.memory.memory_timeline import end, held_stages, over_time, peak
from meshwright.costmodel.memory.stage_memory import BlockMemory, Bytes, StageMemory
from meshwright.costmodel.simulate.compiled_schedule import table_of
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.stage.buckets import Bucket
from meshwright.forms.sync import exchange
from meshwright.ir.plan.schedule import parse_schedule
from meshwright.ir.stack_memory import StackMemory
from meshwright.planner.problem.schedule_tools import make_schedule

BLOCK = BlockMemory(saved=10, forward=12, workspace=5, one_op=5, halving=5, second=5)
COST = StageTimes(forward_s=1.0, backward_s=2.0, backward_input_s=1.0, backward_weight_s=1.0)


def stage(
    blocks: int = 2, *, zero: int = 0, shard: int = 1, reduces: bool = False, **more: int
) -> StageMemory:
    group = MemoryGroup(
        exchange(f"zero{zero}", 2 if reduces else 1),
        tuple(Bucket(i, 100, 1) for i in reversed(range(blocks))),
        (100,) * blocks, (100,) * blocks, (60,) * blocks, shards=shard,
    )  # fmt: skip
    return StageMemory(
        groups=(group,), prefetch=more.get("prefetch", 0),
        parameters=0, optimizer=0, temporary=more.get("temporary", 0), summed=more.get("summed", 0),
        border=more.get("border", 0), entry=more.get("entry", 0), shared=more.get("shared", 0),
        border_back=more.get("border_back", more.get("border", 0)),
        entry_back=more.get("entry_back", more.get("entry", 0)),
        blocks=(replace(BLOCK, halved=more.get("halved", 0)),) * blocks,
    )  # fmt: skip


def totals(rows: tuple[str, ...], *stages: StageMemory) -> list[int]:
    """Of the first pipeline rank: most within each action, and what is left after it."""
    timeline = simulate(parse_schedule("x", rows), [COST] * len(stages))
    return [point.held.total for point in over_time(timeline, 0, stages)]


def test_one_micro_batch() -> None:
    """Two blocks save 10 each and make gradients of 100 each."""
    # Forward: the second block on top of the first; backward: the last block's gradients and
    # workspace on all that is saved, then the first one's on half of it.
    assert totals(("0F0 0B0",), stage()) == [10 + 12, 20, 10 + 5 + 200, 200]


def test_gradients_are_added_to_those_that_are_there() -> None:
    """The second micro-batch: one new gradient of 60 while the op that makes it has half of 5."""
    found = totals(("0F0 0B0 0F1 0B1",), stage())
    assert found[4:] == [200 + 22, 220, 200 + 20 + 62, 200]


def test_flat_gradients_are_always_there() -> None:
    found = totals(("0F0 0F1 0B0 0B1",), stage(reduces=True))
    assert found == [222, 220, 242, 240, 200 + 40 + 62, 220, 200 + 20 + 62, 200]


def test_what_is_sent_is_kept_until_the_gradient_is_back() -> None:
    """4 bytes that the forward sends, while the next one runs; room for as large a gradient, from
    the action before its backward on, in which it is a part of what its block works on."""
    stages = stage(1, border=4), stage(1, entry=4)
    found = totals(("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), *stages)
    first = [12, 10, 10 + 4 + 4 + 12, 20 + 4 + 4]
    assert found == [*first, 20 + 4 + 105, 10 + 4 + 100, 100 + 10 + 62, 100]


def test_what_is_sent_stays_where_no_gradient_comes_back() -> None:
    """Nothing tells that the peer has it: both messages are there to the end, and no room for an
    answer. Backwards do not wait."""
    stages = stage(1, border=4, border_back=0), stage(1, entry=4, entry_back=0)
    schedule = parse_schedule("x", ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    timeline = simulate(schedule, [replace(COST, is_silent=True), COST])
    first, second = ([p.held.total for p in over_time(timeline, r, stages)] for r in range(2))
    assert first[:4] == [12, 10, 10 + 4 + 12, 20 + 4]
    assert first[4:] == [20 + 8 + 105, 10 + 8 + 100, 100 + 10 + 8 + 62, 100 + 8]
    # The second one has room for what comes, and sends nothing back.
    assert second == [4 + 12, 4 + 10, 22, 20, 20 + 105, 10 + 100, 100 + 10 + 62, 100]


def test_gradients_that_come_back_may_be_less_than_what_was_sent() -> None:
    stages = stage(1, border=4, border_back=1), stage(1, entry=4, entry_back=1)
    found = totals(("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), *stages)
    first = [12, 10, 10 + 5 + 12, 20 + 5]
    assert found == [*first, 20 + 1 + 105, 10 + 1 + 100, 100 + 10 + 62, 100]


def test_stacks_may_keep_what_they_sent_until_its_backward() -> None:
    keeps = replace(stage(1, border=4), habits=StackMemory(keeps_sent=True))
    found = totals(("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), keeps, stage(1, entry=4))
    assert found[:4] == [12, 14, 14 + 4 + 12, 28 + 4]
    assert found[4:] == [28 + 4 + 105, 14 + 4 + 100, 14 + 100 + 62, 100]


def test_what_a_rank_hands_to_itself_is_there_until_it_is_taken() -> None:
    """4 bytes of each of two forwards, and of two backwards."""
    stages = stage(1, border=4), stage(1, entry=4)
    found = totals(("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1",), *stages)
    ahead = [12, 10, 4 + 22, 4 + 20, 4 + 20 + 12, 4 + 30, 30 + 12, 40]
    back = [40 + 105, 30 + 100, 4 + 30 + 162, 4 + 20 + 100, 4 + 20 + 205, 4 + 10 + 200, 272, 200]
    assert found == ahead + back


def test_what_two_stages_of_a_rank_have_saved_is_there_once() -> None:
    """4 bytes that count as the first stage's, while that has its micro-batch: the second stage's
    backward may be over later."""
    stages = stage(1, border=0), stage(1, shared=4)
    usual = totals(("0F0 1F0 1B0 0B0",), *stages)
    assert usual == [12, 10, 22, 20, 20 + 105, 10 + 100, 10 + 100 + 105, 200]
    late = totals(("0F0 1F0 1I0 0I0 0W0 1W0",), *stages)
    assert late[4:] == [25, 20, 25, 20, 20 + 4 + 105, 10 + 4 + 100, 10 + 4 + 100 + 105, 200]
    timeline = simulate(parse_schedule("x", ("0F0 1F0 1I0 0I0 0W0 1W0",)), [COST] * 2)
    assert peak(timeline.table, 0, stages).total == 219


def test_level_1_packs_gradients_flat() -> None:
    """Packing the first bucket: its whole gradient, the flat copy, and this rank's half of it."""
    made = stage(1, zero=1, shard=2)
    assert totals(("0F0 0B0",), made)[2] == 100 + 100 + 50
    # Then the parameters are gathered: the flat tensor, and this rank's part of it.
    assert end([made]) == Bytes(gradients=50, communication=150)


def test_level_2_sums_what_has_come() -> None:
    made = stage(2, zero=2, shard=2, reduces=True)
    # The second bucket is packed while the first one is on its way.
    assert totals(("0F0 0B0",), made)[2:] == [100 + 150 + 150, 100]


def test_on_gloo_a_rank_holds_what_it_receives() -> None:
    """A reduce-scatter there has the others' parts beside the flat tensor until they are added."""
    nccl = stage(3, zero=3, shard=2, reduces=True)
    nccl = replace(nccl, blocks=(replace(BLOCK, workspace=305),) * 3)
    gloo = replace(nccl, receives=True)
    # The first block runs while two buckets are on their way.
    held = [totals(("0F0 0B0",), one)[2] for one in (nccl, gloo)]
    assert held == [100 + 100 + 305 + 10 + 2 * 150, 100 + 100 + 305 + 10 + 2 * 200]
    one = replace(stage(1, zero=1, shard=2), receives=True)
    assert totals(("0F0 0B0",), one)[2] == 100 + 200


def test_level_1_has_two_buckets_on_their_way() -> None:
    """Of four, the parts of those before them have come."""
    made = stage(4, zero=1, shard=2)
    assert totals(("0F0 0B0",), made)[2] == 100 + 2 * 50 + 2 * 150


def test_level_3_has_one_block_whole() -> None:
    made = stage(3, zero=3, shard=2, reduces=True)
    found = totals(("0F0 0B0",), made)
    assert found[0] == 20 + 200  # the third block is unpacked from its flat tensor
    # The first block runs: its parameters and gradients, and two buckets are on their way.
    assert found[2] == 100 + 100 + 5 + 10 + 2 * 150
    ahead = stage(3, zero=3, shard=2, reduces=True, prefetch=1)
    # The second block runs while the third one's are gathered; or the third one is unpacked.
    assert totals(("0F0 0B0",), ahead)[0] == max(10 + 12 + 200, 20 + 200)
    # Nothing is ahead of the first block; before it the second one runs with the first ahead.
    assert [whole for _, whole in ahead._gathered(-1)] == [100, 200, 200]


def test_halves_hand_gradients_over() -> None:
    """3 bytes per block from I to W, where they go with what the block saved; workspace in both,
    gradients in W."""
    late = (replace(BLOCK, halved=3), replace(BLOCK, halved=3, halving=9))
    assert totals(("0F0 0I0 0W0",), replace(stage(), blocks=late))[2] == 20 + 3 + 9
    made = replace(stage(), blocks=(replace(BLOCK, halved=3),) * 2)
    found = totals(("0F0 0I0 0W0",), made)
    assert found[1:] == [20, 20 + 6 + 5, 26, 26 - 13 + 5 + 200, 200]


def test_first_halves_may_free_more_than_they_leave() -> None:
    """Of 20 bytes of a micro-batch 12 are there between the halves; the last block frees its own
    4 first. The second one's gradients come beside the first one's."""
    made = stage(halved=-4)
    found = totals(("0F0 0F1 0I0 0I1 0W0 0W1",), made)
    assert found[3:8] == [40, 40 - 8 + 5 + 4, 32, 32 - 8 + 5 + 4, 24]
    assert found[8:] == [24 - 6 + 5 + 200, 12 + 200, 12 + 200 + 62, 200]
    table = table_of(parse_schedule("x", ("0F0 0F1 0I0 0I1 0W0 0W1",)))
    assert peak(table, 0, [made]).total == max(found)


def test_parameters_are_there_in_first_halves() -> None:
    """Of ZeRO 3: as they come out of a flat tensor, and while their block runs."""
    made = stage(zero=3, shard=2, reduces=True)
    assert totals(("0F0 0I0 0W0",), made)[2] == 20 + 200
    wide = replace(made, blocks=(replace(BLOCK, halving=105),) * 2)
    assert totals(("0F0 0I0 0W0",), wide)[2] == 20 + 100 + 105


def test_the_optimizer_may_need_more() -> None:
    """Temporaries of RMSprop, say, after the activations have gone."""
    made = stage(1, temporary=500)
    table = table_of(parse_schedule("x", ("0F0 0B0",)))
    assert peak(table, 0, [made]) == Bytes(gradients=100, workspace=500)


def test_gradients_summed_over_a_model_axis_are_copied_flat() -> None:
    """At the end, beside the 200 of gradients; shards of them where ZeRO has cut them."""
    table = table_of(parse_schedule("x", ("0F0 0B0",)))
    assert peak(table, 0, [stage(summed=90)]).communication == 90
    assert peak(table, 0, [stage(summed=90)]).total == 200 + 90
    assert peak(table, 0, [stage(summed=90, temporary=100)]).total == 200 + 100
    cut = peak(table, 0, [stage(zero=3, shard=2, reduces=True, summed=900)])
    assert cut == Bytes(100, 0, 900, 0)


def test_offloaded_bytes_are_away() -> None:
    """8 of 10 saved bytes leave after the forward (1 s each) and come back for the backward."""
    cost = StageTimes(forward_s=1.0, backward_s=1.0, offload_s=1.0, offload_bytes=8, saved_bytes=10)
    rows = ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",)
    timeline = simulate(parse_schedule("x", rows), [cost])
    # The first backward's bytes are asked for when the forward before it begins.
    assert timeline.ran.gone == {0: 2.0, 1: 3.0, 2: 4.0, 3: 5.0}
    assert timeline.ran.back == {4: 3.0, 5: 4.0, 6: 5.0, 7: 6.0}
    made = stage(1)
    curve = [p.held.activations for p in over_time(timeline, 0, [made]) if p.time_s < 4.0]
    # While the fourth forward runs, those of the second are away, and the first's are back.
    assert max(curve) == 40 - 8
    never = simulate(parse_schedule("x", rows), [StageTimes(forward_s=1.0, backward_s=1.0)])
    assert max(p.held.activations for p in over_time(never, 0, [made])) == 40


def _keeping(made: StageMemory) -> tuple[BlockMemory, ...]:
    """Blocks that keep 30 more of a micro-batch than these."""
    return tuple(replace(b, saved=b.saved + 30, forward=b.forward + 30) for b in made.blocks)


def test_what_is_made_again_is_held_until_the_backward() -> None:
    """Two blocks keep 10 each, or 40 where all is kept; forwards need 2 more, backwards 5."""
    made = stage()
    made = replace(made, kept=replace(made, blocks=_keeping(made)))
    # In flight: 20; then 50 and 80 while it is made again; backward from 80, gradients on top.
    assert totals(("0F0 0R0 0B0",), made) == [22, 20, 82, 80, 80 - 40 + 5 + 200, 200]
    assert totals(("0K0 0F1 0B0 0B1",), made)[:6] == [82, 80, 102, 100, 100 - 40 + 205, 20 + 200]
    assert totals(("0F0 0R0 0I0 0W0",), made)[4:] == [85, 80, 80 - 40 + 5 + 200, 200]


STAGES = st.builds(
    stage,
    st.integers(1, 3),
    zero=st.sampled_from([0, 1, 2, 3]),
    shard=st.just(2),
    reduces=st.booleans(),
    border=st.integers(0, 9),
    entry=st.integers(0, 9),
    temporary=st.integers(0, 300),
    halved=st.integers(-9, 3),
)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from([
        "gpipe", "one_f_one_b", "interleaved", "zero_bubble", "pre_recompute_1f1b",
        "full_critical_path_1f1b",
    ]),
    st.integers(1, 3), st.integers(1, 3),
)  # fmt: skip
def test_the_peak_is_that_of_the_curve(
    data: st.DataObject, name: str, ranks: int, rounds: int
) -> None:
    """The peak is found among distinct moments, without times."""
    size = 2 * ranks if name == "interleaved" else ranks
    schedule = make_schedule(name, size, rounds * ranks, ranks)
    stages = data.draw(st.lists(STAGES, min_size=size, max_size=size))
    stages = [replace(made, kept=replace(made, blocks=_keeping(made))) for made in stages]
    timeline = simulate(schedule, [COST] * size)
    for rank in range(ranks):
        own = [stages[s] for s in held_stages(timeline.table, rank)]
        most = max(point.held.total for point in over_time(timeline, rank, stages))
        assert peak(timeline.table, rank, stages).total == max(most, end(own).total)
        assert over_time(timeline, rank, stages)[-1].held.activations == 0
