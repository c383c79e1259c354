"""What a training run shows: loss, tokens per second, memory; and leaves as JSON lines."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshwright.ir.profile.measured import StepKind
from meshwright.ir.text.terminal import Terminal
from meshwright.ir.text.units import size
from meshwright.runtime.record.resident import resident_bytes

_KINDS: Mapping[StepKind, str] = {
    "timed": "", "warm-up": "  (warming up)", "tuning": "  (tries a size of buckets)",
    "tracked": "  (counts tensors: slower)", "traced": "  (writes a trace: slower)",
}  # fmt: skip
_SHOWN = 6
"""Lines about usual steps where there is no terminal."""


@dataclass(frozen=True)
class ShownStep:
    """One optimizer step as a rank saw it."""

    step: int
    loss: float
    step_s: float
    tokens_per_s: float
    memory_bytes: int
    """Resident memory of the process after the step."""
    kind: StepKind = "timed"
    """Tracked and traced steps are slower."""

    @property
    def figures(self) -> str:
        """For people; of a step that is no usual one, what it is."""
        return (
            f"loss {self.loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  "
            f"{size(self.memory_bytes)}{_KINDS[self.kind]}"
        )


class StepDisplay:
    """Times steps, shows them on one rank, keeps all of them."""

    def __init__(self, progress: Progress | None, title: str, steps: int, tokens_per_step: int):
        self._progress = progress
        self._task = progress.add_task(title, total=steps, figures="") if progress else None
        self._tokens = tokens_per_step
        self._start = time.perf_counter()
        self._first = 0
        self.records: list[ShownStep] = []

    def begin_at(self, step: int) -> None:
        """So many steps are taken in the job, which goes on, or back, from there."""
        self._first = step - len(self.records)
        if self._progress and self._task is not None:
            self._progress.update(self._task, completed=step)

    def start(self) -> None:
        """A step begins now."""
        self._start = time.perf_counter()

    def stop(self, loss: float, kind: StepKind = "timed") -> None:
        """The step that began last is over."""
        seconds = time.perf_counter() - self._start
        record = ShownStep(
            step=self._first + len(self.records),
            loss=loss,
            step_s=seconds,
            tokens_per_s=self._tokens / seconds,
            memory_bytes=resident_bytes(),
            kind=kind,
        )
        self.records.append(record)
        if self._progress and self._task is not None:
            self._progress.update(self._task, advance=1, figures=record.figures)

    def write(self, path: Path) -> None:
        """One JSON object per step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in self.records))


@contextmanager
def recording(title: str, steps: int, tokens_per_step: int, *, show: bool) -> Iterator[StepDisplay]:
    """A recorder, with a live progress line if `show`; plain lines where there is no terminal."""
    console = Terminal(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(),
    )
    if not (show and console.is_terminal):
        recorder = StepDisplay(None, title, steps, tokens_per_step)
        yield recorder
        if show and recorder.records:
            for record in _some(recorder.records):
                line = f"{title}: step {record.step:3d}  {record.figures}"
                console.print(line, highlight=False, soft_wrap=True)
        return
    with Progress(*columns, console=console) as progress:
        yield StepDisplay(progress, title, steps, tokens_per_step)


def _some(records: Sequence[ShownStep]) -> Iterator[ShownStep]:
    """Steps at even distances, and all that are no usual ones."""
    every = -(-len(records) // _SHOWN)
    return (r for r in records if r.kind != "timed" or r.step % every == 0)


def read_records(path: Path) -> list[ShownStep]:
    """What `StepDisplay.write` wrote."""
    return [ShownStep(**json.loads(line)) for line in path.read_text().splitlines()]
