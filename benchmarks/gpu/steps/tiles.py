"""Tiles that were compared by count, timed; and what the device proposes for the file of tiles."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.claim import Claim, fact, fixed
from benchmarks.gpu.step import Fact, Place, Step

PROGRAM = "benchmarks.gpu.tile_times"


def run(place: Place) -> Iterator[Fact]:
    """Yields times of tiles; on a CPU of Triton's interpreter, which it is before it is loaded."""
    if place.device == "cuda":
        from benchmarks.gpu.tile_times import times

        yield from times(place)
        return
    command = (sys.executable, "-m", PROGRAM, place.text())
    told = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=told, stdout=subprocess.PIPE, text=True, check=True)
    for line in ran.stdout.splitlines():
        key, value = json.loads(line)
        yield key, value


STEP = Step(
    name="tiles", does="tiles of products beside peers and of attention, all that were counted",
    order=95, limit_s=30, least_s=10, run=run,
    claims=(
        Claim(text="tiles that were chosen by count are as fast as any that were compared, to a "
                   "tenth", page="results/tiles.md", low=fixed(0.0), high=fixed(1.1),
              measured=fact("tiles/counted_over_best")),
    ),
)  # fmt: skip
