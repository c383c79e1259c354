"""JSON with one way to write a value: short parts on one line, and a strict way to read it.

How large a file is, how deep and of how many items is known before anything is made of it.
"""

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from stat import S_ISREG
from typing import Any

from meshwright.ir.errors import PlanError
from meshwright.ir.text.plain_text import check_texts, shown

WIDTH = 100
MAX_BYTES = 64 * 2**20
MAX_ITEMS = 4 * 2**20
"""Of all lists and objects of a file: two numbers for each device of the largest cluster."""
MAX_LISTS = 2**18
MAX_TEXTS = 2**20
"""Texts and keys of a file."""
MAX_DIGITS = 24


def format_json(value: Any) -> str:
    """JSON text of `value` in its own key order; what fits in a line stays in one."""
    return _format(value, 0, 0) + "\n"


_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(", ", ": ")).encode
"""Made once: files have very many values."""


def _format(value: Any, indent: int, used: int) -> str:
    """`used` is the width already taken on the line by the key."""
    flat = _compact(value)
    if not isinstance(value, dict | list) or not value or len(flat) + indent + used < WIDTH:
        return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        keys = [f"{_compact(key)}: " for key in value]
        parts = [
            key + _format(item, indent + 2, len(key) + 1)
            for key, item in zip(keys, value.values(), strict=True)
        ]
        left, right = "{", "}"
    else:
        whole = set(map(type, value)) == {int}
        parts = flat[1:-1].split(", ") if whole else [_format(x, indent + 2, 1) for x in value]
        left, right = "[", "]"
    return f"{left}\n" + ",\n".join(pad + part for part in parts) + f"\n{' ' * indent}{right}"


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """The text of a file of ours; PlanError if it cannot be one. At most `most` bytes are read."""
    try:
        check_regular(Path(path), most)
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > most:  # it has grown, or is one of those that say that they are empty
        raise PlanError(f"{path}: more than {most} bytes; no more are read")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8 text (byte {error.start})") from error


def check_regular(path: Path, most: int) -> None:
    """PlanError unless a path is that of a file on a disk, of at most `most` bytes: devices and
    pipes never end."""
    found = path.stat()
    if not S_ISREG(found.st_mode):
        kind = "a folder" if path.is_dir() else "a device, a pipe or a socket"
        raise PlanError(f"{path}: is {kind}; give a file")
    if found.st_size > most:
        raise PlanError(f"{path}: {found.st_size} bytes; at most {most} are read")


def check_schema(data: Any, schema: str, where: str) -> None:
    """PlanError unless parsed `data` says that it is of `schema`."""
    given = data.get("schema") if isinstance(data, dict) else None
    if given == schema:
        return
    kind = schema.partition("/")[0]
    if not isinstance(given, str) or given.partition("/")[0] != kind:
        raise PlanError(f"{where}: schema is {given!r}; this version reads {schema!r}")
    raise PlanError(
        f"{where}: schema is {given!r}; this version reads {schema!r}. Older and newer files are "
        f"not converted: make it again with this version, or read it with the one that wrote it"
    )


def parse_json(text: str, where: str) -> Any:
    """Plain data of JSON `text`; PlanError, naming `where`, for anything doubtful in it."""
    _check_size(text, where)

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in pairs:
            if key in found:
                raise PlanError(f"{where}: key {shown(key)} appears twice in one object; keep one")
            found[key] = item
        return found

    def no_constant(name: str) -> Any:
        raise PlanError(f"{where}: {name} is not a number that JSON knows; write a finite one")

    def finite(digits: str) -> float:
        number = float(digits)
        if not isfinite(number):
            raise PlanError(f"{where}: {digits[:MAX_DIGITS]} is beyond the range of a float")
        return number

    def short(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise PlanError(f"{where}: an integer of {len(digits)} digits; at most {MAX_DIGITS}")
        return int(digits)

    try:
        data = json.loads(
            text, object_pairs_hook=no_duplicates, parse_constant=no_constant,
            parse_float=finite, parse_int=short,
        )  # fmt: skip
    except json.JSONDecodeError as error:
        start = text.lstrip()[:20]
        if error.msg == "Expecting value" and start and not text[: error.pos].strip():
            raise PlanError(f"{where} is no JSON: it begins with {shown(start)}") from error
        ended = error.pos >= len(text.rstrip()) or text.rstrip()[-1:] not in "}]"
        hint = "; the file ends too early (truncated?)" if ended else ""
        raise PlanError(
            f"{where}, line {error.lineno} column {error.colno}: {error.msg}{hint}"
        ) from error
    except RecursionError:
        raise PlanError(f"{where}: nested too deeply to be a plan") from None
    check_texts(data, where)
    return data


def _check_size(text: str, where: str) -> None:
    """PlanError for a text that would take too much to parse."""
    for count, most, what in (
        (len(text), MAX_BYTES, "characters"),
        (text.count(","), MAX_ITEMS, "items"),
        (text.count("[") + text.count("{"), MAX_LISTS, "lists and objects"),
        (text.count('"') // 2, MAX_TEXTS, "texts and keys"),
    ):
        if count > most:
            raise PlanError(f"{where}: {count} {what}; at most {most} are read")


def at_path(data: Any, path: Sequence[Any]) -> Any:
    """What stands in plain data at a path, as far as it goes there."""
    for key in path:
        inside = isinstance(data, dict) and key in data
        inside = inside or (isinstance(data, list) and isinstance(key, int) and key < len(data))
        if not inside:
            break
        data = data[key]
    return data
