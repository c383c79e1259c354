"""Lists the programs of this folder: `python -m benchmarks`.

A program is a file that can be run, or a folder with a `__main__.py`; its docstring says what it
does and which arguments it takes.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
_RUNS = 'if __name__ == "__main__":'


def programs(folder: Path = HERE) -> Iterator[tuple[str, str]]:
    """The name of each program, as `python -m benchmarks.NAME` takes it, and what it does."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts == ("__main__",) or _RUNS not in path.read_text():
            continue
        told = path
        if parts[-1] == "__main__":
            parts = parts[:-1]
            main = path.with_name("main.py")
            told = main if main.exists() else path
        yield ".".join(parts), _does(told)


def _does(path: Path) -> str:
    """The first paragraph of a file's docstring, without the command if that is first."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def main() -> None:
    """Prints the list."""
    table = Table("python -m benchmarks.", "what it does")
    for name, does in programs():
        table.add_row(name, does)
    Console().print(table)


if __name__ == "__main__":
    main()
