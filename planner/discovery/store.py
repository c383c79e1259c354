"""What was found, kept in a folder of the user: one small JSON file per op."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.ir.text.digest import digest
from meshwright.planner.discovery.found import DimCut, FoundRule

VERSION = 2


def folder() -> Path:
    """`MESHWRIGHT_CACHE`, else the user's cache folder."""
    given = os.environ.get("MESHWRIGHT_CACHE")
    if given:
        return Path(given) / "rules"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "meshwright" / "rules"


def load(key: Mapping[str, Any]) -> FoundRule | None:
    """What was found for the op; None if nothing, or nothing that can be read."""
    try:
        held = json.loads(_file(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(held, dict) or held.get("key") != json.loads(json.dumps(key)):
        return None
    cuts, linear = held.get("cuts"), held.get("linear")
    if not (isinstance(cuts, list) and isinstance(linear, list)):
        return None
    return FoundRule(
        tuple(DimCut(_dims(cut["inputs"]), _dims(cut["outputs"])) for cut in cuts),
        tuple(tuple(int(i) for i in group) for group in linear),
    )


def _dims(given: list[int | None]) -> tuple[int | None, ...]:
    return tuple(None if d is None else int(d) for d in given)


def save(key: Mapping[str, Any], found: FoundRule) -> None:
    """Keeps it; a folder that cannot be written to only means that it is tried again."""
    file = _file(key)
    text = json.dumps({"key": key, **asdict(found)}, indent=1)
    beside = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError:
        return


def _file(key: Mapping[str, Any]) -> Path:
    name = str(key["target"]).replace("/", "_")
    return folder() / f"{name}-{digest([VERSION, key])[:16]}.json"
