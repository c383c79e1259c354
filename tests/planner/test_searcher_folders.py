"""Searchers in files of one's own."""

from pathlib import Path
from subprocess import CompletedProcess

from meshwright.testing.fresh import python


def run_with_folder(folder: object, text: str) -> CompletedProcess[str]:
    text = f"from meshwright.planner.search import offers; {text}"
    return python("-c", text, MESHWRIGHT_SEARCHERS=str(folder))


def test_files_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def search(problem):\n    return iter(())\n")
    done = run_with_folder(tmp_path, "print(offers.SEARCHERS, offers.find_searcher('mine')(None))")
    assert "'mine'" in done.stdout and "iterator" in done.stdout, done.stderr
    assert "is no folder" in run_with_folder(tmp_path / "none", "pass").stderr
