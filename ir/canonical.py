"""JSON with one way to write a value: short parts on one line, and a strict way to read it."""

import json
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright.ir.errors import PlanError

WIDTH = 100
MAX_BYTES = 256 * 2**20
MAX_DIGITS = 24


def format_json(value: Any) -> str:
    """JSON text of `value` in its own key order; what fits in a line stays in one."""
    return _format(value, 0, 0) + "\n"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


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


def read_text(path: str | Path) -> str:
    """The text of a file of ours; PlanError if it cannot be one."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PlanError(f"{path}: {path.stat().st_size} bytes; at most {MAX_BYTES} are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: is not UTF-8 text (byte {error.start})") from error


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
    if len(text) > MAX_BYTES:
        raise PlanError(f"{where}: {len(text)} characters; at most {MAX_BYTES} are read")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in pairs:
            if key in found:
                raise PlanError(f"{where}: key {key!r} appears twice in one object; keep one")
            found[key] = item
        return found

    def no_constant(name: str) -> Any:
        raise PlanError(f"{where}: {name} is not a number that JSON knows; write a finite one")

    def finite(digits: str) -> float:
        number = float(digits)
        if not isfinite(number):
            raise PlanError(f"{where}: {digits} is beyond the range of a float")
        return number

    def short(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise PlanError(f"{where}: an integer of {len(digits)} digits; at most {MAX_DIGITS}")
        return int(digits)

    try:
        return json.loads(
            text, object_pairs_hook=no_duplicates, parse_constant=no_constant,
            parse_float=finite, parse_int=short,
        )  # fmt: skip
    except json.JSONDecodeError as error:
        ended = error.pos >= len(text.rstrip()) or text.rstrip()[-1:] not in "}]"
        hint = "; the file ends too early (truncated?)" if ended else ""
        raise PlanError(
            f"{where}, line {error.lineno} column {error.colno}: {error.msg}{hint}"
        ) from error
    except RecursionError:
        raise PlanError(f"{where}: nested too deeply to be a plan") from None
