"""DDP, FSDP2 and torch's pipelining beside jobs of ours; with two GPUs or more."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.claim import Claim, fact, fixed, on_page
from benchmarks.gpu.step import Fact, Place, Step

PROGRAM = Path(__file__).parents[2] / "vs_torch.py"
_LINE = re.compile(
    r"^(?P<name>\w[\w ]*?\w)\s+meshwright\s+(?P<ours>[\d.]+) tokens/s\s+torch\s+(?P<torch>[\d.]+) "
    r"tokens/s\s+ratio (?P<ratio>[\d.]+)", re.MULTILINE,
)  # fmt: skip
RIVALS = ("DDP", "FSDP2", "torch pipelining 1F1B")


def run(place: Place) -> Iterator[Fact]:
    """Yields tokens per second of both, and the ratio, per rival."""
    command = [sys.executable, str(PROGRAM), "--ranks", "2", "--pairs", str(place.of(12, 1))]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    yield from read(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{PROGRAM.name} ended with {done.returncode}: {done.stderr[-500:]}")


def read(printed: str) -> Iterator[Fact]:
    """Yields the facts of what the program printed."""
    for match in _LINE.finditer(printed):
        yield f"{match['name']}/ours_tokens_per_s", float(match["ours"])
        yield f"{match['name']}/torch_tokens_per_s", float(match["torch"])
        yield f"{match['name']}/ratio", float(match["ratio"])


STEP = Step(
    name="rivals", does="torch's own engines beside jobs of ours", order=54, limit_s=90,
    least_s=40, gpus=2, run=run,
    claims=tuple(
        Claim(
            text=f"a job is as fast beside {name} on GPUs as on CPUs", page="results/vs_torch.md",
            low=on_page("results/vs_torch.md", rf"{name}\s.*?ratio ([\d.]+)"), high=fixed(9.0),
            measured=fact(f"{name}/ratio"),
        )
        for name in RIVALS
    ),
)  # fmt: skip
