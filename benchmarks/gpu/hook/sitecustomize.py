"""Has every Python that a rehearsal starts note what it has loaded when it ends."""

import atexit
import sys
from pathlib import Path


def _note() -> None:
    sys.path.append(str(Path(__file__).parents[3]))
    from benchmarks.gpu.seen import note_modules

    note_modules()


atexit.register(_note)
