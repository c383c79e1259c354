"""Tuning bucket sizes against a grid of all sizes, on two cases where the default is far off.

python -m benchmarks.dear.tuning [--seeds 10]
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.dear.rows import TABLE
from benchmarks.dear.schedules import Gradient, Line, backward, groups_of, merged_by_bytes
from meshwright.costmodel.stage.program import Do, Step, play, run
from meshwright.runtime.step.tuning import BucketTuner

DEFAULT_BYTES = 25 << 20
LOW_BYTES = 32 << 10
NOISE = 0.02
"""Standard deviation of a step's time, as a share of it."""


@dataclass(frozen=True, slots=True)
class Hard:
    """A model whose layers take equally long and whose sizes are drawn at random."""

    layers: int
    nbytes: int
    compute_s: float
    """A third of it forward."""
    line: Line
    """Of an all-reduce; each half takes half as long."""


HARD = {
    "A: 64 GPUs, 10 GbE, 440 MB": Hard(400, 440_000_000, 0.3, TABLE["10GbE"][64]),
    "B: 8 GPUs, InfiniBand, 100 MB": Hard(160, 100_000_000, 0.06, TABLE["IB"][8]),
}


def step_of(case: Hard) -> Callable[[float], float]:
    """Seconds of a step by bucket size, with gathers that run ahead as far as they can."""
    sizes = np.random.default_rng(7).lognormal(11, 1.6, case.layers)
    each_s = case.compute_s / 3 / case.layers
    gradients = [
        Gradient(2 * each_s, float(nbytes), each_s) for nbytes in sizes / sizes.sum() * case.nbytes
    ]

    def half(nbytes: float) -> float:
        return case.line(nbytes) / 2

    return lambda size: _step_s(gradients, merged_by_bytes(gradients, size), half)


def _step_s(
    gradients: Sequence[Gradient], sizes: Sequence[int], half: Callable[[float], float]
) -> float:
    groups = groups_of(gradients, sizes)[::-1]
    gathers = [
        Step(Do.START, half(sum(g.nbytes for g in group)), job, "gather")
        for job, group in enumerate(groups)
    ]
    forward: list[Step] = []
    for job, group in enumerate(groups):
        forward += [
            Step(Do.WAIT, 0.0, job, "gather"),
            run(sum(g.forward_s for g in group), "forward"),
        ]
    return play((*backward(gradients, sizes, half), *gathers, *forward))[0]


def grid_s(case: Hard) -> float:
    """The best step of all sizes, each 3.5 % above the one before."""
    step = step_of(case)
    sizes = np.geomspace(LOW_BYTES, case.nbytes, 280)
    return min(step(float(size)) for size in sizes)


def tuned_s(case: Hard, seed: int, noise: float) -> float:
    """The step, without noise, with the size that a tuner settles on."""
    step, rng = step_of(case), np.random.default_rng(1000 + seed)
    tuner = BucketTuner(LOW_BYTES, case.nbytes, DEFAULT_BYTES, seed=seed)
    while not tuner.done:
        tuner.took(step(tuner.size_bytes) * (1 + noise * rng.standard_normal()))
    return step(tuner.size_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = range(parser.parse_args().seeds)
    print("| case | best of grid s | 25 MiB | noise | within 2 % | within 4 % | worst |")
    print("|---|---|---|---|---|---|---|")
    for name, case in HARD.items():
        best, default = grid_s(case), step_of(case)(DEFAULT_BYTES)
        for noise in (0.0, NOISE):
            off = [tuned_s(case, seed, noise) / best - 1 for seed in seeds]
            close, near = (sum(x <= limit for x in off) for limit in (0.02, 0.04))
            print(
                f"| {name} | {best:.4f} | +{default / best - 1:.1%} | {noise:.0%} | {close} of "
                f"{len(off)} | {near} of {len(off)} | +{max(off):.1%} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
