"""The docs build as a site: no link leads nowhere, and every public name has its docstring."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from docs.site_pages import BESIDE, on_page_markdown

ROOT = Path(__file__).parent.parent


def test_the_site_builds_and_has_every_page(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr  # strict: a warning is an error
    pages = [path.stem for path in (ROOT / "docs").glob("*.md")]
    assert not [name for name in pages if not (tmp_path / f"{name}.html").exists()]
    text = (tmp_path / "api.html").read_text()
    assert not [name for name in meshwright.__all__ if f'id="meshwright.{name}"' not in text]
    assert len(list((tmp_path / "notebooks").glob("*.html"))) == 6
    assert f"meshwright {meshwright.__version__}" in (tmp_path / "index.html").read_text()


def test_a_version_is_the_same_wherever_it_is_written():
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert newest and cited
    assert newest[1] == cited[1] == meshwright.__version__


def test_links_between_files_are_links_between_pages():
    class Page:
        def __init__(self, src: str) -> None:
            self.file = type("", (), {"src_uri": src})()

    def moved(src: str, link: str) -> str:
        found = re.search(r"\]\((.*)\)", on_page_markdown(f"[x]({link})", Page(src)))
        assert found
        return found[1]

    assert moved("index.md", "docs/results/gpu.md#claims") == "results/gpu.md#claims"
    assert moved("index.md", "CONTRIBUTING.md") == "CONTRIBUTING.md" and "LICENSE" in BESIDE
    assert moved("limits.md", "../SECURITY.md") == "SECURITY.md"
    assert moved("results/README.md", "gpu.md") == "gpu.md"
    assert moved("results/gpu.md", "../../README.md") == "../index.md"
    assert moved("report.md", "https://example.org/x.md") == "https://example.org/x.md"
