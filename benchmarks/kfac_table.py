"""SPD-KFAC's published step times (Shi et al., ICDCS 2021) beside ours, from its component times.

python -m benchmarks.kfac_table

Four models on 64 RTX 2080 Ti with 100 Gb/s InfiniBand. Given are the component times of D-KFAC, the
factors' sizes, the authors' constants of a broadcast and of an all-reduce's start, and the table's
column of inverses that are not shared out. Predicted are inverses that are shared out (in turn, and
as SPD-KFAC's code has it), the step of MPD-KFAC, and what sending factors as forward and backward
go on saves:
`forms.sync.kfac` as a table of what is sent, priced and played by the cost model. How much messages
and kernels slow each other down is set by ResNet-50's column of that alone; the other models' are
predicted.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from meshwright.costmodel.comm.comm import Level
from meshwright.costmodel.ops.overheads import Overheads
from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F
from meshwright.costmodel.stage.buckets import Owned, buckets
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.program import play
from meshwright.costmodel.stage.replica_lines import ReplicaLines
from meshwright.costmodel.stage.sync import Sync
from meshwright.costmodel.stage.times import BlockTimes
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event, Shaped
from meshwright.forms.placing import ALL, MatrixTask, placed
from meshwright.forms.sync import kfac, zero0
from meshwright.ir.cluster.device import DeviceType, Link

RANKS, VALUE = 64, 4
AGREE_S = 8.063e-4
"""Until ranks have agreed on a tensor and a collective of it begins, one at a time: as measured by
the authors (`benchmarks.dear.rows`); ranks agree on the next tensor while one goes."""
BROADCAST = 40 * 6.374e-6, 1.840e-10
"""Seconds, and seconds a byte, of a broadcast to 64 ranks: of the authors' code."""
FORWARD = 1 / 3
"""Of forward and backward."""


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one model, as published."""

    batch: int
    parts: tuple[float, float, float, float]
    """D-KFAC's step until: forward and backward, gradients, factors made, factors summed."""
    dkfac: float
    mpd: float
    spd: float
    piped: float
    """SPD without its rule for inverses."""
    ruled: float
    """SPD without sending factors early."""
    alone: float
    """Inverses that all ranks make."""
    in_turn: float
    by_rule: float
    factors_early: float
    """Factors, made and summed, at best."""


ROWS = {
    "ResNet-50": Row(32, (0.132, 0.197, 0.408, 0.578), 0.8525, 0.7635, 0.6755, 0.7806, 0.7474,
                     0.2742, 0.1852, 0.1691, 0.3096),
    "ResNet-152": Row(8, (0.114, 0.273, 0.466, 0.905), 1.5807, 1.3933, 1.1689, 1.4176, 1.3319,
                      0.6759, 0.4917, 0.4271, 0.4687),
    "DenseNet-201": Row(16, (0.178, 0.364, 0.683, 1.015), 1.4964, 1.5340, 1.3615, 1.4061, 1.4519,
                        0.4818, 0.5032, 0.4373, 0.5600),
    "Inception-v4": Row(16, (0.134, 0.267, 0.465, 0.755), 1.1857, 1.1473, 0.9907, 1.0941, 1.0823,
                        0.4306, 0.3926, 0.3272, 0.3967),
}  # fmt: skip
CALIBRATES = "ResNet-50"


@cache
def layers(model: str) -> tuple[tuple[int, int, int], ...]:
    """(columns, rows, positions) of each layer, as the forward reads them."""
    text = (Path(__file__).parent / "kfac_layers.json").read_text()
    return tuple(tuple(layer) for layer in json.loads(text)[model])


def dims(model: str) -> list[int]:
    """Sizes of all factors, layer by layer."""
    return [n for columns, rows, _ in layers(model) for n in (columns, rows)]


@cache
def fitted() -> tuple[tuple[float, float], tuple[float, float]]:
    """(seconds, seconds per squared size) of an inverse; (seconds, seconds a byte) of the sum of a
    factor's triangle: of the given columns of all models, least squares of relative errors."""
    inverses = [(len(dims(m)), sum([n * n for n in dims(m)]), r.alone) for m, r in ROWS.items()]
    sums = [
        (len(dims(m)), sum([VALUE * n * (n + 1) / 2 for n in dims(m)]), r.parts[3] - r.parts[2])
        for m, r in ROWS.items()
    ]
    return _fit(inverses), _fit(sums)


def _fit(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    scaled = np.array([(count / s, size / s) for count, size, s in rows])
    (each, per), *_ = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)
    return float(each), float(per)


def inverse_s(size: int) -> float:
    """Seconds to invert a factor."""
    (each, per), _ = fitted()
    return each + per * size**2


def told_s(size: int) -> float:
    """Seconds until all have an inverse: whole matrices, beside which ranks agree on the next."""
    each, per = BROADCAST
    return max(AGREE_S, each + per * VALUE * size**2)


def tasks(model: str) -> list[MatrixTask]:
    """Inverses."""
    return [MatrixTask(inverse_s(n), told_s(n)) for n in dims(model)]


def takes(found: Sequence[MatrixTask], of: Sequence[int], ranks: int = RANKS) -> float:
    """Seconds of inverses that are shared out so."""
    loads, common = [0.0] * ranks, 0.0
    for task, rank in zip(found, of, strict=True):
        common += task.work if rank == ALL else task.told
        if rank != ALL:
            loads[rank] += task.work
    return common + max(loads)


def in_turn(found: Sequence[MatrixTask], ranks: int = RANKS) -> list[int]:
    """MPD-KFAC's owners: factors of a layer apart where there are more ranks than layers."""
    apart = ranks > len(found) / 2
    return [(i if apart else i // 2) % ranks for i in range(len(found))]


def longest_first(found: Sequence[MatrixTask], ranks: int = RANKS) -> list[int]:
    """Graham's: each to whom has least, the longest first."""
    return _least_loaded([t.work for t in found], ranks, lambda i: False)


def by_rule(found: Sequence[MatrixTask], sizes: Sequence[int], ranks: int = RANKS) -> list[int]:
    """The paper's rule: by all where that takes less than telling, else to whom has least, by
    size."""
    return _least_loaded(sizes, ranks, lambda i: found[i].work < found[i].told)


LEAST_APART = 1400
"""Size from which on an inverse is not made by all: of the authors' code (7 January 2021), in which
the comparison of times that the paper tells of is a comment."""


def by_code(sizes: Sequence[int], ranks: int = RANKS) -> list[int]:
    """SPD-KFAC's as its code has it: by all where a matrix is small, else to whom has least, by
    size."""
    return _least_loaded(sizes, ranks, lambda i: sizes[i] < LEAST_APART)


def _least_loaded(sizes: Sequence[float], ranks: int, by_all: Callable[[int], bool]) -> list[int]:
    loads, of = [0.0] * ranks, [ALL] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if not by_all(i):
            of[i] = loads.index(min(loads))
            loads[of[i]] += sizes[i]
    return of


def saved_s(model: str, slowed: float, limit_bytes: float) -> float:
    """Seconds that a step is shorter where factors go as forward and backward go on, in messages of
    so many bytes of parameters; `slowed`: how much longer messages and kernels take together."""
    shapes = [Shaped((rows, columns), VALUE * rows * columns) for columns, rows, _ in layers(model)]
    early = kfac.describe(RANKS, 0, {"sends": "nothing", "kl_clip": 0.0}, shapes, 1)
    late = Exchange(zero0.describe(RANKS).rows)
    took = [_step_s(model, table, slowed, limit_bytes) for table in (_only_sends(early), late)]
    before = ROWS[model].parts
    return took[1] + before[3] - before[2] - took[0]


def _only_sends(made: Exchange) -> Exchange:
    """Without work, which is given."""
    rows = [row for row in made.rows if getattr(row, "at", None) in (
        Event.LAST_FORWARD, Event.AFTER_LAST) and hasattr(row, "primitive")]  # fmt: skip
    return Exchange((*rows, *made.holds), stated=made.stated)


def _step_s(model: str, table: Exchange, slowed: float, limit_bytes: float) -> float:
    _, (each, per) = fitted()
    link = Link(
        name="IB", bandwidth_bytes_per_s=2 * (RANKS - 1) / RANKS / per, latency_s=0.0,
        launch_s=each, overlap_compute_slowdown=slowed, overlap_comm_slowdown=slowed,
    )  # fmt: skip
    row = ROWS[model]
    made = layers(model)
    products = [float(columns * rows * at) for columns, rows, at in made]
    squares = [(float(at * c * c), float(at * o * o)) for c, o, at in made]
    ops_s = row.parts[0] / sum(products)
    factor_s = (row.parts[2] - row.parts[1]) / sum([sum(pair) for pair in squares])
    blocks = tuple(
        BlockTimes(
            forward_s=FORWARD * ops_s * n + factor_s * read, tensor_forward_s=0.0, again_s=0.0,
            input_s=0.0, weight_s=(1 - FORWARD) * ops_s * n + factor_s * back, accumulate_s=0.0,
            split_s=0.0, tensor_backward_s=0.0,
        )
        for n, (read, back) in zip(products, squares, strict=True)
    )  # fmt: skip
    sizes = [VALUE * columns * rows for columns, rows, _ in made]
    owned = [Owned(n, n, 1, n, n, (("float32", n, 1),)) for n in sizes]
    group = FormGroup(table, buckets(owned, round(limit_bytes)), tuple(sizes),
                      lines=ReplicaLines(dp=(Level(RANKS, link),), ranks=RANKS))  # fmt: skip
    free = DeviceType(name="given", kind="cuda", memory_bytes=2**34,
                      memory_bandwidth_bytes_per_s=1e15, peak_flops={"float32": 1e15})  # fmt: skip
    sync = Sync(groups=(group,), prefetch=0, blocks=blocks, prelude_s=0.0,
                overheads=Overheads(0.0, 0.0, 0.0, free))  # fmt: skip
    programs = sync.programs()
    forward_s = play(programs[F].steps)[0]
    steps = (*programs[B + LAST].steps, *sync.finish(()))
    return forward_s + play(steps, overlap=sync.overlap)[0]


SIZES = (1e6, 2.5e6, 6e6, 12e6, 25e6)
"""Bytes of parameters whose factors go together, among which the best is taken: SPD fuses too."""


def best_saved_s(model: str, slowed: float) -> float:
    """With the best of `SIZES`."""
    return max(saved_s(model, slowed, limit) for limit in SIZES)


@cache
def calibrated() -> float:
    """By how much messages and kernels slow each other down, of one model's published saving."""
    row = ROWS[CALIBRATES]
    wanted = row.parts[3] - row.parts[1] - row.factors_early
    low, high = 1.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if best_saved_s(CALIBRATES, middle) > wanted else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Told:
    """Seconds as predicted."""

    in_turn: float
    by_code: float
    by_rule: float
    """As the paper has it."""
    ours: float
    """Inverses, placed by `forms.placing`."""
    mpd: float
    piped: float
    ruled: float
    spd: float
    with_ours: float
    factors_early: float


def predicted(model: str) -> Told:
    """Returns the columns of one model."""
    row, found = ROWS[model], tasks(model)
    turn, code = takes(found, in_turn(found)), takes(found, by_code(dims(model)))
    rule = takes(found, by_rule(found, dims(model)))
    ours = placed(found, RANKS, by_all=True).takes
    saved = best_saved_s(model, calibrated())
    rest = row.dkfac - row.alone
    return Told(
        turn, code, rule, ours, mpd=rest + turn, piped=row.dkfac - saved, ruled=rest + code,
        spd=rest + code - saved, with_ours=rest + ours - saved,
        factors_early=row.parts[3] - row.parts[1] - saved,
    )  # fmt: skip


COLUMNS: dict[str, tuple[Callable[[Row], float], Callable[[Told], float]]] = {
    "MPD": (lambda r: r.mpd, lambda t: t.mpd),
    "SPD": (lambda r: r.spd, lambda t: t.spd),
    "factors early only": (lambda r: r.piped, lambda t: t.piped),
    "rule only": (lambda r: r.ruled, lambda t: t.ruled),
    "factors, early": (lambda r: r.factors_early, lambda t: t.factors_early),
    "inverses in turn": (lambda r: r.in_turn, lambda t: t.in_turn),
    "inverses by code": (lambda r: r.by_rule, lambda t: t.by_code),
}


def main() -> None:
    """Prints the table."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    console = Console(width=160)
    shown = Table("model", *COLUMNS, "by paper's rule", "ours", "SPD with ours")
    for model, row in ROWS.items():
        told = predicted(model)
        cells = [
            f"{of(told):.4f} / {published(row):.4f} ({of(told) / published(row) - 1:+.1%})"
            for published, of in COLUMNS.values()
        ]
        last = (told.by_rule, told.ours, told.with_ours)
        shown.add_row(model, *cells, *[f"{seconds:.4f}" for seconds in last])
    console.print(shown)
    inverse, sums = fitted()
    print(f"inverse {inverse[0]:.3g} s + {inverse[1]:.3g} s n^2; sum {sums[0]:.3g} s + "
          f"{sums[1]:.3g} s a byte; together {calibrated():.3f} times as long")  # fmt: skip


if __name__ == "__main__":
    main()
