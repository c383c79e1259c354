"""Op formulas: monotone, never negative, and what they know of waves, dispatch, masks and casts."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from meshwright.costmodel.block.clock import BlockSums
from meshwright.costmodel.ops.compute import OpTime, formula, kept_inside_bytes, op_time
from meshwright.costmodel.ops.formulas import KernelWork, curve_of, kernel_s, memory_s
from meshwright.costmodel.ops.kernel_work import (
    forward_gemms,
    forward_work,
    input_work,
    weight_work,
)
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.op_classes import classify
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import DeviceType, OpClass, OpCurve
from meshwright.ir.graph.gemm import Gemm
from meshwright.ir.graph.graph import Tensor
from meshwright.ir.graph.op_facts import InnerPass
from meshwright.ir.ops import facts
from meshwright.ir.presets import DEVICES, MACHINES, cpu_process
from meshwright.ir.trace.trace import trace

CPU = cpu_process(2**34)
H100 = DEVICES["h100-sxm"]
SIZES = st.integers(1, 6000)
DEVICE = st.sampled_from([CPU, *DEVICES.values()])


def linear(m: int, n: int, k: int, dtype: str = "bfloat16", cast: int = 0) -> LocalOp:
    size = 4 if dtype == "float32" else 2
    return LocalOp(
        target="aten.linear.default",
        op_class=OpClass.MATMUL,
        dtype=dtype,
        flops=2.0 * m * n * k,
        inputs=(
            LocalInput((m, k), m * k * size, True, False),
            LocalInput((n, k), n * k * size, True, True, cast),
        ),
        outputs=((m, n),),
        output_bytes=m * n * size,
        differentiable=True,
    )


def pointwise(count: int, target: str = "aten.gelu.default", saved: int | None = None) -> LocalOp:
    return LocalOp(
        target=target,
        op_class=classify(target),
        dtype="bfloat16",
        flops=10.0 * count,
        inputs=(LocalInput((count,), 2 * count, True, False),),
        outputs=((count,),),
        output_bytes=2 * count,
        differentiable=True,
        saved_bytes=saved,
    )


def attention(keys: int, *, causal: bool) -> LocalOp:
    shape = (4, 16, keys, 64)
    nbytes = 2 * 4 * 16 * keys * 64
    return LocalOp(
        target="aten.scaled_dot_product_attention.default",
        op_class=OpClass.ATTENTION,
        dtype="bfloat16",
        flops=4.0 * 4 * 16 * keys * keys * 64,
        inputs=(LocalInput(shape, nbytes, True, False),) * 3,
        outputs=(shape,),
        output_bytes=nbytes,
        differentiable=True,
        causal=causal,
    )


def parts(time: OpTime) -> tuple[float, float, float]:
    return time.forward_s, time.backward_input_s, time.backward_weight_s


@given(DEVICE, SIZES, SIZES, SIZES, st.integers(0, 2), st.integers(1, 600))
def test_a_larger_product_never_takes_less(
    device: DeviceType, m: int, n: int, k: int, dim: int, more: int
) -> None:
    """Among those with rows of 16 bytes; others may take longer than larger ones."""
    shape = [m, 8 * n, 8 * k]
    small = formula(linear(*shape), device)
    shape[dim] += 8 * more if dim else more
    large = formula(linear(*shape), device)
    for less, greater in zip(parts(small), parts(large), strict=True):
        assert 0.0 < less <= greater * (1 + 1e-12)


@given(DEVICE, st.sampled_from(list(OpClass)), st.floats(1, 1e10), st.floats(1, 1e3))
def test_more_bytes_and_flops_never_take_less(
    device: DeviceType, op_class: OpClass, nbytes: float, times: float
) -> None:
    work = KernelWork(op_class, "float32", 10 * nbytes, nbytes)
    more_bytes = replace(work, nbytes=nbytes * times)
    more_flops = replace(work, flops=10 * nbytes * times)
    seconds = kernel_s(work, device)
    assert 0.0 < seconds <= kernel_s(more_bytes, device)
    assert seconds <= kernel_s(more_flops, device)


@given(st.integers(1, 4000), st.integers(1, 500), st.booleans(), DEVICE)
def test_longer_attention_never_takes_less(
    keys: int, more: int, causal: bool, device: DeviceType
) -> None:
    short, long = (formula(attention(n, causal=causal), device) for n in (keys, keys + more))
    assert short.forward_s <= long.forward_s
    assert short.backward_input_s <= long.backward_input_s


def test_causal_attention_skips_half_of_long_scores() -> None:
    """Flops count in full; the time does not."""
    full, half = (formula(attention(16384, causal=c), H100) for c in (False, True))
    assert half.forward_s == pytest.approx(full.forward_s / 2, rel=0.05)
    assert attention(512, causal=True).flops == attention(512, causal=False).flops


def test_waves_of_tiles() -> None:
    """One tile more than fills the processors costs another wave, if work waits for whole waves."""
    device = replace(
        H100,
        processors=4,
        curves={OpClass.MATMUL: OpCurve(share=1.0, quantum=1.0, small_tile=0.5, split_depth=1e4),
                OpClass.COPY: OpCurve(share=1.0)},
    )  # fmt: skip

    def seconds(tiles: int) -> float:
        work = KernelWork(OpClass.MATMUL, "bfloat16", 0.0, 1.0, (Gemm(1, 256 * tiles, 128, 4096),))
        return kernel_s(work, device)

    assert seconds(4) == pytest.approx(seconds(3), rel=1e-6)
    assert seconds(5) > 1.4 * seconds(4)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(("values", "nbytes"), [(50257, 2), (50258, 8), (50260, 8), (50264, 16)])
def test_rows_that_are_not_aligned(values: int, nbytes: int, dim: int) -> None:
    """Of weights, activations or results: forward and both products of the backward."""
    shape = [8192, 4096, 4096]
    shape[dim] = values
    op = linear(*shape)
    rate = dict(H100.curves[OpClass.MATMUL].row_rates).get(nbytes)
    for seconds in parts(formula(op, H100)):
        reached = op.flops / seconds
        # A long product lets the clock fall, and gradients of weights are added to others.
        assert reached == pytest.approx(rate, rel=0.08) if rate else reached > 5e14
    wide = linear(*shape, dtype="float32")
    even = linear(*shape[:dim], 50264, *shape[dim + 1 :], dtype="float32")
    for odd_s, even_s in zip(parts(formula(wide, H100)), parts(formula(even, H100)), strict=True):
        assert odd_s == pytest.approx(even_s, rel=0.02)


def test_any_number_of_rows_will_do() -> None:
    assert formula(linear(8191, 4096, 4096), H100).total_s < 1.01 * (
        formula(linear(8192, 4096, 4096), H100).total_s
    )


def test_batches_of_products_that_are_not_aligned() -> None:
    """Heads of 108 values on A100: half the rate without tensor cores. Elsewhere as one product."""

    def seconds(device: DeviceType, values: int) -> float:
        gemm = forward_gemms("aten.bmm.default", [(64, 2048, values), (64, values, 2048)], 0)
        return kernel_s(KernelWork(OpClass.MATMUL, "float16", 0.0, 1.0, gemm), device)

    flops = 2.0 * 64 * 2048 * 2048 * 108
    assert flops / seconds(DEVICES["a100-80"], 108) == pytest.approx(9.6e12, rel=0.02)
    assert seconds(DEVICES["a100-80"], 112) < 0.2 * seconds(DEVICES["a100-80"], 108)
    assert seconds(H100, 107) == pytest.approx(flops * 107 / 108 / 1.15e14, rel=0.05)


def test_nano_gpt_and_its_vocabulary() -> None:
    """124M on A100 became 25 % faster with 50304 instead of 50257 entries; its products, more."""
    device, tokens, hidden = DEVICES["a100-80"], 12 * 1024, 768

    def total(vocab: int) -> float:
        widths = [
            (3 * hidden, hidden),
            (hidden, hidden),
            (4 * hidden, hidden),
            (hidden, 4 * hidden),
        ]
        layers = 12 * sum(formula(linear(tokens, n, k), device).total_s for n, k in widths)
        return layers + formula(linear(tokens, vocab, hidden), device).total_s

    assert 1.2 < total(50257) / total(50304) < 1.8


def test_a_short_inner_loop_is_less_efficient() -> None:
    def rate(k: int) -> float:
        op = linear(8192, 8192, k)
        return op.flops / formula(op, DEVICES["a100-80"]).forward_s

    rates = [rate(k) for k in (64, 256, 1024, 8192)]
    assert rates == sorted(rates) and rates[0] < 0.5 * rates[-1]


def convolution(
    batch: int, inner: int, outer: int, window: int, stride: int, side: int, dtype: str = "float32"
) -> LocalOp:
    """`side`: of its output."""
    size, seen = 4 if dtype == "float32" else 2, side * stride
    image, weight = (batch, inner, seen, seen), (outer, inner, window, window)
    made = (batch, outer, side, side)
    return LocalOp(
        target="aten.conv2d.default",
        op_class=OpClass.CONVOLUTION,
        dtype=dtype,
        flops=2.0 * prod(made) * inner * window**2,
        inputs=(
            LocalInput(image, prod(image) * size, True, False),
            LocalInput(weight, prod(weight) * size, True, True),
        ),
        outputs=(made,),
        output_bytes=prod(made) * size,
        differentiable=True,
    )


@pytest.mark.parametrize(
    ("layer", "forward_ms", "backward_ms"),
    [((128, 128, 512, 1, 1, 28), 1.318, 2.796), ((128, 256, 1024, 1, 1, 14), 1.464, 2.412),
     ((128, 1024, 512, 1, 1, 14), 2.557, 5.27), ((128, 256, 256, 3, 1, 14), 1.285, 2.134),
     ((128, 512, 512, 3, 1, 7), 1.268, 3.52), ((128, 256, 256, 3, 1, 56), 17.458, 27.023),
     ((128, 64, 64, 1, 1, 56), 0.754, 2.025), ((128, 64, 256, 1, 1, 56), 1.455, 3.065)],
)  # fmt: skip
def test_convolutions_without_tensor_cores(
    layer: tuple[int, int, int, int, int, int], forward_ms: float, backward_ms: float
) -> None:
    """Layers of ResNet-50 and VGG-16 on V100: msr-fiddle/pipedream, profiler/image_classification
    (the preset's share of the peak is from all of theirs)."""
    op = convolution(*layer)
    time = formula(op, DEVICES["v100-16"])
    assert 1e3 * time.forward_s == pytest.approx(forward_ms, rel=0.45)
    backward_s = time.backward_input_s + time.backward_weight_s
    assert 1e3 * backward_s == pytest.approx(backward_ms, rel=0.5)


def test_small_windows_need_fewer_multiplications_without_tensor_cores() -> None:
    small, strided = (channels_last(convolution(64, 256, 256, 3, stride, 28)) for stride in (1, 2))
    assert small.flops == strided.flops
    machines = [DEVICES[name] for name in ("v100-16", "p100", "a100-80")]
    gains = {d.name: formula(strided, d).forward_s / formula(small, d).forward_s for d in machines}
    assert gains["v100-16"] == pytest.approx(2.25, rel=0.1)
    assert gains["p100"] == pytest.approx(2.25, rel=0.1)
    assert gains["a100-80"] == pytest.approx(1.0, abs=0.2)  # TF32, the strided one reads more
    for dtype in ("float16", "float64"):
        pair = [channels_last(convolution(64, 256, 256, 3, stride, 28, dtype)) for stride in (1, 2)]
        times = [formula(op, machines[0]).forward_s for op in pair]
        assert times[1] / times[0] == pytest.approx(1.0, abs=0.2), dtype
    bias = LocalInput((256,), 1024, True, True)
    biased = small._replace(
        inputs=(*small.inputs, bias), flops=small.flops + prod(small.outputs[0])
    )
    for op in (small, strided):
        assert forward_work(op).small_window is (op is small)
    assert forward_work(biased).small_window


def channels_last(op: LocalOp) -> LocalOp:
    """With images in the layout that tensor cores want."""
    image, *rest = op.inputs
    return op._replace(inputs=(image._replace(channels_last=True), *rest), channels_last=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["p100", "v100-16", "a100-80", "rtx4090"])
def test_images_are_turned_for_tensor_cores(name: str, dtype: str) -> None:
    """Image and result, read and written each way, forward and for both gradients; nothing for
    kernels without tensor cores, for products, for each channel by itself, or for what lies so."""
    device = DEVICES[name]
    cores = name != "p100" and (dtype == "float16" or device.peak("tf32") > device.peak("float32"))
    op = convolution(128, 256, 512, 1, 1, 28, dtype)
    size = 2 if dtype == "float16" else 4
    moved = 128 * 28 * 28 * (256 + 512) * size
    copied = memory_s(2 * moved, curve_of(OpClass.COPY, device), device)
    seconds = [parts(formula(x, device)) for x in (op, channels_last(op))]
    for turned, plain in zip(*seconds, strict=True):
        expected = curve_of(OpClass.CONVOLUTION, device).turning * copied if cores else 0.0
        assert turned - plain == pytest.approx(expected, rel=0.1)
    alone = convolution(128, 1, 256, 3, 1, 28, dtype)
    assert forward_work(alone).turned_bytes == 0
    assert forward_work(channels_last(op)).turned_bytes == 0
    # A first convolution: only its image comes otherwise.
    first = op._replace(channels_last=True)
    assert forward_work(first).turned_bytes == 128 * 28 * 28 * 256 * size
    assert forward_work(linear(64, 64, 64)).turned_bytes == 0


def test_tf32_reaches_the_share_of_half_precision() -> None:
    """Of its own peak: large products on A100, H100 and L4 (matmul_measured)."""
    device = DEVICES["a100-80"]
    curve = replace(device.curves[OpClass.CONVOLUTION], wide_share=0.1)
    other = replace(device, curves={**device.curves, OpClass.CONVOLUTION: curve})
    op = channels_last(convolution(64, 1024, 1024, 3, 1, 28))
    assert formula(op, other).forward_s == pytest.approx(formula(op, device).forward_s)
    half = formula(channels_last(convolution(64, 1024, 1024, 3, 1, 28, "float16")), device)
    ratio = formula(op, device).forward_s / half.forward_s
    assert ratio == pytest.approx(device.peak("float16") / device.peak("tf32"), rel=0.05)


def test_products_of_8_bit_floats_may_have_a_share_of_their_own() -> None:
    device = DEVICES["h100-sxm"]
    curve = device.curves[OpClass.MATMUL]
    slower = replace(device, curves={
        **device.curves, OpClass.MATMUL: replace(curve, narrow_share=curve.share / 2)
    })  # fmt: skip
    for dtype, times in (("float8_e4m3fn", 2.0), ("bfloat16", 1.0)):
        op = linear(8192, 8192, 8192, dtype)
        ratio = formula(op, slower).forward_s / formula(op, device).forward_s
        assert ratio == pytest.approx(times, rel=0.02)


def test_starting_a_product_stands_for_fewer_steps_of_a_slower_one() -> None:
    def loss(dtype: str) -> float:
        """Of the rate, where the inner loop is short."""
        short, long = (linear(8192, 8192, k, dtype) for k in (256, 8192))
        rates = [op.flops / formula(op, DEVICES["v100-16"]).forward_s for op in (short, long)]
        return 1 - rates[0] / rates[1]

    assert loss("float32") < loss("float16") / 3


def test_few_rows_are_bound_by_memory() -> None:
    op = linear(4, 8192, 8192)
    copy = curve_of(OpClass.COPY, H100)
    least = memory_s(op.inputs[1].nbytes, copy, H100)
    assert least <= formula(op, H100).forward_s < 1.3 * least + 5e-6


@given(st.integers(1, 2**26))
def test_memory_slows_beyond_the_cache(nbytes: int) -> None:
    curve = OpCurve(share=0.5, cache_share=2.0, cache_bytes=2**20)
    rate = H100.memory_bandwidth_bytes_per_s
    seconds = memory_s(nbytes, curve, H100)
    assert nbytes / (2 * rate) <= seconds * (1 + 1e-9)
    assert seconds <= nbytes / (0.5 * rate) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("target", "shapes", "flops", "expected"),
    [
        ("aten.linear.default", [(3, 5, 7), (11, 7)], 0, [Gemm(1, 15, 11, 7, 1)]),
        ("aten.addmm.default", [(11,), (5, 7), (7, 11)], 0, [Gemm(1, 5, 11, 7, 1)]),
        ("aten.bmm.default", [(3, 5, 7), (3, 7, 11)], 0, [Gemm(3, 5, 11, 7, 1)]),
        ("aten.matmul.default", [(2, 3, 5, 7), (2, 3, 7, 11)], 0, [Gemm(6, 5, 11, 7, 1)]),
        ("aten.conv2d.default", [(2, 8, 6, 6), (16, 8, 3, 3)], 2 * 72 * 16 * 72,
         [Gemm(1, 72, 16, 72)]),
        ("aten.conv2d.default", [(2, 8, 6, 6), (8, 1, 3, 3)], 2 * 72 * 8 * 9,
         [Gemm(8, 72, 1, 9, packed=(1, 8, 8))]),
        ("aten.conv2d.default", [(2, 128, 6, 6), (256, 4, 3, 3)], 2 * 72 * 256 * 36,
         [Gemm(32, 72, 8, 36, packed=(1, 8, 8))]),
        ("aten.conv2d.default", [(2, 256, 6, 6), (256, 128, 3, 3)], 2 * 72 * 256 * 1152,
         [Gemm(2, 72, 128, 1152)]),
        ("meshwright.experts.default", [(32, 16), (32, 2), (32, 2), (4, 48, 16), (4, 16, 24)],
         2 * 64 * 16 * 72, [Gemm(4, 16, 48, 16, 8), Gemm(4, 16, 16, 24, 8)]),
        ("aten.einsum.default", [(3, 5), (5, 7)], 210, []),
    ],
)  # fmt: skip
def test_products_of_ops(
    target: str, shapes: list[tuple[int, ...]], flops: float, expected: list[Gemm]
) -> None:
    assert list(forward_gemms(target, shapes, flops)) == expected


def test_experts_weights_have_their_gradients_once() -> None:
    """Tokens and what they are weighted by are two operands with gradients; neither is a factor of
    the other's."""
    tokens, weights = LocalInput((32, 16), 1024, True, False), LocalInput((32, 2), 128, True, False)
    index = LocalInput((32, 2), 512, False, False)
    gate_up = LocalInput((4, 48, 16), 6144, True, True)
    down = LocalInput((4, 16, 24), 3072, True, True)
    op = LocalOp(
        "meshwright.experts.default", OpClass.MATMUL, "bfloat16", 2 * 64 * 16 * 72,
        (tokens, index, weights, gate_up, down), ((32, 16),), 1024, True,
    )  # fmt: skip
    before, own = input_work(op), weight_work(op)
    assert before and own
    products = forward_gemms(op.target, [i.shape for i in op.inputs], op.flops)
    assert before.gemms == tuple(g.for_input() for g in products)
    assert own.gemms == tuple(g.for_weight() for g in products)
    assert before.flops == own.flops == op.flops


def _pointwise(target: str, rows: int, width: int, dtype: str) -> LocalOp:
    nbytes = rows * width * (4 if dtype == "float32" else 2)
    given = (LocalInput((rows, width), nbytes, True, False),) * 2
    flops = 5 * rows * width
    return LocalOp(
        target, classify(target), dtype, flops, given, ((rows, width),), nbytes, True
    )  # fmt: skip


def test_fused_operators_on_cpus_are_of_python() -> None:
    """Forward and backward of 16 rows of 64 took 60 to 115 us where a product of two took 16; large
    bfloat16 took 1.2 times float32, of half the bytes. On GPUs they are kernels."""
    cpu = Cluster.local(1).device_types[0]
    gpu = Cluster.preset("h100-sxm", devices_per_node=2).device_types[0]

    def taken_s(target: str, device: DeviceType) -> float:
        time = formula(_pointwise(target, 16, 64, "float32"), device)
        return time.total_s + time.forward_dispatch_s + time.input_dispatch_s

    def widened(device: DeviceType) -> float:
        narrow, usual = (
            formula(_pointwise("meshwright.swiglu.default", 1 << 16, 1024, dtype), device)
            for dtype in ("bfloat16", "float32")
        )
        return narrow.total_s / usual.total_s

    fused, product = "meshwright.swiglu.default", "aten.mul.Tensor"
    assert 60 / 16 < taken_s(fused, cpu) / taken_s(product, cpu) < 115 / 16
    assert taken_s(fused, gpu) <= taken_s(product, gpu)
    assert 1.1 < widened(cpu) < 1.3
    assert widened(gpu) == pytest.approx(0.5, rel=0.05)


def test_narrow_products_share_a_tile() -> None:
    """32 groups of 4 channels are as 2 of 64 whose blocks off the diagonal are zeros, forward and
    backward; of a CPU's products nothing is wasted."""
    narrow = Gemm(32, 4096, 4, 36, packed=(1, 16, 16))
    assert narrow.in_tiles() == Gemm(2, 4096, 64, 576)
    assert narrow.for_input(9).in_tiles() == Gemm(2, 4096, 64, 576)
    assert narrow.for_weight().in_tiles() == Gemm(2, 64, 576, 4096)
    work = KernelWork(OpClass.CONVOLUTION, "bfloat16", 1e30, 1.0, (narrow,))
    dense = replace(work, gemms=(Gemm(2, 4096, 64, 576),))
    assert kernel_s(work, H100) == kernel_s(dense, H100)
    plain = replace(work, gemms=(replace(narrow, packed=(1, 1, 1)),))
    assert kernel_s(work, CPU) == kernel_s(plain, CPU)


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80", "v100-16"])
def test_convolutions_of_each_channel_by_itself(name: str) -> None:
    """ConvNeXt's 7 x 7, forward and backward: near what memory or the plain units allow."""
    device, batch, channels = DEVICES[name], 128, 384
    shape = (batch, channels, 28, 28)
    flops = 2.0 * prod(shape) * 49
    op = LocalOp(
        target="aten.conv2d.default",
        op_class=OpClass.CONVOLUTION,
        dtype="float16",
        flops=flops,
        inputs=(
            LocalInput(shape, 2 * prod(shape), True, False),
            LocalInput((channels, 1, 7, 7), 2 * channels * 49, True, True),
        ),
        outputs=(shape,),
        output_bytes=2 * prod(shape),
        differentiable=True,
    )
    curve = device.curves[OpClass.CONVOLUTION]
    plain_s = flops / (device.peak("float32") * (curve.wide_share or curve.share))
    moving_s = 4 * prod(shape) / device.memory_bandwidth_bytes_per_s
    for seconds in parts(formula(op, device)):
        assert max(plain_s, moving_s) <= seconds < 2.5 * (plain_s + moving_s)


def test_what_hands_its_gradient_on_has_no_backward() -> None:
    add = formula(pointwise(2**24, "aten.add.Tensor"), H100)
    gelu = formula(pointwise(2**24), H100)
    assert add.backward_input_s == 0.0 and add.input_dispatch_s == 0.0
    assert gelu.backward_input_s > gelu.forward_s > 0.0


def test_backward_reads_what_was_saved() -> None:
    little, much = (formula(pointwise(2**24, saved=n), H100) for n in (0, 2**25))
    assert little.backward_input_s < much.backward_input_s


def test_casts_are_paid_forward_and_backward() -> None:
    plain, cast = (op_time(linear(512, 512, 512, cast=c), H100) for c in (0, 6 * 512 * 512))
    assert cast.forward_s > plain.forward_s
    assert cast.backward_weight_s > plain.backward_weight_s
    assert cast.backward_input_s == plain.backward_input_s
    assert cast.forward_dispatch_s == pytest.approx(2 * plain.forward_dispatch_s)


def block(op: LocalOp, count: int, device: DeviceType) -> BlockSums:
    clock = BlockSums()
    for _ in range(count):
        clock.add(op_time(op, device))
    clock.settle(device)
    return clock


def test_small_blocks_on_a_gpu_are_bound_by_dispatch() -> None:
    """40 tiny ops: the CPU decides, and a faster GPU changes nothing."""
    clock = block(pointwise(64), 40, H100)
    assert clock.forward_s == pytest.approx(40 * H100.overhead_s)
    assert clock.backward_input_s == pytest.approx(40 * H100.overhead_s)
    faster = block(pointwise(64), 40, DEVICES["b200"])
    assert faster.forward_s == pytest.approx(clock.forward_s)


def test_large_blocks_on_a_gpu_hide_dispatch() -> None:
    op = pointwise(2**28)
    clock = block(op, 40, H100)
    assert clock.forward_s == pytest.approx(40 * formula(op, H100).forward_s)
    slow_cpu = replace(H100, overhead_s=2 * H100.overhead_s)
    assert block(op, 40, slow_cpu).forward_s == clock.forward_s


def test_one_large_op_hides_the_dispatch_of_small_ones() -> None:
    """The queue evens out: a block takes the longer of both sums."""
    clock = BlockSums()
    ops = [pointwise(2**28), *[pointwise(64)] * 20]
    for op in ops:
        clock.add(op_time(op, H100))
    clock.settle(H100)
    assert clock.forward_s == pytest.approx(sum(formula(op, H100).forward_s for op in ops))


def test_on_a_cpu_dispatch_adds() -> None:
    free = replace(CPU, overhead_s=0.0)
    for op in (pointwise(64), pointwise(2**24)):
        with_cpu, without = formula(op, CPU), formula(op, free)
        assert with_cpu.forward_s == pytest.approx(without.forward_s + CPU.overhead_s)
        assert with_cpu.forward_dispatch_s == 0.0


@pytest.mark.parametrize("name", DEVICES)
def test_presets_are_complete(name: str) -> None:
    device = DEVICES[name]
    assert set(device.curves) == set(OpClass) - {OpClass.VIEW}
    assert name in MACHINES and device.processors > 0
    for dtype, op_class in product(("float32", "float16", "bfloat16"), device.curves):
        assert kernel_s(KernelWork(op_class, dtype, 1e9, 1e6), device) > 0.0
    for curve in device.curves.values():
        assert curve.reference or curve.source == "assumption"
        assert 0.0 < curve.band < 1.0


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("a100-80", 240, 290), ("h100-sxm", 720, 830), ("h200", 720, 830), ("b200", 1400, 1750),
     ("gb200", 1500, 1850), ("h20", 130, 145), ("a10g", 45, 60),
     ("v100-16", 84, 104), ("rtx4090", 150, 175), ("t4", 25, 45), ("l4", 60, 75)],
)  # fmt: skip
def test_large_products_reach_what_is_measured(name: str, low: float, high: float) -> None:
    op = linear(8192, 8192, 8192, "float16")
    assert low < op.flops / formula(op, DEVICES[name]).forward_s / 1e12 < high


def test_large_products_of_gb300_are_faster_by_its_power() -> None:
    """With as many multipliers as GB200, it has 1.4 kW for 1.2."""
    op = linear(8192, 8192, 8192, "bfloat16")
    slower, faster = (formula(op, DEVICES[name]).forward_s for name in ("gb200", "gb300"))
    assert slower / faster == pytest.approx(1.4 / 1.2, rel=0.01)


def test_what_a_kernel_adds_gets_one_gradient() -> None:
    """It is written once for both, as for one input that is as large."""
    x = LocalInput((64, 32), 8192, True, False)
    outs = ((64, 32), (64, 32), (64,))

    def moved(*inputs: LocalInput) -> float:
        target = "meshwright.add_rms_norm.default"
        op = LocalOp(target, OpClass.NORMALIZATION, "float32", 1.0, inputs, outs, 16640, True, 8192)
        work = input_work(op)
        assert work
        return work.nbytes

    assert moved(x, x) == moved(x) == 16640 + 8192 + 8192


def test_cross_entropy_that_keeps_no_probabilities_moves_half_as_much() -> None:
    """Torch's writes their logarithms, and before the logits' gradient that of the logarithms."""
    logits = LocalInput((64, 1000), 256_000, True, False)
    target = LocalInput((64,), 512, False, False)

    def moved(name: str, outputs: int, saved: int) -> list[float]:
        op = LocalOp(
            f"meshwright.{name}.default", OpClass.NORMALIZATION, "float32", 1.0, (logits, target),
            ((),), outputs, True, saved,
        )  # fmt: skip
        back = input_work(op)
        assert back
        return [forward_work(op).nbytes, back.nbytes]

    plain = moved("cross_entropy_sum", 4, 256_512)
    fused = moved("cross_entropy_total", 4 + 2 * 256, 256_512 + 2 * 256)
    assert plain == [2 * 256_000 + 512 + 4, 4 * 256_000 + 512 + 4]
    assert fused == [256_000 + 512 + 516, 2 * 256_000 + 1024 + 516]


def test_cpus_compute_scores_that_causal_attention_does_not_use() -> None:
    """torch's kernel there looks at 512 keys together, and skips those that lie wholly ahead."""
    cpu = Cluster.local(1).device_types[0]

    def times(keys: int) -> float:
        found, whole = (parts(formula(attention(keys, causal=c), cpu)) for c in (True, False))
        assert found[0] / whole[0] == pytest.approx(found[1] / whole[1], rel=0.02)
        return found[0] / whole[0]

    assert times(256) == times(512) == 1.0
    assert times(2048) == pytest.approx(0.625, abs=0.02)


def test_attention_of_other_widths_keeps_no_scores_on_gpus() -> None:
    """Torch's products on a CPU keep all; where widths are equal, a trace tells of either."""
    tensors: dict[str, Tensor] = {}
    with torch.device("meta"):
        for value in (64, 96):
            q, k, v = (torch.zeros(2, 4, 512, n, dtype=torch.bfloat16) for n in (96, 96, value))

            class Attends(torch.nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.scale = torch.nn.Parameter(torch.ones(96, dtype=torch.bfloat16))

                def forward(
                    self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
                ) -> torch.Tensor:
                    q = q * self.scale
                    return scaled_dot_product_attention(q, k, v, is_causal=True).float().sum()

            graph = trace(Attends(), {"q": q, "k": k, "v": v})
            (op,) = (op for op in graph.ops if "attention" in op.target)
            tensors = dict(graph.tensors)
            on_cpu, on_gpu = (
                kept_inside_bytes(op, tensors, device, False) for device in (CPU, H100)
            )
            assert on_gpu == 4 * 2 * 4 * 512
            assert on_cpu >= 2 * 2 * 4 * 512**2 if value == 64 else on_cpu == on_gpu
            keeps = facts(op.target).kernel_keeps
            masked = [(2, 4, 512, 96), (2, 4, 512, 96), (2, 4, 512, value), (512, 512)]
            assert keeps and keeps(masked) == (None if value == 96 else on_gpu + 2 * 512**2)


@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "h100"])
def test_small_kernels_in_a_row_take_what_each_takes(device: DeviceType) -> None:
    """Dispatch, too, and the backward makes them again."""
    calls, gradients = InnerPass(1000, 0, 1e6), InnerPass(2000, 500, 3e6)
    many = formula(pointwise(64)._replace(inner=(calls, gradients)), device)
    forward = max(many.forward_s, many.forward_dispatch_s)
    back = max(many.backward_input_s, many.input_dispatch_s)
    alone = formula(pointwise(64)._replace(inner=(calls, InnerPass(0, 0, 0))), device)
    again = max(alone.backward_input_s, alone.input_dispatch_s)
    if device is CPU:  # called directly, views too; what is made again is kept
        assert 0.25 <= forward / (1000 * device.overhead_s) <= 0.5
        assert again > 1.05 * forward
        assert back - again > 2500 / 1000 * forward
    else:
        assert forward == pytest.approx(1000 * device.overhead_s)
        assert again == pytest.approx(forward)
        assert 2 * forward < back - again < 2500 / 1000 * forward
    assert forward > 100 * formula(pointwise(64), device).forward_dispatch_s
    apart = calls._replace(pages=1e5)  # rows far apart: a CPU looks their pages up, each way
    slow = formula(pointwise(64)._replace(inner=(apart, gradients)), device)
    more_s = 3e-3 if device is CPU else 0.0
    assert slow.forward_s - many.forward_s == pytest.approx(more_s)
    assert slow.backward_input_s - many.backward_input_s == pytest.approx(more_s)
