"""Every second worker reads the files of tests from the last one to the first.

A fresh clone has no bytecode: whoever imports a file compiles it, after pytest has rewritten its
asserts. Workers that read in the same order all do it for the same files at the same time; from
opposite ends each finds what another one has kept. They then agree on one order of the tests.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

WORKER = "PYTEST_XDIST_WORKER"


class Backwards(pytest.Package):
    """A folder whose last file is read first."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        return [*super().collect()][::-1]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    number = os.environ.get(WORKER, "").removeprefix("gw")
    if number.isdigit() and int(number) % 2 and (path / "__init__.py").exists():
        return Backwards.from_parent(parent, path=path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if WORKER in os.environ:  # a file's tests keep their order
        items.sort(key=lambda item: item.path.parts)
