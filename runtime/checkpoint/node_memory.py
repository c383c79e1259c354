"""The newest state in the memory of nodes: each has the parts of its own ranks and, in a ring,
those of the node before it, so that all of it is left when a node is gone.

Nobody joins what ranks write there: each part has a file beside it that says what is in it, of
which save it is, and of how many ranks. Whoever goes on from it joins them.
"""

import json
import os
import zlib
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint.manifest import FRAGMENT, PART
from meshwright.runtime.checkpoint.memory_place import MemoryPlace

MEMORY = "MESHWRIGHT_MEMORY"
"""Environment variable of ranks: a `NodeMemory`."""
STATES, STATES_WITH_NEIGHBOUR = 3, 5
"""What a node's memory holds at most for each of its ranks, in states of a rank: the copy that is
written, what was written of it and of the one before; and both of these of the neighbour's ranks.
A start that was killed as one took the place of another leaves both until the next one has a save.
"""
_LONGEST_HEAD = 1024


@dataclass(frozen=True)
class NodeMemory:
    """Of the node on which a rank is."""

    folder: Path
    start: str
    """Which start of the job it is."""
    node: int = 0
    neighbour: int = -1
    """The node that has copies of what this one has; -1: there is none."""
    others: tuple[MemoryPlace, ...] = ()
    """All other nodes that can be read."""

    def dumps(self) -> str:
        """For the environment of ranks. Short, as Linux takes no variable of 128 KiB, which the
        places of 1,300 nodes are."""
        data = asdict(self) | {"folder": str(self.folder)}
        return b64encode(zlib.compress(json.dumps(data).encode())).decode()

    def place(self, node: int) -> MemoryPlace | None:
        """Of another node."""
        return next((place for place in self.others if place.node == node), None)


def given_memory() -> NodeMemory | None:
    """What whoever started this rank keeps, if anything."""
    text = os.environ.get(MEMORY, "")
    if not text:
        return None
    data = json.loads(zlib.decompress(b64decode(text)))
    others = tuple(MemoryPlace(**place) for place in data.pop("others"))
    return NodeMemory(folder=Path(data.pop("folder")), others=others, **data)


@dataclass(frozen=True, slots=True)
class KeptSave:
    """A whole save of which a node holds some parts."""

    step: int
    save: str
    """Which one: the start that made it, and how many of that came before."""
    ranks: int
    """All that took part in it."""
    files: tuple[str, ...]

    def dumps(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def held(folder: Path) -> list[KeptSave]:
    """What is in a node's memory."""
    found = []
    for path in sorted(folder.glob("step-*")):
        files = tuple(sorted(file.name for file in path.iterdir() if is_part(file.name)))
        step, said = folders.step_of(path), [name for name in files if FRAGMENT.fullmatch(name)]
        if step < 0 or not said:
            continue
        with (path / said[0]).open("rb") as file:
            head = _head(file.readline(_LONGEST_HEAD))
        if head is not None:
            found.append(KeptSave(step, *head, files))
    return found


def is_part(name: str) -> bool:
    """Whether a file is of one rank."""
    return bool(PART.fullmatch(name) or FRAGMENT.fullmatch(name))


def free_bytes(folder: Path) -> int:
    """Memory that more files may take; none if the folder is gone."""
    try:
        on_disk = psutil.disk_usage(str(folder)).free
    except OSError:
        return 0
    return int(min(on_disk, psutil.virtual_memory().available))


def _head(line: bytes | str) -> tuple[str, int] | None:
    """Of which save a part is, and of how many ranks."""
    try:
        data = json.loads(line)
        save, ranks = data["save"], data["ranks"]
    except (ValueError, KeyError, TypeError):
        return None
    return (save, ranks) if type(save) is str and type(ranks) is int else None
