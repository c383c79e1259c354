"""Pages of the site that are not files of this folder: `mkdocs build` calls this, by `mkdocs.yml`.

The README is the start page, and the Python reference follows from what `meshwright` exports.
Links between files of the repository become links between pages.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import meshwright

ROOT = Path(__file__).parent.parent
START = "index.md"
BESIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE")
"""Files of the repository's root that are pages, too."""
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_API = """# Python

What `import meshwright as mw` has, as `mw.NAME`. Each is loaded when it is first used.

"""


def on_config(config: Any) -> Any:
    """Each page says at its foot of which version it is."""
    config.copyright = f"meshwright {meshwright.__version__}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    for name in BESIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    files.append(File.generated(config, START, content=(ROOT / "README.md").read_text()))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def api_page() -> str:
    """The public names, each with its docstring."""
    return _API + "\n\n".join(f"::: meshwright.{name}" for name in sorted(meshwright.__all__))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files into links between pages."""
    src = page.file.src_uri
    home = "README.md" if src == START else src if src in BESIDE else f"docs/{src}"

    def moved(found: re.Match[str]) -> str:
        there = posixpath.normpath(posixpath.join(posixpath.dirname(home), found[1]))
        target = START if there == "README.md" else there.removeprefix("docs/")
        return f"]({posixpath.relpath(target, posixpath.dirname(src) or '.')}{found[2] or ''})"

    return _LINK.sub(moved, markdown)
