"""Collectives over NCCL beside the link model; with two GPUs or more."""

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median

from benchmarks.gpu.claim import Claim, banded, fact, fixed
from benchmarks.gpu.step import Fact, Place, Step
from meshwright.ir.cluster.device import OPERATIONS

_START_S = 12.0
"""Of ranks, before they measure."""
_MOST = 8
"""Ranks."""


def run(place: Place) -> Iterator[Fact]:
    """Yields per operation, over sizes and groups, the model's times over the measured ones."""
    import torch

    ranks = 2 if place.rehearsal else min(_MOST, torch.cuda.device_count())
    budget = 2.0 if place.rehearsal else max(3.0, place.left_s - 2 * _START_S)
    preset = place.cluster().device_types[0].name
    path = place.out / "links.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(ranks), "-m", "benchmarks.gpu.link_ranks", str(path), preset,
               str(budget)]  # fmt: skip
    subprocess.run([*command, *(["4096"] if place.rehearsal else [])], check=True)
    rows = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    yield "ranks", ranks
    yield "records", len(rows)
    for operation in OPERATIONS:
        own = [row for row in rows if row["operation"] == operation]
        if own:
            ratios = [row["predicted_s"] / row["measured_s"] for row in own]
            yield f"{operation}/count", len(own)
            yield f"{operation}/model_over_measured", median(ratios)
            yield f"{operation}/worst", max(ratios, key=lambda x: max(x, 1 / x))
            yield f"{operation}/band", max(row["band"] for row in own)
            large = max(own, key=lambda row: (row["nbytes"], row["size"]))
            yield f"{operation}/largest_bytes", large["nbytes"]
            yield f"{operation}/largest_s", large["measured_s"]


STEP = Step(
    name="links", does="NCCL's collectives beside the link model", order=52, limit_s=60,
    least_s=30, gpus=2, run=run,
    claims=tuple(
        Claim(
            text=f"{operation}: the link model gives what it takes, at the median, within its band",
            page="results/links.md", low=banded(fixed(1), f"{operation}/band", -1),
            high=banded(fixed(1), f"{operation}/band", 1),
            measured=fact(f"{operation}/model_over_measured"),
        )
        for operation in OPERATIONS
    ),
)  # fmt: skip
