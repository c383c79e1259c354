"""The operations by which a CPU process is measured."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.ir.device import OpClass

Kernel = tuple[Callable[[], Tensor], float]
"""What to run, and its work: FLOPs for the compute classes, bytes moved for the others."""

_ROWS, _WIDTH, _OUT = 512, 512, 512
_ELEMENTS = 2**20
"""4 MiB of float32: an activation of a small model; more than a core's own caches."""
_COPIES = 12


def seconds_per_call(call: Callable[[], object], budget_s: float) -> float:
    """Mean seconds of a call while others run the same: what sharing caches, memory and cores costs
    is part of the price, since in training it is shared too."""
    for _ in range(2 * _COPIES):  # first pages, first caches
        call()
    calls, start = 0, perf_counter()
    while (elapsed := perf_counter() - start) < budget_s or not calls:
        call()
        calls += 1
    return elapsed / calls


def rotating(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Calls the function on one copy of x after another and keeps the last results.

    As in training, inputs come from memory, not from the cache, and results need fresh pages.
    """
    inputs = cycle([x.clone() for _ in range(_COPIES)])
    results: deque[Tensor] = deque(maxlen=_COPIES)

    def call() -> Tensor:
        results.append(function(next(inputs)))
        return results[-1]

    return call


def matmul(dtype: torch.dtype) -> Kernel:
    """A linear layer of a small transformer."""
    x = torch.randn(_ROWS, _WIDTH).to(dtype)
    weight = torch.randn(_OUT, _WIDTH).to(dtype)
    call = rotating(lambda rows: functional.linear(rows, weight), x)
    return call, 2.0 * _ROWS * _WIDTH * _OUT


def compute_kernels() -> Iterator[tuple[OpClass, Kernel]]:
    """One float32 kernel of each class that is bound by arithmetic."""
    q = torch.randn(1, 4, 256, 64)
    yield (
        OpClass.ATTENTION,
        (
            lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
            4.0 * 4 * 256 * 256 * 64,
        ),
    )
    image, filters = torch.randn(2, 64, 28, 28), torch.randn(64, 64, 3, 3)
    yield (
        OpClass.CONVOLUTION,
        (
            lambda: functional.conv2d(image, filters, padding=1),
            2.0 * 2 * 28 * 28 * 64 * 64 * 9,
        ),
    )
    lstm = torch.nn.LSTM(128, 128)
    steps = torch.randn(16, 8, 128)
    yield OpClass.RECURRENT, (lambda: lstm(steps)[0], 2.0 * 16 * 8 * 4 * 128 * 256)


def memory_kernels() -> Iterator[tuple[OpClass, Kernel]]:
    """One kernel of each class that is bound by memory; values as they lie in training."""
    x = torch.randn(_ELEMENTS // _WIDTH, _WIDTH)
    weight = torch.ones(_WIDTH)
    rows = torch.randint(0, x.shape[0], (x.shape[0] // 2,))
    nbytes = float(x.nbytes)
    # With fresh outputs: the allocator and page faults are part of the price.
    yield OpClass.ELEMENTWISE, (rotating(lambda x: x + x, x), 2 * nbytes)
    yield OpClass.COPY, (rotating(torch.clone, x), 2 * nbytes)
    yield OpClass.TRANSCENDENTAL, (rotating(functional.gelu, x), 2 * nbytes)
    yield (
        OpClass.NORMALIZATION,
        (
            rotating(lambda x: functional.layer_norm(x, (_WIDTH,), weight, weight), x),
            2 * nbytes,
        ),
    )
    yield OpClass.REDUCTION, (rotating(lambda x: x.sum(1), x), nbytes)
    yield OpClass.GATHER, (rotating(lambda x: functional.embedding(rows, x), x), nbytes)


def dispatch() -> tuple[Callable[[], object], int]:
    """Forward and backward of a chain of ops on next to no data, and how many kernels that is."""
    length = 40
    x = torch.ones(8, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(length):
            y = y * 1.5
        torch.autograd.backward(y.sum())

    return chain, 2 * length
