"""Texts that mean harm, put into every place of a plan that holds a text."""

import copy
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.ir.plan.plan import Plan

MARK = "PWNED"
REFUSED = (f"a\ntouch {MARK}", f"\x1b[31m{MARK}", f"{MARK}\u2028{MARK}: 1", f"\u202e{MARK}",
           f"{MARK}\x9b2J", f"{MARK}\r")  # fmt: skip
"""Files with such texts are not read."""
READ = (f"$(touch {MARK})", f"`touch {MARK}`", f"'; touch {MARK}; '", f'"; touch {MARK}; "',
        f'"""\\\n{MARK} = 1'.replace("\n", ""), f'x"""; {MARK} = 1; """', f"# {MARK}",
        f"]]{MARK}[/red][bold]", f"</script><script>{MARK}</script>", f"{MARK}: &a [*a]",
        f"{MARK}\\", f"<!--<script>{MARK}-->")  # fmt: skip
"""Texts that may be in a file."""
_WORDS = ("precision",)
"""The name of a file of ours: all that reads plans refuses others."""
_NAMES = ("model", "cluster", "hash", "optimizer")
_PLAN = TypeAdapter(Plan)
Path = tuple[str | int, ...]


def text_places(data: Any, path: Path = ()) -> Iterator[tuple[Path, bool]]:
    """Each text of plain data by its path, and whether it is a key."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, item in items:
        here = (*path, key)
        if isinstance(data, dict) and path:
            yield here, True
        if isinstance(item, str):
            yield here, False
        elif isinstance(item, dict | list):
            yield from text_places(item, here)


def with_text(data: Any, path: Path, text: str, *, as_key: bool) -> Any:
    """A copy of plain data with a text, or a key, in one place."""
    changed = copy.deepcopy(data)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if as_key:
        items = list(parent.items())
        parent.clear()
        parent.update((text if key == path[-1] else key, item) for key, item in items)
    else:
        parent[path[-1]] = text
    return changed


def plain(plan: Plan) -> Any:
    """The plan as plain data."""
    return _PLAN.dump_python(plan, mode="json")


def spoiled(plan: Plan, texts: tuple[str, ...], each: int = 1) -> Iterator[tuple[str, Plan]]:
    """The plan with so many of the texts in each place that takes any text, and all of them in its
    names, as Python code could make it: nothing was loaded, so nothing was refused."""
    data = plain(plan)
    for number, (path, as_key) in enumerate(text_places(data)):
        some = [texts[(number + i) % len(texts)] for i in range(min(each, len(texts)))]
        for text in texts if path[0] in _NAMES else some:
            try:
                made = _PLAN.validate_python(
                    with_text(data, path, text, as_key=as_key), strict=False
                )
                if path[0] in _WORDS:
                    break
            except ValidationError:
                break  # one of a few words, or the name of a field
            yield f"{'.'.join(map(str, path))} = {text!r}", made
