"""A day on a GPU, rehearsed from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.main import ROOT
from tests.warm import load, shell


def day(
    folder: Path, *arguments: str, steps: Path | None = None, fork: bool = False
) -> dict[str, dict]:
    """Runs the command, in a fork of this process or one of its own; the results by step."""
    environment = os.environ | ({"MESHWRIGHT_GPU_STEPS": str(steps)} if steps else {})
    command = ("-m", "benchmarks.gpu", "--rehearse", "--out", str(folder), *arguments)
    if fork:
        load()
        done = shell("python", *command)
    else:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, timeout=300,
                              capture_output=True, text=True)  # fmt: skip
    assert (folder / "results.json").exists(), done.stderr
    found = json.loads((folder / "results.json").read_text())["results"]
    assert all(one["step"] in done.stdout for one in found)
    return {one["step"]: one for one in found}
