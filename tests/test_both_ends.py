"""Workers read files of tests from opposite ends and have the same tests in the same order."""

import os
from pathlib import Path

import pytest

from meshwright.testing.spawn import alone
from tests import both_ends


class Seen:
    def __init__(self) -> None:
        self.read: list[str] = []
        self.order: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.nodeid.endswith(".py"):
            self.read.append(Path(report.nodeid).name)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.order = [item.name for item in session.items]


def collected(folder: Path, worker: str) -> Seen:
    """What a worker of that name reads, one after the other, and the tests that it has then."""
    seen = Seen()
    os.environ[both_ends.WORKER] = worker
    words = ["--collect-only", "-qq", "--import-mode=importlib", "--rootdir", str(folder)]
    found = pytest.main([*words, str(folder / "all")], plugins=[both_ends, seen])
    assert found == pytest.ExitCode.OK
    return seen


def test_workers_read_from_opposite_ends_and_agree_on_an_order(tmp_path: Path) -> None:
    for name in ("a/test_1", "a/test_2", "b/test_3", "test_4"):
        file = tmp_path / "all" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        number = name[-1]
        file.write_text(f"def test_z{number}(): ...\n\ndef test_a{number}(): ...\n")
    (tmp_path / "all" / "__init__.py").touch()
    first, second, third = (alone(collected, tmp_path, f"gw{n}") for n in range(3))
    assert first.read == third.read == [f"test_{n}.py" for n in (1, 2, 3, 4)]
    assert second.read == first.read[::-1]
    assert first.order == second.order == [f"test_{x}{n}" for n in (1, 2, 3, 4) for x in "za"]
