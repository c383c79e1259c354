"""Texts of files and models: what may be in them, and how they stand in code and on terminals.

A line feed ends a comment of a shell, YAML or Python; an escape sequence moves a terminal's cursor;
a bidirectional override shows code in another order than it runs. None has a place in a name.
"""

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from meshwright.ir.errors import PlanError

MAX_CHARS = 10_000
"""Of one text in a file."""
MAX_NAME_CHARS = 1_000
"""Of one key in a file."""
MAX_DEPTH = 40
"""Of lists and objects inside each other."""
LONG = frozenset({"rows", "constraints"})
"""Keys whose texts grow with the cluster: schedules, and lists of devices."""
SHOWN = 80
"""Characters of a given value that an error shows."""
FEW = 6
"""Items of it."""

_ODD = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: line feeds, tabs, escapes
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # turn the direction of what follows
    "\u2028\u2029"  # end a line in YAML and JavaScript
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # not to be seen
    "\ud800-\udfff]"  # halves of a character, which no file can hold
)


def odd_character(text: str) -> str:
    """The first character of `text` that a name may not have, such as `U+000A`; or nothing."""
    found = _ODD.search(text)
    return f"U+{ord(found[0]):04X}" if found else ""


def printable(text: str) -> str:
    r"""`text` on one line, with what a name may not have written out: `\n`, `\x1b`."""
    return _ODD.sub(lambda found: _written_out(found[0]), text)


def _written_out(sign: str) -> str:
    code = ord(sign)
    if sign in "\n\t\r":
        return repr(sign)[1:-1]
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"
    )


def on_screen(text: str) -> str:
    """`text` for a terminal: lines stay lines, all else is as `printable` has it."""
    return "\n".join(map(printable, text.split("\n")))


def shown(value: object) -> str:
    """The beginning of what was given, for an error."""
    text = printable(repr(_cut(value, 0)))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _cut(value: object, depth: int) -> object:
    """Of a list of a million items the first few."""
    if isinstance(value, str):
        return value[: SHOWN + 1]
    if isinstance(value, dict) and depth < 3:
        return {_cut(k, 3): _cut(v, depth + 1) for k, v in islice(value.items(), FEW)}
    if isinstance(value, list | tuple) and depth < 3:
        return [_cut(item, depth + 1) for item in value[:FEW]]
    if isinstance(value, int) and value.bit_length() > 999:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to write out longer ones
    return value if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def comment(text: str) -> str:
    """A comment of a shell, YAML or Python. `text` cannot end it."""
    return f"# {printable(text)}"


def docstring(text: str, *more: str) -> str:
    """A docstring of Python, of one line or several. No text can end it."""
    lines = [printable(line).replace("\\", "\\\\").replace('"', '\\"') for line in (text, *more)]
    return '"""' + "\n".join(lines) + "\n" * bool(more) + '"""'


def quoted(text: str) -> str:
    """A string of Python in double quotes. `text` cannot end it."""
    plain = json.dumps(text, ensure_ascii=False)
    return _ODD.sub(lambda found: _written_out(found[0]), plain)


def check_texts(data: Any, where: str) -> None:
    """PlanError, naming the field, unless all texts of parsed `data` may be in a file."""
    problem = next(_text_problems(data, (), MAX_CHARS), "")
    if problem:
        raise PlanError(f"{where}: {problem}")


def _text_problems(value: Any, path: tuple[str, ...], most: float) -> Iterator[str]:
    if isinstance(value, str):
        yield from _problem(value, _named(path), most)
    elif isinstance(value, dict | list | tuple) and len(path) >= MAX_DEPTH:
        yield f"{_named(path[:6])}... is nested more than {MAX_DEPTH} deep; no file of ours is"
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _problem(key, f"a key in {_named(path)}", MAX_NAME_CHARS)
            most_of = float("inf") if key in LONG else most
            yield from _text_problems(item, (*path, str(key)), most_of)
    elif isinstance(value, list | tuple) and set(map(type, value)) - {int, float}:
        for i, item in enumerate(value):
            yield from _text_problems(item, (*path, str(i)), most)


def _named(path: tuple[str, ...]) -> str:
    return ".".join(part[:SHOWN] for part in path) or "the file"


def _problem(text: str, where: str, most: float) -> Iterator[str]:
    if len(text) > most:
        yield f"{where} is a text of {len(text)} characters; at most {most} are read"
    elif odd := odd_character(text):
        yield (
            f"{where} is {shown(text)}, which has the character {odd}: control characters and what "
            "turns or ends lines cannot be in a text; take it out"
        )
