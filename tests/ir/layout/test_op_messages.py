"""What ops are said to communicate inside."""

from math import ceil

import pytest

from meshwright.ir.graph.graph import Arg, Op
from meshwright.ir.graph.inner_traffic import inner_traffic, kept_apart
from meshwright.ir.graph.windows import Window, sent, spans, windows
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import parse_strategy
from meshwright.ir.layout.op_messages import SHIFT, Inner, LocalOperand


def op(target: str, inputs: int, **args: Arg) -> Op:
    names = tuple(f"i{i}" for i in range(inputs))
    return Op("op", "op", target, tuple(args.items()), names, ("o",), "")


def value(*shape: int, item: int = 2) -> LocalOperand:
    count = item
    for size in shape:
        count *= size
    return LocalOperand(shape, count)


def test_ring_attention_passes_keys_and_values_round() -> None:
    attention = op("aten.scaled_dot_product_attention.default", 3)
    q, k = value(2, 8, 64, 16), value(2, 4, 64, 16)
    ring = parse_strategy("S(2) S(2) S(2) -> S(2)")
    part = (k.nbytes + k.nbytes) // 4
    assert inner_traffic(attention, ring, 4, [q, k, k], [q]) == (
        Inner(SHIFT, part, 3, backward=False, beside=True),
        Inner(SHIFT, part, 3, backward=True, beside=True),
        Inner(SHIFT, 2 * part, 2, backward=True, beside=True),
        Inner(SHIFT, 2 * part, 1, backward=True),
    )
    for other in ("S(1) S(1) S(1) -> S(1)", "S(2) R|P R|P -> S(2)", "R R R -> R"):
        assert inner_traffic(attention, parse_strategy(other), 4, [q, k, k], [q]) == ()
    assert inner_traffic(attention, ring, 1, [q, k, k], [q]) == ()


def test_experts_get_each_token_once_per_rank() -> None:
    experts = op("meshwright.experts.default", 5)
    inputs = [value(64, 16), value(64, 2, item=8), value(64, 2), value(8, 64, 16), value(8, 16, 32)]
    split = parse_strategy("S(0) S(0) S(0) S(0) S(0) -> S(0)")
    found = inner_traffic(experts, split, 4, inputs, inputs[:1])
    # Both of two different experts of 8 lie on other ranks with 15/28 of all chances.
    tokens = [m for m in found if m.nbytes == ceil(inputs[0].nbytes * 4 * 13 / 28)]
    assert {m.kind for m in found} == {Primitive.ALL_TO_ALL}
    assert [(m.times, m.backward) for m in tokens] == [(1, False)] * 2 + [(1, True)] * 2
    whole = parse_strategy("R|P R R|P S(0) S(0) -> P")
    assert inner_traffic(experts, whole, 4, inputs, inputs[:1]) == ()


@pytest.mark.parametrize(("kernel", "stride", "rows"), [(3, 1, 2), (1, 1, 0), (5, 1, 4), (2, 2, 0)])
def test_halos_are_rows_of_the_neighbours(kernel: int, stride: int, rows: int) -> None:
    conv = op(
        "aten.conv2d.default", 2, stride=(stride, stride), padding=((kernel - 1) // 2,) * 2,
        dilation=(1, 1),
    )  # fmt: skip
    x, w, y = value(2, 3, 24, 8), value(5, 3, kernel, kernel), value(2, 5, 24 // stride, 8)
    found = inner_traffic(conv, parse_strategy("S(2) R|P -> S(2)"), 3, [x, w], [y])
    nbytes = rows * x.nbytes // 24
    both = (Inner(SHIFT, nbytes, 1, backward=False), Inner(SHIFT, nbytes, 1, backward=True))
    assert found == (both if rows else ())
    assert inner_traffic(conv, parse_strategy("S(0) R|P -> S(0)"), 3, [x, w], [y]) == ()


def test_what_was_fetched_is_kept() -> None:
    x, w = value(2, 3, 24, 8), value(5, 3, 3, 3)
    conv = op("aten.conv2d.default", 2, stride=(1, 1), padding=(1, 1), dilation=(1, 1))
    rows = kept_apart(conv, parse_strategy("S(2) R|P -> S(2)"), 3, [x, w], [x])
    assert rows == {0: x.nbytes // 24 * 10}
    assert kept_apart(conv, parse_strategy("S(0) R|P -> S(0)"), 3, [x, w], [x]) == {}
    experts = op("meshwright.experts.default", 5)
    inputs = [value(64, 16), value(64, 2, item=8), value(64, 2), value(8, 64, 16), value(8, 16, 32)]
    split = parse_strategy("S(0) S(0) S(0) S(0) S(0) -> S(0)")
    kept = kept_apart(experts, split, 4, inputs, inputs[:1])
    assert kept == {i: ceil(inputs[i].nbytes * 13 / 28) for i in range(3)}


def test_thin_parts_get_rows_from_further_away() -> None:
    held = spans((1, 1, 1, 1))
    window = Window(kernel=5, stride=1, padding=2, dilation=1)
    assert sent(held, [window.reads(*span) for span in held]) == 3


def test_averages_that_end_in_the_padding_have_no_window() -> None:
    pool = op(
        "aten.avg_pool2d.default", 1, kernel_size=(3, 3), stride=(2, 2), padding=(0, 1),
        ceil_mode=True, count_include_pad=False,
    )  # fmt: skip
    assert windows(pool, [(1, 1, 6, 6)], (1, 1, 3, 4)) == (None, None)
    assert windows(pool, [(1, 1, 7, 6)], (1, 1, 3, 4)) == (Window(3, 2, 0, 1), None)


def test_statistics_are_summed() -> None:
    norm = op("aten.batch_norm.default", 1, training=True)
    x = value(4, 3, 8, 8)
    found = inner_traffic(norm, parse_strategy("S(2) -> S(2)"), 2, [x], [x])
    sums = (Inner(Primitive.ALL_REDUCE, 6, 2, b, of_replica=True) for b in (False, True))
    assert found == tuple(sums)
    assert inner_traffic(norm, parse_strategy("S(1) -> S(1)"), 2, [x], [x]) == ()


def test_cross_entropy_sums_over_classes() -> None:
    loss = op("meshwright.cross_entropy_sum.default", 2)
    logits, rows = value(6, 10, item=4), value(6, item=8)
    found = inner_traffic(loss, parse_strategy("S(1) R -> R"), 2, [logits, rows], [value()])
    assert [(m.nbytes, m.times, m.backward) for m in found] == [(24, 1, False), (48, 1, False)]
    assert inner_traffic(loss, parse_strategy("S(0) S(0) -> P"), 2, [logits, rows], [value()]) == ()
