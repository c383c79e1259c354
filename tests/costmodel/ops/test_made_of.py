"""An op that is made of others takes as long as they do, and what it makes again."""

import pytest

from meshwright.costmodel.ops.compute import formula
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.made_of import calls_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass

TOKENS, WIDTH, CLASSES = 4096, 512, 50_257
X = LocalInput((TOKENS, WIDTH), 2 * TOKENS * WIDTH, True, False)
WEIGHT = LocalInput((CLASSES, WIDTH), 2 * CLASSES * WIDTH, True, True)
TARGET = LocalInput((TOKENS,), 8 * TOKENS, False, False)
LOGITS = LocalInput((TOKENS, CLASSES), 2 * TOKENS * CLASSES, True, False)
FLOPS = 2.0 * TOKENS * CLASSES * WIDTH


def _fused(x: LocalInput) -> LocalOp:
    name, outs = "meshwright.linear_cross_entropy.default", ((), (TOKENS,), (TOKENS,))
    operands = (x, WEIGHT, TARGET)
    return LocalOp(name, OpClass.MATMUL, "float32", FLOPS, operands, outs, 8 * TOKENS, True)


@pytest.mark.parametrize("device", ["h100-sxm", "v100-16"])
def test_a_last_product_makes_its_logits_twice(device):
    (kind,) = Cluster.preset(device, devices_per_node=1).device_types
    product = LocalOp(
        "aten.linear.default", OpClass.MATMUL, "bfloat16", FLOPS, (X, WEIGHT), (LOGITS.shape,),
        LOGITS.nbytes, True, X.nbytes + WEIGHT.nbytes,
    )  # fmt: skip
    name, saved = "meshwright.cross_entropy_total.default", LOGITS.nbytes + TARGET.nbytes
    loss = LocalOp(
        name, OpClass.NORMALIZATION, "bfloat16", 5.0 * TOKENS * CLASSES, (LOGITS, TARGET),
        (TARGET.shape,), 2 * TOKENS, True, saved,
    )  # fmt: skip
    fused, first, second = (formula(op, kind) for op in (_fused(X), product, loss))
    assert fused.total_s == pytest.approx(first.total_s + second.total_s + first.forward_s)
    assert fused.forward_s == pytest.approx(first.forward_s + second.forward_s)
    dispatched = first.input_dispatch_s + second.input_dispatch_s + first.forward_dispatch_s
    assert fused.input_dispatch_s == pytest.approx(dispatched)


def test_its_products_are_in_the_type_of_what_goes_in():
    assert {call.dtype for call in calls_of(_fused(X))} == {"bfloat16"}
    twice = X._replace(nbytes=2 * X.nbytes)
    assert {call.dtype for call in calls_of(_fused(twice))} == {"float32"}
    assert calls_of(_fused(X)._replace(target="aten.linear.default")) == ()
