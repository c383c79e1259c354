"""Every kernel equals its reference, by torch and by Triton, and compiles for GPUs without one."""

from collections.abc import Sequence

import pytest
import torch
from torch.library import opcheck

from meshwright.ir.kernels import compiled, cross_entropy
from meshwright.testing.machine_code import machine_code
from tests.codegen.kernels.cases import CASES, DTYPES, OPERATORS, Found, check
from tests.interpreted import printed

triton = pytest.importorskip("triton")
BUILT = compiled()


def _ok(found: Sequence[Found], way: str) -> None:
    assert len(found) > len(DTYPES)
    for one in found:
        assert max(one.errors) <= DTYPES[one.dtype], one
    assert way in {one.way for one in found}


def test_every_kernel_has_cases():
    assert set(OPERATORS) == set(CASES)


@pytest.mark.parametrize("kernel", CASES)
def test_by_torch(kernel):
    _ok(list(check(kernel)), "torch")


@pytest.fixture(scope="module")
def interpreted() -> list[Found]:
    """One process for all: the interpreter is chosen when Triton is imported."""
    return [Found(**row) for row in printed("tests.codegen.kernels.cases", *CASES)]


@pytest.mark.parametrize("kernel", CASES)
def test_by_triton(interpreted, kernel):
    _ok([one for one in interpreted if one.kernel == kernel], "triton")


@pytest.mark.parametrize("kernel", CASES)
def test_torch_sees_through_it(kernel):
    first, *others = CASES[kernel]()[1]
    opcheck(OPERATORS[kernel][0], (first.requires_grad_(), *others))


@pytest.mark.parametrize("module", BUILT, ids=lambda module: module.__name__.rpartition(".")[2])
def test_it_compiles_without_a_gpu(module):
    for build in filter(lambda build: build.is_for(80), module.builds("bf16", 128)):
        assert machine_code(build, 80).instructions


def test_a_vocabulary_that_is_split_over_ranks():
    """Three uneven parts, one of them empty, give the whole's loss and gradient."""
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 10, 4, 3, -100, 7])
    pieces = [(0, 4), (4, 4), (4, 11)]
    found = [cross_entropy.parts(logits[:, a:b].detach(), target, a) for a, b in pieces]
    largest, total, picked = cross_entropy.combined(found)
    known = target >= 0
    loss = (total.log() + largest - picked)[known]
    wanted = cross_entropy.reference(logits, target)
    torch.testing.assert_close(loss, wanted[known].detach())
    wanted.sum().backward()
    back = [
        cross_entropy.gradient(logits[:, a:b].detach(), target, a, largest, total, known.double())
        for a, b in pieces
    ]
    torch.testing.assert_close(torch.cat(back, 1), logits.grad)


def test_gelu_has_the_dtype_of_the_product_whose_bias_it_adds():
    """Under autocast the product is bfloat16 and the bias float32."""
    torch.manual_seed(0)
    x, bias = torch.randn(5, 8, dtype=torch.bfloat16), torch.randn(8)
    given = [x.requires_grad_(), bias.requires_grad_()]
    operator, reference = OPERATORS["bias_gelu"]
    made = operator(*given, True)
    exact = [value.detach().double().requires_grad_() for value in given]
    wanted = reference(*exact, True)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.double(), wanted, rtol=5e-3, atol=5e-3)
    for value, other in zip(given, exact, strict=True):
        back = torch.autograd.grad(made.sum(), value, retain_graph=True)[0]
        assert back.dtype == value.dtype
        by = torch.autograd.grad(wanted.sum(), other, retain_graph=True)[0]
        torch.testing.assert_close(back.double(), by, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernel", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("read", [0, 1])
def test_a_norm_of_which_one_result_is_read(kernel, read):
    torch.manual_seed(0)
    width = {"add_rms_norm": 1, "add_layer_norm": 2}[kernel]
    given = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    given += [torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(width)]
    operator, reference = OPERATORS[kernel]
    found, wanted = (
        torch.autograd.grad(f(*given, 1e-5)[read].square().sum(), given, allow_unused=True)
        for f in (operator, reference)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
