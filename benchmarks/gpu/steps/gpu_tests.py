"""The tests that need a GPU: `pytest -m gpu tests/gpu`."""

import signal
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.claim import Claim, fact, fixed
from benchmarks.gpu.step import Fact, Facts, Place, Step

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "gpu"
_NAMED = 30
"""Of tests that failed, how many are named."""
_SPARE_S = 6.0
"""Of the limit, for the report."""


def run(place: Place) -> Iterator[Fact]:
    """Yields how many passed, failed and were skipped, and the names of those that failed."""
    if not TESTS.is_dir():
        yield "tests", f"none: there is no {TESTS.relative_to(ROOT)}"
        return
    report = place.out / "tests.xml"
    command = (
        sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-rfE",
        "--tb=short", f"--junitxml={report}", str(TESTS),
    )  # fmt: skip
    tests = subprocess.Popen(command, cwd=ROOT)
    try:
        yield "exit_code", tests.wait(max(1.0, place.left_s - _SPARE_S))
    except subprocess.TimeoutExpired:
        tests.send_signal(signal.SIGINT)  # it then reports on those that have run
        yield "why", "broken off at the limit of time: only tests that had run are counted"
        tests.wait(_SPARE_S / 2)
    yield from read(report.read_text(encoding="utf-8", errors="replace"))
    report.unlink()


def read(text: str) -> Iterator[Fact]:
    """Yields the facts of a JUnit report."""
    cases = list(xml.fromstring(text).iter("testcase"))
    kinds: dict[str, list[xml.Element]] = {"failed": [], "skipped": [], "passed": []}
    for case in cases:
        tags = {child.tag for child in case}
        kind = "failed" if tags & {"failure", "error"} else "skipped"
        kinds[kind if tags & {"failure", "error", "skipped"} else "passed"].append(case)
    for kind, found in kinds.items():
        yield kind, len(found)
    yield "slowest_s", max((float(case.get("time", 0)) for case in cases), default=0.0)
    yield from _failures(kinds["failed"])


def _failures(cases: Sequence[xml.Element]) -> Iterator[Fact]:
    for case in cases[:_NAMED]:
        why = next((child.get("message", "") for child in case if child.tag != "skipped"), "")
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
        yield f"{name.replace('/', ' ')[:90]}/why", why[:300]


def _failed(facts: Facts) -> float | None:
    """How many failed, where any test has run."""
    ran = sum(fact(kind)(facts) or 0 for kind in ("passed", "failed"))
    return fact("failed")(facts) if ran else None


STEP = Step(
    name="gpu_tests", does="tests that need a GPU", order=20, limit_s=85, least_s=20, run=run,
    claims=(
        Claim(
            text="kernels, jobs, checkpoints and peers are right on a GPU: no test fails",
            page="kernels.md", low=fixed(0), high=fixed(0), measured=_failed,
        ),
    ),
)  # fmt: skip
