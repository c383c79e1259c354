"""The operations by which a CPU process is measured."""

from collections.abc import Callable, Iterator
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


def seconds_per_call(call: Callable[[], object], budget_s: float) -> float:
    """Seconds of a call when others do not get in the way: the fastest quarter, after a warm-up."""
    call()
    times: list[float] = []
    end = perf_counter() + budget_s
    while not times or perf_counter() < end:
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return sorted(times)[len(times) // 4]


def matmul(dtype: torch.dtype) -> Kernel:
    """A linear layer of a small transformer."""
    x = torch.randn(_ROWS, _WIDTH).to(dtype)
    weight = torch.randn(_OUT, _WIDTH).to(dtype)
    return lambda: functional.linear(x, weight), 2.0 * _ROWS * _WIDTH * _OUT


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
    yield OpClass.ELEMENTWISE, (lambda: x + x, 2 * nbytes)
    yield OpClass.COPY, (lambda: x.clone(), 2 * nbytes)
    yield OpClass.TRANSCENDENTAL, (lambda: functional.gelu(x), 2 * nbytes)
    yield (
        OpClass.NORMALIZATION,
        (
            lambda: functional.layer_norm(x, (_WIDTH,), weight, weight),
            2 * nbytes,
        ),
    )
    yield OpClass.REDUCTION, (lambda: x.sum(1), nbytes)
    yield OpClass.GATHER, (lambda: functional.embedding(rows, x), nbytes)


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
