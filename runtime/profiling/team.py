"""Forked processes that measure together: each has a core, memory bandwidth is shared as in use.

They are given tasks by number, since what is to be measured came with the fork.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from types import TracebackType
from typing import Any

import torch

from meshwright.ir.errors import MeshwrightError
from meshwright.ir.heap import keep_freed_memory

Work = Callable[[int, float, Callable[[bool], bool]], Any]
"""(task number, seconds, agree) -> what one process has measured."""
FAILURES = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
"""What operators raise when they are given something they cannot work with."""
_MEETING_S = 60.0
_PATIENCE_S = 600.0


class Failed(MeshwrightError):
    """One task could not be measured; others can."""


class Team:
    """`count` processes; all gone when the `with` ends."""

    def __init__(self, count: int, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self.count = count
        self._meeting = _Meeting(context, count)
        self._pipes: list[Connection] = []
        self._processes: list[ForkProcess] = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, self._meeting, work), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> "Team":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def measure(self, task: int, budget_s: float) -> list[Any]:
        """What every process says; Failed if one cannot."""
        self.ask(task, budget_s)
        return self.answers()

    def ask(self, task: int, budget_s: float) -> None:
        """Lets every process begin."""
        for pipe in self._pipes:
            pipe.send((task, budget_s))

    def answers(self) -> list[Any]:
        """What every process says that was asked; Failed if one cannot."""
        answers = [self._answer(pipe, rank) for rank, pipe in enumerate(self._pipes)]
        errors = [error for good, error in answers if not good]
        if errors:
            self._meeting.reset()
            raise Failed(next((error for error in errors if error), "processes lost each other"))
        return [record for _, record in answers]

    def _answer(self, pipe: Connection, rank: int) -> tuple[bool, Any]:
        if not wait([pipe], timeout=_PATIENCE_S):
            raise MeshwrightError(f"measuring process {rank} has not answered for {_PATIENCE_S} s")
        try:
            good, found = pipe.recv()
        except EOFError as error:
            self._processes[rank].join(5.0)
            code = self._processes[rank].exitcode
            raise MeshwrightError(
                f"measuring process {rank} died (exit code {code}; -9: memory ran out)"
            ) from error
        return good, found


class _Meeting:
    """Where processes wait for each other and hear what the first of them decided."""

    def __init__(self, context: ForkContext, count: int) -> None:
        self._barrier: Barrier = context.Barrier(count)
        self._decision = context.Value("b", 0, lock=False)

    def agree(self, rank: int, more: bool) -> bool:
        if rank == 0:
            self._decision.value = more
        self._barrier.wait(_MEETING_S)
        decided = bool(self._decision.value)
        self._barrier.wait(_MEETING_S)
        return decided

    def abort(self) -> None:
        self._barrier.abort()

    def reset(self) -> None:
        self._barrier.reset()


def _serve(rank: int, pipe: Connection, meeting: _Meeting, work: Work) -> None:
    """A child's life."""
    # More than one thread in a forked child hangs where the parent has used OpenMP.
    torch.set_num_threads(1)
    keep_freed_memory()
    while True:
        try:
            task, budget_s = pipe.recv()
        except EOFError:
            return
        try:
            found = work(task, budget_s, lambda more: meeting.agree(rank, more))
        except BrokenBarrierError:
            pipe.send((False, ""))
        except FAILURES as error:
            meeting.abort()
            pipe.send((False, f"{type(error).__name__}: {error}"))
        else:
            pipe.send((True, found))


def first_lines(texts: Sequence[str], most: int) -> str:
    """The beginning of a list, for messages."""
    rest = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(text.strip().split("\n")[0][:200] for text in texts[:most]) + rest
