"""Spoils data by its structure, and text by its bytes."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

MARK = "PWNED"
"""In every text that means harm: where it may stand tells whether it has become code."""
EVIL = (
    f"a\ntouch {MARK}\n", f"$(touch {MARK})", f"`touch {MARK}`", f"'; touch {MARK}; '",
    f'"; touch {MARK}; "', f"x\n  {MARK}: value", f'"""\n{MARK} = 1\n"""', f'"""{MARK}"""',
    f"# {MARK}", f"]]{MARK}", f"[/red]{MARK}[bold]", f"\x1b[31m{MARK}", f"\x9b2J{MARK}",
    f"{MARK}\u2028{MARK}: 1", f"\u202e{MARK}", f"</script><script>{MARK}</script>",
    f"{MARK}\\", f"{MARK}: &a [*a]", f"'''{MARK}'''", f"../../{MARK}", f"{MARK}\x00",
    f"\ud800{MARK}", "%s%n{0}{x}", f"{MARK}.yaml", "", " ", "x" * 20_000, "\U0001f600",
    "*", "[!a]*", "(", "²",
    "0F999999999", "1B0 " * 3, "S(0)", "S(0,outer=0)", "S(99999999999999999999)", "R|P R -> P",
    "nan", "1e999", "10" * 3000, "tp=2", "local:1000000000", "h100-sxm:100000x100000", "l4",
)  # fmt: skip
EXTREMES: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    3,
    7,
    10**9,
    10**12,
    10**18,
    2**31,
    2**63,
    2**64,
    -(10**18),
    10**23,
    10**400,
    0.0,
    -0.0,
    1e-300,
    1e308,
    -1e308,
    0.5,
    float("inf"),
    float("nan"),
    True,
    False,
    None,
)
OTHERS: tuple[Any, ...] = ({}, [], [[]], {"": ""}, [{}], ["a"], {"a": {"a": {"a": 1}}}, [0] * 50)
Path = tuple[Any, ...]


def mutated(data: Any, random: Random) -> Any:
    """A copy of plain data with one to three things changed."""
    changed = copy.deepcopy(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        paths = list(_paths(changed, ()))
        if paths:
            changed = _change(changed, random.choice(paths), random)
    return changed


def _paths(data: Any, path: Path) -> Iterator[Path]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from _paths(item, (*path, key))


def _change(data: Any, path: Path, random: Random) -> Any:
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    random.choice(_CHANGES)(parent, path[-1], data, random)
    return data


def _drop(parent: Any, key: Any, data: Any, random: Random) -> None:
    del parent[key]


def _double(parent: Any, key: Any, data: Any, random: Random) -> None:
    if isinstance(parent, list):
        parent[key:key] = [copy.deepcopy(parent[key])] * random.choice((1, 2, 40))
    else:
        parent[f"{key}2"] = copy.deepcopy(parent[key])


def _extreme(parent: Any, key: Any, data: Any, random: Random) -> None:
    parent[key] = random.choice(EXTREMES)


def _evil(parent: Any, key: Any, data: Any, random: Random) -> None:
    parent[key] = random.choice(EVIL)


def _retype(parent: Any, key: Any, data: Any, random: Random) -> None:
    # A copy: what is put in may be changed again, and is not to be so in the next file.
    other = copy.deepcopy(random.choice(OTHERS))
    parent[key] = random.choice((*[other] * len(OTHERS), str(parent[key])[:200], [parent[key]]))


def _rename(parent: Any, key: Any, data: Any, random: Random) -> None:
    if isinstance(parent, dict):
        value = parent.pop(key)
        parent[random.choice((*EVIL, f"{key}x"))] = value
    else:
        random.shuffle(parent)


def _near(parent: Any, key: Any, data: Any, random: Random) -> None:
    """A number or a text that is nearly right."""
    value = parent[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        parent[key] = f"{value}x" if isinstance(value, str) else value
    else:
        parent[key] = random.choice((value + 1, value - 1, value * 2, -value, value // 2))


def _elsewhere(parent: Any, key: Any, data: Any, random: Random) -> None:
    """What stands elsewhere in the file."""
    found = data
    path = random.choice(list(_paths(data, ())))
    for part in path:
        found = found[part]
    parent[key] = copy.deepcopy(found)


_CHANGES: tuple[Callable[[Any, Any, Any, Random], None], ...] = (
    _drop, _double, _extreme, _evil, _retype, _rename, _near, _near, _elsewhere,
)  # fmt: skip


def scribbled(content: bytes, random: Random) -> bytes:
    """A copy of bytes with some of them changed, cut off or put in."""
    changed = bytearray(content)
    match random.randrange(5):
        case 0:
            for _ in range(random.choice((1, 3, 20))):
                changed[random.randrange(len(changed))] = random.randrange(256)
        case 1:
            del changed[random.randrange(len(changed)) :]
        case 2:
            at = random.randrange(len(changed))
            changed[at:at] = random.choice(EVIL).encode("utf-8", "surrogatepass")
        case 3:
            at = random.randrange(len(changed))
            del changed[at : at + random.choice((1, 8, 300))]
        case _:
            digits = [found.span() for found in re.finditer(rb"\d+", changed)]
            if digits:
                start, end = random.choice(digits)
                changed[start:end] = random.choice(
                    (b"0", b"-1", b"1e999", b"9" * 30, b"0x7f", b"nan")
                )
    return bytes(changed)


def json_text(data: Any) -> str:
    """JSON, also of what JSON has no words for."""
    return json.dumps(data)
