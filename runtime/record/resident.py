"""Resident memory of this process: now, and at most since a moment one may choose."""

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Now."""
    return int(psutil.Process().memory_info().rss)


def reset_peak() -> int:
    """Forgets the peak so far; the bytes resident now."""
    if _RESET.exists():
        _RESET.write_text("5")
    return resident_bytes()


def peak_bytes() -> int:
    """The peak since `reset_peak` (without /proc: since the process started)."""
    if _STATUS.exists():
        line = next(row for row in _STATUS.read_text().splitlines() if row.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(slots=True)
class Residence:
    """The resident memory of a job. What is slow to run for the sake of measuring is left out."""

    before_bytes: int
    start_bytes: int = 0
    peak_bytes: int = 0

    def started(self) -> None:
        """The job is made; the first step comes next."""
        self.start_bytes = reset_peak()

    def note(self) -> int:
        """The peak so far."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes())
        return self.peak_bytes

    def skip(self) -> None:
        """What ran since the last `note` does not count."""
        reset_peak()
