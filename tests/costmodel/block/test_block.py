"""Block costs counted by hand: conversions, saved bytes, shares of work."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.block.block import BlockCost, block_cost
from meshwright.costmodel.block.price_ops import GraphFacts
from meshwright.costmodel.comm.comm import collective_time, group_levels
from meshwright.costmodel.ops.compute import OpTime
from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.costmodel.ops.local_op import LocalOp
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Axis
from meshwright.ir.precision import precision
from tests.costmodel.models import BATCH, HIDDEN, WIDTH, layout, mlp

CLUSTER = Cluster.preset("a100-80", num_nodes=2, devices_per_node=8)
MICRO = 4
"""Samples of a micro-batch."""


def cost(
    tp: int = 1, dp: int = 1, precision: str = "fp32", block: int = 1, **kw: bool
) -> BlockCost:
    graph = mlp()
    shares = tuple(MICRO // dp for _ in range(dp))
    return block_cost(
        graph,
        graph.blocks[block],
        layout(tp),
        axes={"dp": Axis(dp, shares, BATCH), "tp": Axis(tp)},
        coordinates={"dp": 0, "tp": 0},
        groups={"dp": range(0, dp * tp, tp), "tp": range(tp)},
        cluster=CLUSTER,
        precision=precision,
        **kw,
    )


def test_saved_bytes_of_one_rank() -> None:
    """The two linears keep their inputs and gelu its own: the input x enters from outside."""
    alone = cost()
    assert alone.saved_bytes == 2 * MICRO * HIDDEN * 4
    assert alone.saved_inputs == (MICRO * WIDTH * 4,)
    assert alone.output_bytes == alone.input_bytes == (MICRO * WIDTH * 4,)
    assert alone.param_bytes == (WIDTH * HIDDEN * 4,) * 2
    assert alone.flops == 2 * 2 * MICRO * WIDTH * HIDDEN
    assert alone.summed_over == ((), ())
    assert alone.comm_forward_s == alone.comm_backward_s == 0


def test_tensor_parallel_shards_the_inner_values() -> None:
    split = cost(tp=2)
    assert split.saved_bytes == MICRO * HIDDEN * 4
    assert split.saved_inputs == (MICRO * WIDTH * 4,)
    assert split.param_bytes == (WIDTH * HIDDEN * 2,) * 2
    assert split.flops == cost().flops / 2


def test_a_forward_has_what_it_has_saved_and_what_its_last_op_reads_and_makes() -> None:
    """Most is there in the addition at the end: beside the inner values, its operand and result."""
    wide = 2 * MICRO * WIDTH * 4
    assert cost().forward_bytes == 2 * MICRO * HIDDEN * 4 + wide
    assert cost(tp=2).forward_bytes == MICRO * HIDDEN * 4 + wide
    assert cost().recomputed().forward_bytes == 0  # nothing is kept: one op's at a time


def test_megatron_needs_one_all_reduce_each_way() -> None:
    split, nbytes = cost(tp=4), MICRO * WIDTH * 4
    reduce_s = collective_time(Primitive.ALL_REDUCE, nbytes, group_levels(range(4), CLUSTER))
    device = CLUSTER.device(0)
    local = memory_s(nbytes / 4, curve_of(OpClass.COPY, device), device)
    expected = pytest.approx(reduce_s + local + device.overhead_s)
    assert split.comm_forward_s == expected
    assert split.comm_backward_s == expected
    assert split.forward_s > split.comm_forward_s


def test_a_conversion_that_is_used_twice_is_paid_once() -> None:
    """x is needed as R|P by the linear; asking again costs no second backward all-reduce."""
    graph = mlp()
    ops = dict(layout(2).ops)
    twice = replace(layout(2), ops={**ops, "/add": {**ops["/add"], "tp": "R|P P -> P"}})
    args = {
        "axes": {"dp": Axis(1, (MICRO,), BATCH), "tp": Axis(2)},
        "coordinates": {"dp": 0, "tp": 0},
        "groups": {"dp": [0], "tp": [0, 1]},
        "cluster": CLUSTER,
        "precision": "fp32",
    }
    again = block_cost(graph, graph.blocks[1], twice, **args)  # type: ignore[arg-type]
    assert again.comm_backward_s == pytest.approx(cost(tp=2).comm_backward_s)


def test_bf16_keeps_casts() -> None:
    """autocast keeps the bf16 copies of what enters a matmul, weights too; gelu runs in bf16."""
    half = cost(precision="bf16-autocast")
    assert half.saved_bytes == (2 * MICRO * HIDDEN + MICRO * WIDTH + 2 * WIDTH * HIDDEN) * 2
    assert half.param_bytes == cost().param_bytes
    facts = GraphFacts.of(mlp(), precision("bf16-autocast"), "cpu")
    assert [facts.dtypes[n] for n in ("h_0", "g_0", "x1")] == ["bfloat16", "bfloat16", "float32"]


def test_fp64_doubles_bytes() -> None:
    assert cost(precision="fp64").saved_bytes == 2 * cost().saved_bytes


def test_recompute_trades_memory_for_a_forward() -> None:
    full, again = cost(tp=2), cost(tp=2, recompute=True)
    assert again.saved_bytes == 0 and again.saved_inputs == full.input_bytes
    assert again.backward_s == pytest.approx(full.backward_s + full.forward_s)
    assert again.backward_weight_s == full.backward_weight_s
    assert again.comm_backward_s == pytest.approx(2 * full.comm_forward_s)


def test_the_batch_itself_is_not_saved() -> None:
    assert cost(block=0).saved_inputs == (0,)
    assert cost(block=0).input_bytes == (0,)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_more_ranks_never_take_longer_to_compute(dp: int, tp: int) -> None:
    one, many = cost(), cost(tp=tp, dp=dp)
    assert many.forward_s - many.comm_forward_s <= one.forward_s * (1 + 1e-9)
    assert many.saved_bytes == one.saved_bytes // (dp * tp)


def test_a_measured_table_takes_over() -> None:
    def timer(op: LocalOp, device: DeviceType) -> OpTime | None:
        assert device.name == "a100-80"
        return OpTime(1.0, 2.0, 3.0, "measured", 0.02) if op.op_class is OpClass.MATMUL else None

    graph = mlp()
    timed = block_cost(
        graph,
        graph.blocks[1],
        layout(1),
        axes={"dp": Axis(1, (MICRO,), BATCH), "tp": Axis(1)},
        coordinates={"dp": 0, "tp": 0},
        groups={"dp": [0], "tp": [0]},
        cluster=CLUSTER,
        precision="fp32",
        timer=timer,
    )
    assert timed.forward_s == pytest.approx(2.0, rel=1e-3)
    assert timed.backward_input_s == pytest.approx(4.0, rel=1e-3)
    assert timed.backward_weight_s == pytest.approx(6.0)
    assert timed.source == "datasheet"
