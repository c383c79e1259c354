"""The operations by which a CPU process is measured."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle
from time import perf_counter, thread_time

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.ir.cluster.device import OpClass

Kernel = tuple[Callable[[], Tensor], float]
"""What to run, and its work: FLOPs for the compute classes, bytes moved for the others."""

_WIDTH = 512
ELEMENTS = (2**14, 2**17, 2**20)
"""64 KiB to 4 MiB of float32: activations of small models, within a core's own caches, within what
it shares with others, and beyond."""
EDGES = (64, 192, 512)
"""Of the square matrices of a product."""
FLAT = (32, 1024)
"""Rows, and edge of the square weight, of a product so flat that moving the weight shows."""
ATTENTIONS = ((4, 256, 64), (4, 64, 32))
"""Heads, tokens and width of each: queries of few keys take more for each of them."""
_COPIES = 12


def seconds_per_call(call: Callable[[], object], budget_s: float) -> float:
    """Mean processor seconds of a call, in `budget_s` by the clock, while others run the same: what
    sharing caches and memory costs is part of the price, since in training it is shared too, and
    waiting for a core is not."""
    for _ in range(2 * _COPIES):  # first pages, first caches
        call()
    calls, end, start = 0, perf_counter() + budget_s, thread_time()
    while perf_counter() < end or not calls:
        call()
        calls += 1
    return (thread_time() - start) / calls


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


def matmul(dtype: torch.dtype, edge: int = EDGES[-1]) -> Kernel:
    """A linear layer of a small transformer."""
    x = torch.randn(edge, edge).to(dtype)
    weight = torch.randn(edge, edge).to(dtype)
    call = rotating(lambda rows: functional.linear(rows, weight), x)
    return call, 2.0 * edge**3


def flat_product() -> Callable[[], Tensor]:
    """A linear layer of few tokens, whose weight comes from memory."""
    rows, edge = FLAT
    x = torch.randn(rows, edge)
    return rotating(lambda weight: functional.linear(x, weight), torch.randn(edge, edge))


def compute_kernels() -> Iterator[tuple[OpClass, Kernel]]:
    """One float32 kernel of each class that is bound by arithmetic, but for products and attention,
    of which there are several."""
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


def attention(shape: tuple[int, int, int]) -> Callable[[], Tensor]:
    """Attention of one sample, heads x tokens x width, in which all look at all."""
    q = torch.randn(1, *shape)
    return lambda: functional.scaled_dot_product_attention(q, q, q)


def streaming(elements: int) -> Kernel:
    """A kernel that writes where it reads, as optimizers do: no line is fetched to be overwritten,
    and no memory is new."""
    turns = cycle([(torch.ones(elements), torch.ones(elements)) for _ in range(_COPIES // 2)])

    def call() -> Tensor:
        x, y = next(turns)
        return x.add_(y)

    return call, 12.0 * elements


def memory_kernels(elements: int) -> Iterator[tuple[OpClass, Kernel]]:
    """One kernel of each class that is bound by memory; values as they lie in training."""
    x = torch.randn(elements // _WIDTH, _WIDTH)
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
