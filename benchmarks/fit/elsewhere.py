"""By how much figures of one machine miss those of others of its kind: the constants of
`costmodel/elsewhere.py`.

python -m benchmarks.fit.elsewhere CALIBRATE_DIR

CALIBRATE_DIR holds matmul_measured.json, network_collectives_measured.json and
hf_ultrascale_scaling_and_bandwidth.json. Each constant is conformal: the least error that covers
four fifths of what may come next, if it comes as these did. No training run that a page reports is
read.
"""

import json
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fit.link_tables import PLAYBOOK, PLAYBOOK_BYTES, Series, other_series
from meshwright.costmodel import elsewhere
from meshwright.costmodel.comm.comm import Level, Levels, collective_time
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.presets import DEVICES, LINKS

PRODUCTS_FILE = "matmul_measured.json"
SHARE = 0.8
_RATES = ("fp16_tflops", "bf16_tflops", "best_tflops")
_LARGE_BYTES = 2**24
"""Of messages that take their bandwidth: of most bytes of gradients and of layers."""
_FEW = 8
"""Nodes; over more of them gathers of that cluster took up to 3.5 times as long as predicted."""
_OWN = "nvlink2"
"""The link whose curves come from the same source."""
_PARTS = (r"A[18]00(?!.*PCI)", r"H100(?!.*PCI)", r"H[18]00.PCI", r"V100", r"\bT4\b", r"4090(?!D)",
          r"3090(?! Ti)")  # fmt: skip
"""Parts that presets are of and at least three people tested, by their names in that table."""
Weighted = tuple[float, float]
"""(error, weight)."""


def least_covering(errors: Sequence[Weighted], share: float = SHARE) -> float:
    """Returns the least error that covers this share of one more case, all cases together being as
    likely in any order; infinite where there are too few."""
    left = share * (sum([weight for _, weight in errors]) + 1.0)
    for error, weight in sorted(errors):
        left -= weight
        if left <= 1e-9:
            return error
    return inf


def products(rows: Sequence[dict[str, Any]]) -> list[Weighted]:
    """Of each test of a part: what the others would say of it."""
    found = []
    for part in _PARTS:
        tests = [max(said) for row in rows if re.search(part, str(row["gpu"]))
                 and row.get("precision", "bf16") == "bf16"
                 and (said := [row[key] for key in _RATES if key in row])]  # fmt: skip
        for i, rate in enumerate(tests):
            found.append((abs(median([*tests[:i], *tests[i + 1 :]]) / rate - 1), 1.0))
    return found


def whole_runs() -> list[Weighted]:
    """What would be missed on parts whose factor is known if it were not."""
    curves = [device.curves.get(OpClass.MATMUL) for device in DEVICES.values()]
    known = {factor for curve in curves if curve for _, factor in curve.sustained}
    return [(abs(1 / factor - 1), 1.0) for factor in sorted(known)]


def inside(series: Sequence[Series]) -> list[Weighted]:
    """Of large messages in nodes of other sources than the curves'; each source counts alike."""
    sites: dict[str, list[float]] = {}
    for one in series:
        if one.nodes > 1 or one.link == _OWN:
            continue
        for row in one.rows:
            if row.nbytes >= _LARGE_BYTES:
                levels = (Level(row.size, LINKS[one.link]),)
                predicted_s = collective_time(Primitive(row.operation), row.nbytes, levels)
                sites.setdefault(one.source, []).append(abs(row.seconds / predicted_s - 1))
    return [(error, 1 / len(errors)) for errors in sites.values() for error in errors]


def between(rows: Sequence[Mapping[str, Any]]) -> Iterator[Weighted]:
    """Of collectives over a few nodes of another cluster with the same cards, in its fastest jobs:
    most of the others had each collective checked (`ir/styles/nanotron_checked.py`)."""
    for row in rows:
        if row["kind"] != "collective_bandwidth" or not 1 < row["hardware"]["nodes"] <= _FEW:
            continue
        near, nodes = row["hardware"]["gpus_per_node"], row["hardware"]["nodes"]
        levels: Levels = (Level(near, LINKS["nvlink4"]), Level(nodes, LINKS["efa-p5"]))
        operation, gpus = Primitive(row["collective"]), near * nodes
        rounds = 2 if operation is Primitive.ALL_REDUCE else 1
        sent = rounds * PLAYBOOK_BYTES * (gpus - 1) / gpus
        measured_s = sent / (row["measured"]["band_high"] * 1e9)
        yield abs(measured_s / collective_time(operation, PLAYBOOK_BYTES, levels) - 1), 1.0


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if missing := [n for n in (PRODUCTS_FILE, PLAYBOOK) if not (folder / n).is_file()]:
        print(f"{folder} lacks {', '.join(missing)}; give the calibration tables", file=sys.stderr)
        return 2
    tests = json.loads((folder / PRODUCTS_FILE).read_text())["rows"]
    jobs = json.loads((folder / PLAYBOOK).read_text())["rows"]
    for what, errors, ships in (
        ("products", products(tests), elsewhere.PRODUCTS),
        ("whole runs", whole_runs(), elsewhere.RUNS),
        ("inside nodes", inside(other_series(folder)), elsewhere.INSIDE),
        ("between nodes", list(between(jobs)), elsewhere.BETWEEN),
    ):
        print(f"{what:14} {len(errors):4} cases: {least_covering(errors):.3f}, ships {ships}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
