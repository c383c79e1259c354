"""Gathers and reduce-scatters straight between ranks (`ir.comm.p2p_collectives`) against PyTorch's
own for Gloo.

    python -m benchmarks.direct [--ranks 2,4] [--kib 16,256,4096,32768]

On fresh processes for each. Says the median of the slowest rank, the ratio, and by how much a
process grew beside the value and its part.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ir import torch_private as private
from meshwright.ir.heap import keep_freed_memory
from meshwright.runtime.record.resident import peak_bytes, reset_peak
from meshwright.testing.spawn import run_ranks

REPEATS, WARM = 24, 4
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one way on one rank."""

    seconds: float
    grown_bytes: int


def _torch_gather(whole: Tensor, part: Tensor) -> None:
    private._all_gather(whole, part)


def _torch_scatter(whole: Tensor, part: Tensor) -> None:
    private._reduce_scatter(part, whole)


def _direct_gather(whole: Tensor, part: Tensor) -> None:
    private.all_gather(whole, part, None)


def _direct_scatter(whole: Tensor, part: Tensor) -> None:
    private.reduce_scatter(part, whole, None).wait()


WAYS: dict[str, tuple[Callable[[Tensor, Tensor], None], ...]] = {
    "all_gather": (_torch_gather, _direct_gather),
    "reduce_scatter": (_torch_scatter, _direct_scatter),
}
"""PyTorch's, and ours."""


def measure(run: Callable[[Tensor, Tensor], None], kib: int) -> Cost:
    """On every rank of the default group."""
    warnings.simplefilter("ignore")
    keep_freed_memory()
    torch.set_num_threads(1)
    size = dist.get_world_size()
    numel = kib * 256 // size * size
    run(torch.ones(size), torch.ones(1))
    whole, part = torch.ones(numel), torch.ones(numel // size)
    before, taken = reset_peak(), []
    for _ in range(REPEATS):
        dist.barrier()
        start = perf_counter()
        run(whole, part)
        taken.append(perf_counter() - start)
    return Cost(median(taken[WARM:]), peak_bytes() - before)


def slowest(ranks: int, run: Callable[[Tensor, Tensor], None], kib: int) -> Cost:
    found: list[Any] = run_ranks(ranks, measure, run, kib)
    return Cost(max(c.seconds for c in found), max(c.grown_bytes for c in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--kib", type=numbers, default=[16, 256, 4096, 32768])
    options = parser.parse_args()
    print(
        "| collective | ranks | KiB | PyTorch ms | direct ms | ratio | PyTorch MiB | direct MiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (theirs, ours) in WAYS.items():
        for ranks in options.ranks:
            for kib in options.kib:
                old, new = slowest(ranks, theirs, kib), slowest(ranks, ours, kib)
                print(
                    f"| {name} | {ranks} | {kib} | {1e3 * old.seconds:.2f} | "
                    f"{1e3 * new.seconds:.2f} | {new.seconds / old.seconds:.2f} | "
                    f"{old.grown_bytes / MIB:.0f} | {new.grown_bytes / MIB:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
