"""Spares of a supervisor: processes that have imported what ranks do, and become ranks at once."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from meshwright.running import spare
from meshwright.runtime.world import children

USUAL = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
"""Of every rank, unless the user says otherwise: ranks share the cores, as under torchrun, and the
profiler of the traced step talks. Read as torch is imported."""


@dataclass(eq=False)
class Spares:
    """So many of a machine at most; inside `with`, at the end of the block none is left."""

    count: int
    stdout: int | None = None
    """Where what they print goes; None: where this process's goes."""
    _waiting: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._waiting:
            process.kill()
        for process in self._waiting:
            process.communicate()  # it also closes the pipe

    @property
    def pids(self) -> set[int]:
        """Of those that wait."""
        return {process.pid for process in self._waiting}

    @property
    def are_missing(self) -> bool:
        """Whether there are fewer than there should be. One that has died has no successor: where
        memory is short, it would go the same way."""
        alive = [process for process in self._waiting if process.poll() is None]
        self.count -= len(self._waiting) - len(alive)
        self._waiting = alive
        return len(alive) < self.count

    def add_one(self) -> None:
        """Starts one. On a thread that lives as long as it is to live."""
        process = subprocess.Popen(
            [sys.executable, "-m", spare.__name__], start_new_session=True,
            stdin=subprocess.PIPE, stdout=self.stdout, env={**USUAL, **os.environ},
            preexec_fn=children.dying_with_parent(),
        )  # fmt: skip
        self._waiting.append(process)

    def become(
        self, environment: Mapping[str, str], arguments: Sequence[str]
    ) -> subprocess.Popen[bytes] | None:
        """One that is the command `meshwright` with these arguments from now on; None if there is
        none."""
        while self._waiting:
            process = self._waiting.pop(0)
            assert process.stdin is not None
            with suppress(OSError), process.stdin as pipe:  # it has died
                pipe.write(spare.order(environment, arguments))
            if process.poll() is None:
                return process
        return None
