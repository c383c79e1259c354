"""The tests that need a GPU: `pytest -m gpu tests/gpu`."""

import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu.claim import Claim, fact, fixed
from benchmarks.gpu.step import Fact, Place, Step

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests" / "gpu"
_NAMED = 30
"""Of tests that failed, how many are named."""
_NONE_COLLECTED = 5
_SPARE_S = 3.0


def run(place: Place) -> Iterator[Fact]:
    """Yields how many passed, failed and were skipped, and the names of those that failed."""
    if not TESTS.is_dir():
        raise FileNotFoundError(f"there are no tests in {TESTS.relative_to(ROOT)}")
    report = place.out / "tests.xml"
    command = (
        sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-rfE",
        "--tb=short", f"--junitxml={report}", str(TESTS),
    )  # fmt: skip
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=max(1.0, place.left_s - _SPARE_S))
        yield "exit_code", done.returncode
    except subprocess.TimeoutExpired:
        yield "exit_code", "out of time: what had not run by then is not counted"
    if report.exists():
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


STEP = Step(
    name="gpu_tests", does="tests that need a GPU", order=20, limit_s=80, least_s=20, run=run,
    claims=(
        Claim(
            text="kernels, jobs, checkpoints and peers are right on a GPU: no test fails",
            page="kernels.md", low=fixed(0), high=fixed(0), measured=fact("failed"),
        ),
    ),
)  # fmt: skip
