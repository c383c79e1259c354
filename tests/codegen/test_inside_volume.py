"""Ops send what `ir.layout.op_messages` says: that is what plans are priced with."""

from collections import Counter
from itertools import permutations

import pytest
import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm
from meshwright.ir.graph.graph import Arg
from meshwright.ir.graph.inner_traffic import inner_traffic
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import parse_strategy
from meshwright.ir.layout.op_messages import LocalOperand
from tests.codegen.one_op import Case, check

F64 = torch.float64


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=F64, generator=generator)


def attention(causal: bool) -> Case:
    tensors = {
        "query": random(1, 12, 12, 4),
        "key": random(1, 6, 12, 4),
        "value": random(1, 6, 12, 4),
    }
    plain: dict[str, Arg] = {
        "attn_mask": None, "dropout_p": 0.0, "is_causal": causal, "scale": None, "enable_gqa": True,
    }  # fmt: skip
    return Case("aten.scaled_dot_product_attention.default", {**tensors, **plain})


def conv(kernel: int, stride: int) -> Case:
    plain: dict[str, Arg] = {
        "bias": None, "stride": (stride,) * 2, "padding": (kernel // 2,) * 2, "dilation": (1, 1),
        "groups": 1,
    }  # fmt: skip
    tensors = {"input": random(2, 3, 12, 6), "weight": random(4, 3, kernel, kernel)}
    return Case("aten.conv2d.default", {**tensors, **plain})


def norm() -> Case:
    plain: dict[str, Arg] = {
        "running_mean": None, "running_var": None, "training": True, "momentum": 0.1, "eps": 1e-5,
        "cudnn_enabled": False,
    }  # fmt: skip
    tensors = {"input": random(2, 3, 12, 6), "weight": random(3), "bias": random(3)}
    return Case("aten.batch_norm.default", {**tensors, **plain})


def loss(smoothing: float) -> Case:
    target = torch.tensor([0, 7, -100, 3, 11, 5])
    plain: dict[str, Arg] = {
        "weight": None, "ignore_index": -100, "label_smoothing": smoothing,
    }  # fmt: skip
    return Case(
        "meshwright.cross_entropy_sum.default",
        {"logits": random(6, 12), "target": target, **plain},
    )


def experts(form: str = "") -> Case:
    """Every pair of different experts equally often."""
    index = torch.tensor(list(permutations(range(6), 2)) * 6)
    tensors = {
        "hidden": random(180, 4), "top_k_index": index, "top_k_weights": random(180, 2),
        "gate_up": random(6, 6, 4), "down": random(6, 4, 3),
    }  # fmt: skip
    plain: dict[str, Arg] = dict.fromkeys(("up", "gate_up_bias", "down_bias"))
    return Case("meshwright.experts.default", {**tensors, "act": "silu", **plain, "form": form})


CASES = {
    "ring": (attention(False), "S(2) S(2) S(2) -> S(2)"),
    "causal ring": (attention(True), "S(2) S(2) S(2) -> S(2)"),
    "ring in sections": (attention(True), "S(2,outer=2) S(2,outer=2) S(2,outer=2) -> S(2,outer=2)"),
    "heads": (attention(True), "S(1) S(1) S(1) -> S(1)"),
    "halo": (conv(3, 1), "S(2) R|P -> S(2)"),
    "wide halo": (conv(5, 1), "S(2) R|P -> S(2)"),
    "halo of strides": (conv(3, 2), "S(3) R|P -> S(3)"),
    "no halo": (conv(1, 1), "S(2) R|P -> S(2)"),
    "statistics": (norm(), "S(2) R|P R|P -> S(2)"),
    "classes": (loss(0.0), "S(1) R -> R"),
    "smoothed classes": (loss(0.1), "S(1) R -> R"),
    "experts": (experts(), "S(0) S(0) S(0) S(0) S(0) -> S(0)"),
    "experts in 8 bits": (experts("narrow_tokens"), "S(0) S(0) S(0) S(0) S(0) -> S(0)"),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_what_is_said_is_sent(name: str, ranks: int) -> None:
    case, text = CASES[name]
    logs = check(case, {"tp": text}, {"tp": ranks})
    site = case.site({}, (), Comm({}, {}, {}))
    inputs = [LocalOperand(tuple(x.shape), x.nbytes) for x in case.tensors]
    output = (2, 3, 12, 6) if "halo" not in name else _shape(case)
    found = inner_traffic(site.op, parse_strategy(text), ranks, inputs, [LocalOperand(output, 0)])
    said: Counter[str] = Counter()
    for message in found:
        whole = message.kind == Primitive.ALL_TO_ALL
        said[message.kind] += message.nbytes * message.times // (ranks if whole else 1)
    sent: Counter[str] = Counter()
    for at_once in zip(*logs, strict=True):
        assert len({traffic.primitive for traffic in at_once}) == 1
        sent[str(at_once[0].primitive)] += max(traffic.nbytes for traffic in at_once)
    assert sent == said


def _shape(case: Case) -> tuple[int, ...]:
    args = case.args
    made = torch.nn.functional.conv2d(
        case.tensors[0], case.tensors[1], None, args["stride"], args["padding"]
    )
    return tuple(made.shape)
