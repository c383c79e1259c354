"""A day on a GPU, rehearsed from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.main import ROOT


def day(folder: Path, *arguments: str, steps: Path | None = None) -> dict[str, dict]:
    """Runs the command; the results by step."""
    environment = os.environ | ({"MESHWRIGHT_GPU_STEPS": str(steps)} if steps else {})
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(folder)]
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, timeout=300,
                          capture_output=True, text=True)  # fmt: skip
    assert (folder / "results.json").exists(), done.stderr
    found = json.loads((folder / "results.json").read_text())["results"]
    assert all(one["step"] in done.stdout for one in found)
    return {one["step"]: one for one in found}
