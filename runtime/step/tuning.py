"""Tries sizes of gradient buckets while a job trains, and settles on the fastest.

Bayesian optimisation on the logarithm of the size, with the Gaussian process and the expected
improvement of `bayesian-optimization`: few large steps, because a trial costs steps of training.
"""

import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from math import log2
from statistics import median
from typing import Any

from meshwright.ir.errors import MeshwrightError

TRIALS = 10
STEPS = 5
"""Of a trial. The first is not counted: it still waits for buckets of the size before."""
_NOISE = 0.02
"""Variance of a trial's time that is noise, as a share of the variance of all trials."""
_OCTAVES = 1.5
"""By how many doublings sizes lie apart whose times say little of each other. Fixed: ten noisy
times are too few to learn it from."""
_FLAT, _LOOKS = 0.005, 5
"""So many trials that differ by less than this share end the search: sizes make no difference."""


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A size that was tried."""

    size_bytes: int
    seconds: float
    """Median of its counted steps."""


@dataclass(eq=False)
class BucketTuner:
    """The sizes tried so far, and the one to use now.

    One rank holds it and tells the others `size_bytes`: all must use the same buckets.
    """

    low_bytes: int
    """Of the smallest parameter, for example."""
    high_bytes: int
    """Of all gradients."""
    first_bytes: int
    """Tried first: what the planner takes for best."""
    trials: int = TRIALS
    steps: int = STEPS
    seed: int = 0
    done: bool = False
    tried: list[SizeTrial] = field(default_factory=list)
    _times: list[float] = field(default_factory=list)
    _search: Any = None

    def __post_init__(self) -> None:
        if not 0 < self.low_bytes <= self.high_bytes:
            raise ValueError(
                f"bucket sizes from {self.low_bytes} to {self.high_bytes} bytes: the first must be "
                "above 0 and at most the second"
            )
        if self.trials < 1 or self.steps < 2:
            raise ValueError(
                f"{self.trials} trials of {self.steps} steps: at least 1 trial of 2 steps is "
                "needed, as the first step of a trial is not counted"
            )
        self.size_bytes = min(max(self.first_bytes, self.low_bytes), self.high_bytes)
        if self.low_bytes == self.high_bytes:
            self.done = True
        else:
            self._search = _optimizer(log2(self.low_bytes), log2(self.high_bytes), self.seed)

    def took(self, seconds: float) -> bool:
        """Record the seconds of one step; return whether `size_bytes` is another now."""
        if self.done:
            return False
        self._times.append(seconds)
        if len(self._times) < self.steps:
            return False
        self.tried.append(SizeTrial(self.size_bytes, median(self._times[1:])))
        self._times.clear()
        before = self.size_bytes
        self.size_bytes = self._next()
        return self.size_bytes != before

    def _next(self) -> int:
        unit = self.tried[0].seconds
        last = self.tried[-1]
        # Times in units of the first, so that what counts as noise does not depend on the model.
        with redirect_stdout(StringIO()):  # it prints that a size is tried a second time
            self._search.register({"log2": log2(last.size_bytes)}, -last.seconds / unit)
        times = [trial.seconds for trial in self.tried]
        if len(times) >= _LOOKS and max(times) <= (1 + _FLAT) * min(times):
            self.done = True
            return self.tried[0].size_bytes
        if len(times) < self.trials:
            return self._bytes(float(_quietly(self._search.suggest)["log2"]))
        self.done = True
        return self.best_bytes

    @property
    def best_bytes(self) -> int:
        """Of the sizes tried, the one that the process takes for fastest: the least of noisy times
        would be the luckiest. The first before there is one."""
        if not self.tried:
            return self.size_bytes
        return min((trial.size_bytes for trial in self.tried), key=self._expected_s)

    def _expected_s(self, size_bytes: int) -> float:
        """In units of the first trial's."""
        return -float(self._search.predict([{"log2": log2(size_bytes)}])[0])

    def _bytes(self, log: float) -> int:
        return min(max(round(2**log), self.low_bytes), self.high_bytes)


def _optimizer(low: float, high: float, seed: int) -> Any:
    try:
        from bayes_opt import BayesianOptimization, acquisition
        from sklearn.gaussian_process.kernels import (  # type: ignore[import-untyped]
            Matern,
        )
    except ImportError as error:
        raise MeshwrightError(
            "tuning bucket sizes needs the package bayesian-optimization: "
            "pip install 'meshwright[tuning]', or train without tuning"
        ) from error
    made = BayesianOptimization(
        None, {"log2": (low, high)}, random_state=seed, verbose=0, allow_duplicate_points=True,
        acquisition_function=acquisition.ExpectedImprovement(xi=0.0),
    )  # fmt: skip
    kernel = Matern(length_scale=_OCTAVES, length_scale_bounds="fixed", nu=2.5)
    made.set_gp_params(alpha=_NOISE, kernel=kernel)
    return made


def _quietly(call: Callable[[], Any]) -> Any:
    """Without the warnings of a fit that ends at a bound of its length scale."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()
