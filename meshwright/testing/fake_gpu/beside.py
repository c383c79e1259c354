"""Runs one function in a process of its own that can have fake GPUs."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.testing.fake_gpu.process import HERE, guard

_GIVEN, _RESULT = "given.pickle", "result.pickle"


def beside_guard(function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> Any:
    """Returns what the function does in such a process. It must not load the planner: OR-Tools
    dies beside what makes torch believe in the GPU."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / _GIVEN).write_bytes(pickle.dumps((function, args)))
        subprocess.run(
            [sys.executable, "-m", __name__, name],
            check=True, timeout=timeout_s, cwd=HERE.parents[2],
            env={**os.environ, "LD_PRELOAD": str(guard())},
        )  # fmt: skip
        return pickle.loads((folder / _RESULT).read_bytes())


def _main(folder: Path) -> None:
    function, args = pickle.loads((folder / _GIVEN).read_bytes())
    (folder / _RESULT).write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # What was asked for is on disk. torch's threads for backwards on a device may be at work when
    # Python and then C++ take down what they use, and a process then ends by SIGABRT now and then.
    os._exit(0)
