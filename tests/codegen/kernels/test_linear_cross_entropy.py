"""A last product and its loss, some rows at a time: the numbers of the whole, in less memory."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.ir.kernels import linear_cross_entropy as kernel

TOKENS, WIDTH, CLASSES = 1100, 4, 33


def _given(dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    target = torch.randint(0, CLASSES, (TOKENS,)).masked_fill(torch.arange(TOKENS) % 5 == 3, -100)
    return x, weight, target


def test_several_chunks_are_the_whole():
    x, weight, target = _given()
    assert TOKENS > 2 * kernel.rows_at_once(TOKENS, WIDTH, CLASSES)
    loss = kernel.linear_cross_entropy(x, weight, target, -100)[0]
    wanted = functional.cross_entropy(x @ weight.T, target, reduction="sum")
    torch.testing.assert_close(loss, wanted, rtol=1e-13, atol=0)
    for found, exact in zip(
        torch.autograd.grad(3 * loss, (x, weight)), torch.autograd.grad(3 * wanted, (x, weight)),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-12)


def test_classes_of_uneven_ranks_are_the_whole():
    x, weight, target = (value.detach() for value in _given())
    cuts = [(0, 20), (20, 20), (20, CLASSES)]
    parts = [kernel.parts(x, weight[a:b], target, a) for a, b in cuts]
    largest, total, picked = kernel.whole.combined(parts)
    whole = kernel.parts(x, weight, target, 0)
    for found, exact in zip((largest, total, picked), whole, strict=True):
        torch.testing.assert_close(found, exact)
    saved = (target, largest, total)
    one = torch.ones((), dtype=x.dtype)
    wanted = kernel.total_gradients(one, (x, weight, *saved), 0, -100)
    pieces = [kernel.total_gradients(one, (x, weight[a:b], *saved), a, -100) for a, b in cuts]
    torch.testing.assert_close(sum(to_x for to_x, _ in pieces), wanted[0])
    torch.testing.assert_close(torch.cat([to_weight for _, to_weight in pieces]), wanted[1])


def test_a_target_that_is_no_class_gives_no_number():
    x, weight, target = _given()
    target[7] = CLASSES
    assert kernel.linear_cross_entropy(x, weight, target, -100)[0].isnan()


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that a call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple) else (made,):
            if isinstance(value, torch.Tensor):
                self.found = max(self.found, value.numel())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_whole(dtype):
    x, weight, target = _given(dtype)
    rows = kernel.rows_at_once(TOKENS, WIDTH, CLASSES)
    with _Largest() as seen:
        saved = (x.detach(), weight.detach(), target)
        largest, total, _ = kernel.parts(*saved, 0)
        kernel.total_gradients(torch.ones(()), (*saved, largest, total), 0, -100)
    assert seen.found == rows * CLASSES < TOKENS * CLASSES
    assert kernel._inside([x.shape, weight.shape])[1] == 2 * seen.found


@pytest.mark.parametrize(
    ("tokens", "width", "classes", "rows"),
    [(8192, 4096, 128_256, 512), (65_536, 4096, 32_000, 8389), (100, 8, 50, 100), (0, 8, 50, 1)],
)
def test_a_chunk_is_as_large_as_what_goes_in_or_large_enough(tokens, width, classes, rows):
    assert kernel.rows_at_once(tokens, width, classes) == rows


def test_torch_sees_through_its_gradient():
    x, weight, target = (value.detach()[:6] for value in _given())
    largest, total, _ = kernel.parts(x, weight, target % 6, 0)
    given = (x, weight, target % 6, 0, largest, total, torch.ones(6, dtype=x.dtype))
    torch.library.opcheck(kernel.gradients, given)
