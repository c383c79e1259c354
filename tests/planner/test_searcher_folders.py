"""Searchers in files of one's own."""

import os
import subprocess
import sys
from pathlib import Path


def run_with_folder(folder: object, text: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MESHWRIGHT_SEARCHERS": str(folder)}
    command = [sys.executable, "-c", f"from meshwright.planner.search import offers; {text}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_files_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def search(problem):\n    return iter(())\n")
    done = run_with_folder(tmp_path, "print(offers.SEARCHERS, offers.find_searcher('mine')(None))")
    assert "'mine'" in done.stdout and "iterator" in done.stdout, done.stderr
    assert "is no folder" in run_with_folder(tmp_path / "none", "pass").stderr
