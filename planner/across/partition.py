"""Dynamic programming over block boundaries and devices: the best stages of a pipeline.

A step of a pipeline takes about the path of one micro-batch through all stages plus the load of the
busiest stage (PipeDream, DAPPLE). For a limit on the load, the shortest path is found exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.deadline import check_time
from meshwright.planner.across.run_classes import RunClasses
from meshwright.planner.across.spans import Matrix
from meshwright.planner.across.stage_options import Fitted
from meshwright.planner.problem.space import Mesh


@dataclass(frozen=True, slots=True)
class StagePart:
    """A stage of the answer: blocks `start` to `stop` on `size` devices."""

    start: int
    stop: int
    first: int
    """Place of its first device."""
    mesh: Mesh
    saved: float
    """Of what recomputing all that can be would save, the share that must be."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a partition is asked for."""

    classes: RunClasses
    num_blocks: int
    num_devices: int
    num_stages: int
    sizes: tuple[int, ...]
    """Numbers of devices that a stage may have."""
    fitted: Callable[[int, int, int], Fitted | None]
    """(stage, first place, size) -> what each way to run it takes."""
    keeping: Callable[[int, int, int], Fitted | None]
    """The same if all activations were kept, whether they fit or not."""
    pins: Mapping[int, int]
    """Block -> stage."""

    def beginning_with(self, size: int) -> "Pipeline":
        """The same with so many devices for the first stage."""

        def fitted(stage: int, first: int, asked: int) -> Fitted | None:
            return None if stage == 0 and asked != size else self.fitted(stage, first, asked)

        return replace(self, fitted=fitted)


Measure = Callable[[Fitted], Matrix]
"""What counts of stages: [mesh, kind of run], infinite where not allowed."""


def load(fitted: Fitted) -> Matrix:
    """Seconds of load of stages that fit."""
    return fitted.load_s


def step(fitted: Fitted) -> Matrix:
    """Seconds of a step of a stage that is all alone."""
    return fitted.path_s + fitted.load_s


def path_within(limit_s: float) -> Measure:
    """Seconds of path of stages that fit and have at most that load."""

    def measure(fitted: Fitted) -> Matrix:
        return np.where(fitted.load_s <= limit_s, fitted.path_s, np.inf)

    return measure


def memory(fitted: Fitted) -> Matrix:
    """Bytes that stages need at least, whether they fit or not."""
    return fitted.least_bytes


@dataclass(slots=True)
class _Row:
    """Best values per number of blocks done, and how they were reached."""

    value: Matrix
    start: NDArray[np.int64]
    size: NDArray[np.int64]
    mesh: NDArray[np.int64]

    @classmethod
    def empty(cls, num_blocks: int) -> "_Row":
        zeros = np.zeros(num_blocks + 1, dtype=np.int64)
        return cls(np.full(num_blocks + 1, np.inf), zeros, zeros.copy(), zeros.copy())


def solve(
    asked: Pipeline, measure: Measure, *, join: np.ufunc
) -> tuple[float, tuple[StagePart, ...]] | None:
    """Stages of least sum (`join` np.add) or least maximum (np.maximum) of the measure."""
    rows: list[dict[int, _Row]] = [{0: _Row.empty(asked.num_blocks)}]
    rows[0][0].value[0] = 0.0 if join is np.add else -np.inf
    for stage in range(asked.num_stages):
        found: dict[int, _Row] = {}
        for used, row in rows[-1].items():
            check_time()
            for size in _sizes(asked, stage, used):
                _extend(asked, stage, used, size, row, found, measure, join)
        rows.append(found)
    last = rows[-1].get(asked.num_devices)
    if last is None or not np.isfinite(last.value[asked.num_blocks]):
        return None
    return float(last.value[asked.num_blocks]), _trace_back(asked, rows, measure)


def _sizes(asked: Pipeline, stage: int, used: int) -> Sequence[int]:
    left, after = asked.num_devices - used, asked.num_stages - stage - 1
    if after == 0:
        return (left,) if left in asked.sizes else ()
    return [size for size in asked.sizes if size + after * min(asked.sizes) <= left]


def _extend(
    asked: Pipeline,
    stage: int,
    used: int,
    size: int,
    row: _Row,
    found: dict[int, _Row],
    measure: Measure,
    join: np.ufunc,
) -> None:
    fitted = asked.fitted(stage, used, size)
    if fitted is None:
        return
    values = measure(fitted)
    best, pick = values.min(axis=0), values.argmin(axis=0)
    at = asked.classes.places  # all borders if blocks are pinned
    total = join(row.value[at, None], asked.classes.spread(best))
    for block, wanted in asked.pins.items():
        inside = np.zeros_like(total, dtype=bool)
        inside[: block + 1, block + 1 :] = True
        total[inside if stage != wanted else ~inside] = np.inf
    start, value = at[total.argmin(axis=0)], total.min(axis=0)
    target = found.setdefault(used + size, _Row.empty(asked.num_blocks))
    better = value < target.value[at]
    reached = at[better]
    target.value[reached] = value[better]
    target.start[reached] = start[better]
    target.size[reached] = size
    target.mesh[reached] = pick[asked.classes.index[start, at]][better]


def _trace_back(
    asked: Pipeline, rows: list[dict[int, _Row]], measure: Measure
) -> tuple[StagePart, ...]:
    stop, used = asked.num_blocks, asked.num_devices
    parts: list[StagePart] = []
    for stage in range(asked.num_stages, 0, -1):
        row = rows[stage][used]
        start, size, mesh = int(row.start[stop]), int(row.size[stop]), int(row.mesh[stop])
        used -= size
        fitted = asked.fitted(stage - 1, used, size)
        assert fitted
        again = float(fitted.share[mesh, asked.classes.index[start, stop]])
        if measure is memory or again > 1.0:
            again = float(len(fitted.options.more()) > 0)
        parts.append(StagePart(start, stop, used, fitted.options.meshes[mesh], again))
        stop = start
    return tuple(reversed(parts))
