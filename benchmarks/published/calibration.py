"""The training runs of the calibration part, which set what nanotron's rows need.

python -m benchmarks.published.calibration CALIBRATE_DIR

Their networks were not measured: they are taken as those of the cluster's unchecked jobs.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.published.efa import usual_rates
from benchmarks.published.predict import predict
from benchmarks.published.rows import Context, Row, read_row

TABLE = "hf_ultrascale_scaling_and_bandwidth.json"
_GBS = 256
"""Sequences of dp_scaling, by the rows of the sweep that its note names."""
_PER_NODE = 8


def runs(folder: Path) -> Iterator[tuple[str, Row]]:
    """Kind and row of each run."""
    data = json.loads((folder / TABLE).read_text())
    context = Context("hf_ultrascale nanotron", {}, "nanotron")
    for index, raw in enumerate(data["rows"]):
        if raw["kind"].endswith("_scaling"):
            yield raw["kind"], read_row(_completed(raw), index, context)


def _completed(raw: dict[str, Any]) -> dict[str, Any]:
    gpus, nodes = raw["hardware"]["gpus"], raw["hardware"]["gpus"] // _PER_NODE
    batch = raw["measured"].get("max_micro_batch_that_fits")
    sizes = {"mbs": batch, "gbs": batch} if batch else {"mbs": min(2, _GBS // gpus), "gbs": _GBS}
    return {
        **raw,
        "model": {**raw["model"], "kv_heads": raw["model"]["heads"], "tied": True},
        "parallel": {"zero": 0, **raw["parallel"]},
        "batch": {**raw["batch"], **sizes},
        "network_gb_s": usual_rates(nodes) if nodes > 1 else {},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help=f"folder with {TABLE}")
    folder = parser.parse_args().folder
    if not (folder / TABLE).is_file():
        print(f"{folder} lacks {TABLE}; give the calibration part", file=sys.stderr)
        return 2
    for kind, row in runs(folder):
        assert row.step_s is not None
        step_s = predict(row).step_s
        print(f"{kind:14} {row.gpus:4} GPUs mbs {row.mbs:3} {row.step_s:7.3f} s -> {step_s:7.3f} "
              f"{step_s / row.step_s - 1:+6.1%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
