"""Whole calls by kernels on peers' memory, ranks as threads and the memory that of one process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from threading import Barrier, Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.codegen.collectives import peer_calls, together
from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.collectives.symmetric import Turn
from meshwright.ir import launch
from meshwright.ir.kernels import gather_linear, linear_scatter, reduce_norm
from meshwright.ir.placed import peers
from meshwright.testing.simulated import simulate
from tests.interpreted import printed

RANKS = 2
NBYTES = 1 << 16


class Memory:
    """What the ranks share: for each two halves and its signals."""

    def __init__(self) -> None:
        self.buffers = [torch.zeros(2 * NBYTES, dtype=torch.uint8) for _ in range(RANKS)]
        self.signals = [torch.zeros(RANKS, dtype=torch.int32) for _ in range(RANKS)]
        self.barrier = Barrier(RANKS, timeout=60)
        self.kernel = Lock()
        """The interpreter runs one at a time."""


@dataclass
class Handle:
    memory: Memory

    def barrier(self) -> None:
        self.memory.barrier.wait()

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, at: int) -> Tensor:
        buffer = self.memory.buffers[rank].view(dtype)
        return buffer[at : at + torch.Size(shape).numel()].view(shape)


@dataclass
class Space:
    """One rank's workspace."""

    memory: Memory
    rank: int
    epoch: int = 0

    def turn(self, nbytes: int) -> Turn:
        assert nbytes <= NBYTES
        self.epoch += 1
        start, memory = self.epoch % 2 * NBYTES, self.memory
        bases = torch.tensor([x.data_ptr() for x in memory.buffers])
        signals = torch.tensor([x.data_ptr() for x in memory.signals])
        own = memory.buffers[self.rank][start : start + NBYTES]
        return Turn(
            Handle(memory), own, bases + start, memory.signals[self.rank], signals, self.epoch
        )

    def bring(self, turn: Turn, x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        turn.view(tuple(x.shape), x.dtype).copy_(x)
        turn.barrier()
        parts = torch.stack([turn.of(r, tuple(x.shape), x.dtype) for r in range(RANKS)])
        return parts, torch.ones(RANKS, dtype=torch.int32)

    def brought(self) -> None:
        self.memory.barrier.wait()


def random() -> Callable[..., Tensor]:
    """The same numbers for each thread."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def reduced(comm: Comm, shape: tuple[int, ...], centred: bool) -> list[Tensor]:
    draw = random()
    summands, residual = draw(RANKS, *shape), draw(*shape)
    gain, bias = draw(2, shape[-1])
    own = summands[comm.coordinates["tp"]].clone()
    given = [x.requires_grad_() for x in (own, residual, gain, bias)]
    total, out, *_ = together.reduce_norm(comm, *given[:3], bias if centred else None, 1e-5, "tp")
    (total.sin() + out.cos()).sum().backward()
    return [total.detach(), out.detach(), *(x.grad for x in given if x.grad is not None)]


def gathered(comm: Comm, shape: tuple[int, ...], dim: int) -> list[Tensor]:
    draw = random()
    rank = comm.coordinates["tp"]
    x = draw(RANKS, *shape)[rank].clone().requires_grad_()
    weights = [draw(RANKS, 9, shape[-1])[rank].clone().requires_grad_() for _ in range(2)]
    bias = draw(9).requires_grad_()
    sizes = (shape[dim],) * RANKS
    first, second = together.gather_linear(comm, x, weights, (bias, None), "tp", dim, sizes)
    (first.sin() + second.cos()).sum().backward()
    return [first.detach(), second.detach(), *(w.grad for w in (x, *weights, bias))]


def scattered(comm: Comm, shape: tuple[int, ...], dim: int) -> list[Tensor]:
    draw = random()
    rank = comm.coordinates["tp"]
    whole = [*shape]
    whole[dim] *= RANKS
    x = draw(RANKS, *whole)[rank].clone().requires_grad_()
    weight = draw(RANKS, 9, shape[-1])[rank].clone().requires_grad_()
    bias = draw(9).requires_grad_()
    made = together.linear_scatter(comm, x, weight, bias, "tp", dim, (shape[dim],) * RANKS)
    made.sin().sum().backward()
    return [made.detach(), *(w.grad for w in (x, weight, bias))]


CASES: dict[str, tuple[Callable[..., list[Tensor]], list[tuple[Any, ...]]]] = {
    "reduce_norm": (reduced, [((2, 3, 5), False), ((3, 5), True)]),
    "gather_linear": (gathered, [((1, 3, 5), 1), ((2, 3, 5), 1), ((4, 5), 0)]),
    "linear_scatter": (scattered, [((1, 3, 5), 1), ((2, 3, 5), 1), ((4, 5), 0)]),
}


def one_after_the_other(memory: Memory) -> None:
    """Kernels of the threads; those that wait for signals come after those that give them."""

    def locked(run: Callable[..., Any], *, late: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if late:
                memory.barrier.wait()
            with memory.kernel:
                return run(*args, **kwargs)

        return call

    reduce_norm.sum_rows = locked(reduce_norm.sum_rows)
    reduce_norm.norm_rows = locked(reduce_norm.norm_rows)
    gather_linear.product = locked(gather_linear.product)
    linear_scatter.product = locked(linear_scatter.product)
    linear_scatter.sum_parts = locked(linear_scatter.sum_parts, late=True)


def everything(space: Callable[[Comm], Space | str]) -> dict[str, list[list[Tensor]]]:
    """What each rank finds in each case; calls take turns with the memory."""
    found: dict[str, list[list[Tensor]]] = {}

    def body(comm: Comm) -> list[Tensor]:
        own = space(comm)
        comm.line("tp").space = own
        return [x for run, cases in CASES.values() for case in cases for x in run(comm, *case)]

    peer_calls.workspace = lambda line, x: line.space
    for shots, limit in (("one shot", 1 << 20), ("two shots", 0)):
        peers.ONE_SHOT_BYTES = limit
        found[shots] = simulate({"tp": RANKS}, body)
    return found


def test_by_triton_as_by_torch() -> None:
    pytest.importorskip("triton")
    found = printed("tests.codegen.kernels.test_joint_calls")
    calls = RANKS * 2
    # Each of the two with products is the backward of the other.
    both = sum(len(CASES[name][1]) for name in ("gather_linear", "linear_scatter"))
    for kernel, (_, cases) in CASES.items():
        number = len(cases) if kernel == "reduce_norm" else both
        for why in ("", "nothing is shared"):
            assert found["taken"][f"{kernel}: {why}"] == calls * number
    assert len(found["errors"]) > 60 and max(found["errors"]) <= 1e-5


def main() -> None:
    """Prints how far the two ways are apart, and which were taken, as JSON."""
    # Threads cannot interpret the kernels beside them, of whole norms and of their backward.
    launch.INTERPRETED = False
    plain = everything(lambda comm: "nothing is shared")
    memory = Memory()
    one_after_the_other(memory)
    spaces = [Space(memory, rank) for rank in range(RANKS)]
    made = everything(lambda comm: spaces[comm.coordinates["tp"]])
    errors = [
        (x - y).abs().max().item()
        for shots in plain
        for ours, theirs in zip(made[shots], plain[shots], strict=True)
        for x, y in zip(ours, theirs, strict=True)
    ]
    taken = {": ".join(key): count for key, count in launch.TAKEN.items()}
    print(json.dumps({"errors": errors, "taken": taken}))


if __name__ == "__main__":
    main()
