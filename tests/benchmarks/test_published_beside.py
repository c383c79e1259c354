"""Work that runs beside reductions and gathers is slowed by them."""

from dataclasses import replace

import pytest

from benchmarks.published.recipes import recipe_of
from benchmarks.published.sites import ground_of
from benchmarks.published.stages import stages_of
from benchmarks.published.sync import extra_of
from benchmarks.published.systems import system_of
from meshwright.costmodel.comm.comm import collective_time
from meshwright.ir.layout.conversions import Primitive
from tests.benchmarks.published_rows import LLAMA_8B, internevo, llama

SLOWER = 1.2


def with_links(ground, slower):
    """Links that slow work by so much."""
    changed = {
        name: tuple(
            replace(level, link=replace(level.link, overlap_compute_slowdown=slower))
            for level in getattr(ground, name)
        )
        for name in ("dp", "shard")
    }
    return replace(ground, **changed)


def extras(one, passes=1.0):
    """What slower links add, the groups, and a stage whose passes take so many times as long."""
    recipe, ground = recipe_of(one, system_of(one)), ground_of(one)
    stage = stages_of(one, recipe, ground)[0]
    cost = replace(stage.cost, forward_s=passes * stage.cost.forward_s,
                   backward_s=passes * stage.cost.backward_s)  # fmt: skip
    layer = replace(stage.layer, forward_s=passes * stage.layer.forward_s,
                    backward_s=passes * stage.layer.backward_s)  # fmt: skip
    stage = replace(stage, cost=cost, layer=layer)
    free, slow = (extra_of(one, recipe, with_links(ground, s), stage) for s in (1.0, SLOWER))
    more = (
        slow.first_forward_s - free.first_forward_s,
        slow.per_forward_s - free.per_forward_s,
        slow.per_backward_s - free.per_backward_s,
        slow.after_s - free.after_s,
    )
    return more, ground, stage


@pytest.mark.parametrize("passes", [1.0, 0.1])
def test_the_last_backward_runs_beside_the_buckets(passes):
    more, ground, stage = extras(internevo(8, 8), passes)
    # Buckets of 512 MiB: the head fills one, three layers two, and the table goes with what the
    # last layers leave.
    buckets = 1 + 21 + 1
    seconds = buckets * collective_time(
        Primitive.ALL_REDUCE, 2 * stage.parameters / buckets, ground.dp
    )
    # As much of them as the backward lasts.
    hidden = min(seconds, stage.cost.backward)
    assert (hidden == seconds) == (passes == 1.0)
    assert more == pytest.approx((0, 0, 0, (SLOWER - 1) * hidden))


@pytest.mark.parametrize("passes", [10.0, 0.1])
def test_each_layer_runs_beside_the_next_ones_gather_and_the_last_ones_reduction(passes):
    more, ground, stage = extras(llama(), passes)
    each = (stage.parameters - 2 * LLAMA_8B["vocab"] * LLAMA_8B["hidden"]) / 32
    gather = collective_time(Primitive.ALL_GATHER, 2 * each, ground.shard)
    both = gather + collective_time(Primitive.REDUCE_SCATTER, 4 * each, ground.shard)
    forward, backward = min(gather, stage.layer.forward), min(both, stage.layer.backward)
    assert (forward == gather) == (passes == 10.0)
    slower = 32 * (SLOWER - 1)
    assert more == pytest.approx((0, slower * forward, slower * backward, 0))


def test_pipelined_fsdp_gathers_and_reduces_once():
    more, ground, stage = extras(llama(parallel={"pp": 2, "dp": 32, "zero": 3}))
    count = len(stage.layers)
    each = (stage.parameters - LLAMA_8B["vocab"] * LLAMA_8B["hidden"]) / count
    gather = collective_time(Primitive.ALL_GATHER, 2 * each, ground.shard)
    reduce = collective_time(Primitive.REDUCE_SCATTER, 4 * each, ground.shard)
    forward = min(count * gather, count * stage.layer.forward)
    backward = min(count * reduce, stage.cost.backward)
    slower = SLOWER - 1
    assert more == pytest.approx((slower * forward, 0, 0, slower * backward))
