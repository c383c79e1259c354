"""What the pages of the docs say in code: their fenced blocks, and names between backticks.

A fence says what is in it, and its page how it runs; a reader sees all of this:

- `python` runs, after the blocks before it. One that follows
  "`torchrun --nproc-per-node N FILE.py`" or "`FILE.py`: ..." is a file, and N ranks run it; blocks
  behind it go on where it ended.
- `diff` is Python before and after a change; both run.
- `sh` is a command a line. TARGET stands for a model of the reader.
- `text` is what something prints, or code of others.
- A block or line with a comment "needs ..." is not run by tests: only looked at.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = ("python", "diff", "sh", "text", "mermaid", "console")
"""`console` is of pages that `docs.generate` makes."""

# From where a line begins, or behind the fence before: from each letter it took 4 s.
_FENCE = re.compile(
    r"(?:^|(?<=^```))(?P<before>[^\n]*)\n\n```(?P<kind>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)
_ALL_FENCES = re.compile(r"^```.*?^```$", re.M | re.S)
_RANKS = re.compile(r"`torchrun --nproc-per-node (\d+) (\w+\.py)[^`]*`$")
_FILE = re.compile(r"^`(\w+\.py)`: ")
_NEEDS = re.compile(r"# .*\bneeds ")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: `line` is where it begins, `file` the name that it is saved under,
    `ranks` how many processes run it (0: none of its own)."""

    page: Path
    line: int
    kind: str
    text: str
    file: str = ""
    ranks: int = 0

    @property
    def place(self) -> str:
        """For messages: `docs/report.md:8`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs(self) -> bool:
        """Whether it says that it needs what a test has not."""
        return bool(_NEEDS.search(self.text))

    def lines(self) -> Iterator[str]:
        """Commands of a `sh` block, a joined line each."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                yield line


def pages() -> Iterable[Path]:
    """The README, the pages beside it, and those of `docs`."""
    beside = (ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))
    return [*beside, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        ranked, file = _RANKS.search(found["before"]), _FILE.match(found["before"])
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start("kind")) + 1,
            kind=found["kind"],
            text=found["text"],
            file=ranked[2] if ranked else file[1] if file else "",
            ranks=int(ranked[1]) if ranked and found["kind"] in ("python", "diff") else 0,
        )


def count_fences(page: Path) -> int:
    """How many fenced blocks a page has, however they are written."""
    return len(_ALL_FENCES.findall(page.read_text(encoding="utf-8")))


def spans(page: Path) -> Iterator[str]:
    """What a page has between backticks, blocks left out."""
    text = _ALL_FENCES.sub("", page.read_text(encoding="utf-8"))
    yield from (found[1] for found in _SPAN.finditer(text))


def runs_here(line: str) -> bool:
    """Whether a command may run in a test."""
    return not _NEEDS.search(line)
