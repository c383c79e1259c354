"""Dropout, alone and after GELU: both directions and both ways draw the same numbers."""

import pytest
import torch
from torch.library import opcheck

from meshwright.ir.kernels.bias_gelu.dropout import gelu_dropout
from meshwright.ir.random.dropout import dropout, factors
from tests.codegen.kernels.gelu_dropout_cases import KEY, P, case, kept, under
from tests.interpreted import printed


def test_by_torch():
    found = under()
    assert found["way"] == "torch"
    assert all(len(each) == 5 and max(each) <= 1e-12 for each in found["errors"]), found


def test_by_triton():
    pytest.importorskip("triton")
    found = printed("tests.codegen.kernels.gelu_dropout_cases")
    assert found["way"] == "triton" and ["dropout", ""] in found["taken"]
    assert all(len(each) == 5 and max(each) <= 1e-12 for each in found["errors"]), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype):
    x, _, where = case(3, dtype)
    made = dropout(x, *where)
    weight = torch.linspace(-1, 1, x.numel(), dtype=dtype).view(x.shape)
    (grad,) = torch.autograd.grad(made, x, weight)
    # Rounded once: a factor in bfloat16 would be off by as much again, for all elements alike.
    assert torch.equal(made, (x.float() * kept(3).float()).to(dtype))
    assert torch.equal(grad, (weight.float() * kept(3).float()).to(dtype))


def test_a_tensor_keeps_its_memory_format():
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    made = dropout(x, P, KEY, 0, (-1,), (1,))
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(made, dropout(x.contiguous(), P, KEY, 0, (-1,), (1,)))


def test_torch_sees_through_them():
    x, bias, where = case(2, torch.float32)
    opcheck(gelu_dropout, (x, bias, True, *where))
    given = (x.detach(), *where)
    opcheck(torch.ops.meshwright.dropout.default, given)
    opcheck(torch.ops.meshwright.dropout_factors.default, given)


def test_as_many_stay_as_are_said():
    made = factors(torch.empty(1000, 1000), P, 3, 0, (-1,), (1,))
    assert abs((made != 0).double().mean().item() - (1 - P)) < 0.003
