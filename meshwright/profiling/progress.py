"""Shows how profiling goes: a bar with what is measured now, on a terminal; silent elsewhere."""

from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from meshwright.ir.text.terminal import Terminal


class ProfilingProgress:
    """Use as a context. Each phase has a bar of its own."""

    def __init__(self, *, show: bool, minutes: float | None) -> None:
        console = Terminal(stderr=True)
        budget = "" if minutes is None else f"of {60 * minutes:.0f} s"
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn(budget),
            TextColumn("{task.fields[current]}", markup=False),
            console=console,
            disable=not show or not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "ProfilingProgress":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def phase(self, name: str) -> "ProfilingProgress":
        """What follows has its own bar."""
        self._task = self._progress.add_task(name, total=None, current="")
        return self

    def update(self, done: int, total: int, current: str) -> None:
        assert self._task is not None
        self._progress.update(self._task, completed=done, total=total, current=current)
