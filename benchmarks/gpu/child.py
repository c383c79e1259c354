"""One step in a process of its own: facts go to a file as they come, the end as the last line.

`python -m benchmarks.gpu.child STEP PLACE FACTS` where a fork of the runner is not enough.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from benchmarks.gpu.seen import note_modules
from benchmarks.gpu.step import Place, Step, checked, load_steps
from meshwright.runtime.world.children import die_with_parent

DONE = "done"
FAILED = "failed"
_WORST_FIRST = 1000
"""Of oom_score_adj: where memory runs out, Linux kills a step before the runner."""


def become(step: Step, place: Place, facts: Path, log: Path, *, anew: bool) -> NoReturn:
    """Turn this forked process into the step, which begins `anew` in a Python of its own if forks
    have no use of the device; it never comes back.

    Lines of `facts` are `["fact", key, value]`, and at the end `["done"]` or `["failed", why]`.
    What the step prints goes to `log`.
    """
    code = 1
    try:
        os.setsid()
        die_with_parent()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_WORST_FIRST))
        _redirect(log)
        if anew:
            command = (sys.executable, "-m", __name__, step.name, place.text(), str(facts))
            os.execv(sys.executable, command)
        code = _tell(step, place, facts)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _redirect(log: Path) -> None:
    """Output goes to the log, input is empty."""
    nothing, kept = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(nothing, 0)
    os.dup2(kept, 1)
    os.dup2(kept, 2)


def _tell(step: Step, place: Place, facts: Path) -> int:
    """Runs the step; its exit code."""
    try:
        return _facts_of(step, place, facts)
    finally:
        note_modules()


def _facts_of(step: Step, place: Place, facts: Path) -> int:
    with facts.open("a", encoding="utf-8") as file:

        def write(*line: object) -> None:
            # On a line of its own, whatever else was written there.
            file.write(f"\n{json.dumps(line, allow_nan=False)}\n")
            file.flush()

        try:
            for found in step.run(place):
                write("fact", *checked(found))
        except BaseException as error:
            traceback.print_exc()
            write(FAILED, f"{type(error).__name__}: {error}"[:1000])
            return 1
        write(DONE)
    return 0


def main() -> None:
    """Runs the step that the command line names."""
    die_with_parent()
    name, place, facts = sys.argv[1:]
    (step,) = (step for step in load_steps() if step.name == name)
    raise SystemExit(_tell(step, Place.of_text(place), Path(facts)))


if __name__ == "__main__":
    main()
