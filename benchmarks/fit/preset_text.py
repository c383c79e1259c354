"""What the fits write into files of presets: calls as source text, in the place of older ones."""

import re
from collections.abc import Sequence
from pathlib import Path

IR = Path(__file__).parents[2] / "ir"
WIDTH = 100


def call(head: str, items: Sequence[str], tail: str = ")") -> str:
    """Writes `head(item, item, ...)`, wrapped under its first item; the head ends with `(`."""
    lines = [head]
    for index, item in enumerate(items):
        piece = item + (tail if index == len(items) - 1 else ", ")
        if len(lines[-1]) + len(piece.rstrip()) > WIDTH:
            lines[-1] = lines[-1].rstrip()
            lines.append(" " * len(head))
        lines[-1] += piece
    return "\n".join(lines) + "\n"


def put(name: str, text: str, preset: str = "", folder: Path = IR) -> bool:
    """Puts the assignment `text` in the place of that of `name`, in the file of `preset` or in
    whichever has one. False if none has."""
    file = f"{preset.replace('-', '_') or '*'}.py"
    for path in (folder / "cluster" / "links.py", *sorted((folder / "presets").glob(file))):
        old = path.read_text()
        found = re.search(rf"^{name} = \w*\(.*?\)\n(?=\S|\Z)", old, re.DOTALL | re.MULTILINE)
        if found:
            path.write_text(old[: found.start()] + text + old[found.end() :])
            return True
    return False
