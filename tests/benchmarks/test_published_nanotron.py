"""What is modelled of nanotron: kept tensors, memory beside what is allocated, and its network."""

from dataclasses import replace

import pytest

from benchmarks.published.apart import flat_bytes, late_bytes
from benchmarks.published.layers import layer
from benchmarks.published.memory import Memory
from benchmarks.published.predict import predict
from benchmarks.published.recipes import recipe_of
from benchmarks.published.rows import Context, read_row
from benchmarks.published.site import Site
from benchmarks.published.sites import cluster_of, ground_of
from benchmarks.published.stages import stages_of
from benchmarks.published.systems import DEEPSPEED, NANOTRON, NANOTRON_PLAIN, system_of
from benchmarks.published.times import Cost, cost
from meshwright.costmodel.comm.comm import collective_time
from meshwright.ir.layout.conversions import Primitive
from tests.benchmarks.nanotron_rows import SEQ, SWEEP, nanotron, sweep
from tests.benchmarks.published_rows import raw
from tests.benchmarks.published_rows import row as megatron


def test_checked_collectives_cost_by_rank_and_only_over_nodes():
    one, several = system_of(sweep(8, tp=8)), system_of(sweep(16, tp=8, dp=2))
    assert one.check_s == 0 < several.check_s
    times = [predict(sweep(8 * tp, tp=tp, dp=8)).step_s for tp in (2, 4, 8)]
    assert times[0] < times[1] < times[2]


def test_pipelines_before_the_fix_have_no_time():
    changed = {"parallel": {"tp": 8, "pp": 8}, "measured": {"step_time_s": 9.0}}
    assert read_row(raw(**changed), 0, Context("old_nanotron", {}, "nanotron")).step_s is None
    assert megatron(**changed).step_s == 9.0


def test_stages_move_on_when_their_share_is_reached():
    one = sweep(2, pp=2)
    parts = stages_of(one, recipe_of(one, system_of(one)), ground_of(one))
    # The head costs four layers: ten and six.
    assert [len(part.layers) for part in parts] == [10, 6]


def test_the_head_of_a_deep_pipeline_has_a_rank_without_layers():
    one = sweep(8, pp=8)
    parts = stages_of(one, recipe_of(one, system_of(one)), ground_of(one))
    # The layers end on the seventh rank.
    assert [len(part.layers) for part in parts] == [3, 2, 3, 2, 3, 2, 1, 0]
    assert [part.last for part in parts] == [False] * 7 + [True]


def priced(row):
    recipe = recipe_of(row, system_of(row))
    return recipe, stages_of(row, recipe, ground_of(row))


def kept(system, tp, mbs, kv_heads=32):
    """Bytes that autograd keeps of one layer, in values of tokens x hidden / tp."""
    row = nanotron(tp, mbs, tp=tp, model={**SWEEP, "kv_heads": kv_heads})
    site = Site(shape=row.shape, system=system, mbs=mbs, seq=SEQ, tp=tp, sp=tp > 1)
    value = 2 * mbs * SEQ * 2048 / tp
    sums = 4 * 32 / tp * mbs * SEQ
    return (cost(layer(site), ground_of(row)).saved_bytes - sums) / value


@pytest.mark.parametrize(("tp", "mbs"), [(1, 1), (1, 4), (4, 1), (4, 4), (8, 4)])
def test_layers_keep_what_is_counted_in_the_source(tp, mbs):
    # Two residual values; queries, keys and values as laid out, keys and values again, the output;
    # four values of the gated MLP, each four times as wide.
    common = 2 + 3 + 2 + 1 + 4 * 4
    copied = mbs > 1
    # Torch's linears keep gathered inputs, and the transposed output as a copy.
    assert kept(NANOTRON_PLAIN, tp, mbs) == common + 2 * tp + copied
    # The asynchronous ones keep the rank's part, and the output as it is.
    assert kept(NANOTRON, tp, mbs) == common + 2 + (copied if tp == 1 else 0)


def test_queries_of_their_own_keep_nothing_else():
    # With fewer keys than queries each is copied out: queries, keys and values once.
    assert kept(NANOTRON, 4, 2, kv_heads=8) == 2 + 2 + 1 + 2 / 4 + 1 + 4 * 4
    # Nor do they where they are rotated into a tensor of their own.
    apart = replace(NANOTRON, rotates_in_place=False)
    assert kept(apart, 4, 2) == kept(NANOTRON, 4, 2) - 2


def test_bench_cluster_has_plain_linears_and_other_rows_the_asynchronous_ones():
    assert system_of(nanotron(16, tp=8, dp=2, text="nanotron bench_cluster")) == NANOTRON_PLAIN
    assert system_of(nanotron(16, tp=8, dp=2)) == NANOTRON
    row, ground = nanotron(8, 8, tp=8), ground_of(nanotron(8, 8, tp=8))
    bare = replace(NANOTRON_PLAIN, hidden=0.0)
    sites = [
        Site(shape=row.shape, system=system, mbs=8, seq=SEQ, tp=8, sp=True)
        for system in (bare, replace(bare, tp_overlap="nanotron"))
    ]
    # Cut into parts, products take longer.
    plain, parts = (cost(layer(site), ground) for site in sites)
    assert plain.forward_s < parts.forward_s
    # Nor do they make the asynchronous linears' calls.
    recipe, (stage,) = priced(nanotron(8, 8, tp=8, text="nanotron bench_cluster"))
    assert recipe.system.tp_dispatch_s == (0.0, 0.0)
    assert stage.layer.forward_dispatch_s == pytest.approx(plain.forward_dispatch_s + 1e-3)


def test_a_share_of_the_work_hides_collectives():
    row = nanotron(8, 8, tp=8)
    ground = ground_of(row)
    backward = []
    for hidden in (0.0, 0.4, 1.0):
        system = replace(NANOTRON, hidden=hidden)
        site = Site(shape=row.shape, system=system, mbs=8, seq=SEQ, tp=8, sp=True)
        backward.append(cost(layer(site), ground).backward_s)
    assert backward[0] > backward[1] > backward[2]
    assert NANOTRON.hidden == 0.4


def test_gradients_of_a_whole_backward_are_there_at_its_end():
    wide = {**SWEEP, "hidden": 16384, "ffn": 53248, "heads": 128, "kv_heads": 128, "layers": 4}
    one = predict(nanotron(8, tp=8, model=wide)).memory
    parameters = nanotron(8, tp=8, model=wide).shape.parameters
    found = one.activations_bytes + one.transient_bytes
    # No activations are left; norms are on every rank.
    assert one.activations_bytes == 0
    assert found == pytest.approx(2 * parameters / 8, rel=1e-3)
    # With a micro-batch large enough the start of the backward is the peak.
    large = predict(nanotron(8, 4, tp=8, model=wide)).memory
    assert large.activations_bytes > found
    # Of the micro-batches in flight on a first stage all but one wait.
    row = nanotron(16, tp=8, pp=2, model=wide)
    first, memory = priced(row)[1][0], predict(row).memory
    assert memory.activations_bytes == first.cost.saved_bytes > 0
    assert memory.transient_bytes == 2 * first.parameters


def test_a_flat_tensor_is_reserved_anew_where_no_block_is_as_large():
    def flat(mbs=1, **parallel):
        row = nanotron(16, mbs, **parallel)
        recipe, stages = priced(row)
        return flat_bytes(row, recipe, stages[:1]) / (2 * stages[0].parameters)

    assert flat(tp=2, dp=8, zero=1) == 1
    # Logits of a larger micro-batch leave a block that holds it.
    logits = 4 * SEQ * 131072 / 2
    parameters = nanotron(16, tp=2, dp=8).shape.parameters / 2
    fits = int(2 * parameters / logits) + 1
    assert flat(fits - 1, tp=2, dp=8, zero=1) == 1 and flat(fits, tp=2, dp=8, zero=1) == 0
    # Ranks without logits have smaller blocks.
    assert flat(fits, tp=2, pp=2, dp=4, zero=1) == 1
    assert flat(tp=2, dp=8, zero=0) == flat(tp=8, pp=2, dp=1, zero=1) == 0
    # Stacks that gather in place have none.
    recipe, stages = priced(nanotron(16, tp=2, dp=8, zero=1))
    plain = replace(recipe, system=DEEPSPEED)
    assert flat_bytes(nanotron(16, tp=2, dp=8, zero=1), plain, stages) == 0


def late(row, **cost_changes):
    """Values of tokens x hidden that the CPU has freed and the GPU not yet sent."""
    recipe, stages = priced(row)
    first = replace(stages[0], cost=replace(stages[0].cost, **cost_changes))
    return late_bytes(row, recipe, first) / (2 * row.mbs * SEQ * row.shape.hidden)


SLOW_CPU = {"forward_s": 1.0, "forward_dispatch_s": 2.0}
SLOW_GPU = {"forward_s": 4.0, "forward_dispatch_s": 1.0}


def test_sent_values_come_back_late_as_far_as_the_queue_reaches():
    # Sixteen layers forward, and of the backward what 1024 launches leave.
    layers = 16 + (1024 - 16 * 31) / 45
    assert late(nanotron(8, tp=8)) == pytest.approx(2 * layers)
    deep, flat = {**SWEEP, "layers": 80}, {**SWEEP, "layers": 4}
    assert late(nanotron(8, tp=8, model=deep)) == pytest.approx(2 * 1024 / 31)
    assert late(nanotron(8, tp=8, model=flat)) == 2 * (4 + 4)
    # Of one micro-batch only the forward, as far as the GPU is behind.
    assert late(nanotron(8, 1, 1, tp=8), **SLOW_GPU) == pytest.approx(2 * 16 * 0.75)
    assert late(nanotron(8, 1, 1, tp=8), **SLOW_CPU) == 0
    assert late(nanotron(8, dp=8, zero=1)) == late(nanotron(8, tp=8, sp=False)) == 0
    assert late(nanotron(8, tp=8, text="nanotron bench_cluster")) == 0


def test_checks_keep_cpus_in_step():
    # Rows of a rerun over several nodes check their collectives.
    assert late(sweep(16, tp=8, dp=2), **SLOW_CPU) == 0
    assert late(sweep(16, tp=8, dp=2), **SLOW_GPU) > 0
    assert late(nanotron(16, tp=8, dp=2), **SLOW_CPU) > 0


def test_pipelines_run_ahead_until_the_first_gradient():
    row = nanotron(32, tp=8, pp=4)
    layers = len(priced(row)[1][0].layers)
    assert late(row, **SLOW_GPU) == 2 * layers * 4
    assert late(row, **SLOW_CPU) == 2 * layers * 2
    assert late(nanotron(32, 1, 1, tp=8, pp=4), **SLOW_GPU) == 2 * layers
    deep = nanotron(32, tp=8, pp=4, model={**SWEEP, "layers": 80})
    assert late(deep, **SLOW_GPU) == pytest.approx(2 * 1024 / 31)
    assert late(replace(row, early=True), **SLOW_GPU) == 0
    recipe, stages = priced(row)
    assert late_bytes(row, recipe, replace(stages[0], layers=range(0), cost=Cost())) == 0


def test_a_pipeline_is_early_unless_it_ran_after_the_fix():
    def early(table="nanotron_runs", **changes):
        parallel = {"tp": 8, "pp": 8, "zero": 1}
        return read_row(raw(parallel=parallel, **changes), 0, Context(table, {}, "nanotron")).early

    assert early() and early(after_pp_fix=False)
    assert not early(after_pp_fix=True) and not early(table="others")
    whole = raw(parallel={"tp": 8, "dp": 8})
    assert not read_row(whole, 0, Context("nanotron_runs", {}, "nanotron")).early


def test_what_is_reserved_beside_gives_way_to_the_limit():
    memory = Memory(
        states_bytes=20.0, activations_bytes=30.0, transient_bytes=0.0, limit_bytes=60.0,
        apart_bytes=5.0,
    )  # fmt: skip
    assert memory.peak("allocated") == 50
    assert memory.peak("reserved") == pytest.approx(1.03 * 50 + 5)
    assert replace(memory, apart_bytes=40.0).peak("reserved") == 60
    assert replace(memory, apart_bytes=40.0).fits
    full = replace(memory, limit_bytes=40.0)
    assert full.peak("reserved") == pytest.approx(1.03 * 50) and not full.fits
    row = nanotron(8, 16, tp=8)
    assert predict(row).memory.apart_bytes == late_bytes(row, priced(row)[0], priced(row)[1][0])
    row = nanotron(8, tp=2, dp=4, zero=1)
    recipe, stages = priced(row)
    both = flat_bytes(row, recipe, stages), late_bytes(row, recipe, stages[0])
    assert min(both) > 0 and predict(row).memory.apart_bytes == sum(both)


def test_bench_cluster_runs_over_tcp_unless_its_network_is_named():
    text = "nanotron bench_cluster"
    row = nanotron(16, tp=8, dp=2, text=text)
    tcp, efa = ground_of(row).dp, ground_of(replace(row, network="AWS p5, EFA")).dp
    nbytes = 4 * row.shape.parameters / 8
    slower = [collective_time(Primitive.ALL_REDUCE, nbytes, levels) for levels in (tcp, efa)]
    # 100 Gb/s a node, of which TCP reaches 0.7, for eight groups of two ranks.
    assert slower[0] == pytest.approx(8 * nbytes / (0.7 * 12.5e9), rel=0.02)
    assert slower[1] < slower[0] / 5
    assert "efa" in efa[0].link.name
    assert "efa" not in ground_of(nanotron(16, tp=8, dp=2)).dp[0].link.name
    # The cluster itself has what it has.
    assert cluster_of(row) == cluster_of(nanotron(16, tp=8, dp=2))
