"""Finds the newest state in the memory of nodes (`node_memory`), and reads it."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from meshwright.ir.comm.by_store import from_first
from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint import manifest
from meshwright.runtime.checkpoint.files import DamagedError
from meshwright.runtime.checkpoint.manifest import Manifest
from meshwright.runtime.checkpoint.memory_place import MemoryPlace
from meshwright.runtime.checkpoint.node_memory import KeptSave, NodeMemory, held
from meshwright.runtime.checkpoint.piece_files import InFolder

_AT_ONCE = 16
"""Nodes that are asked."""


@dataclass(frozen=True, eq=False)
class Remembered:
    """The newest state that the nodes have together."""

    memory: NodeMemory
    step: int
    whole: Manifest
    holders: Mapping[str, Sequence[int]]
    """File -> nodes that have it."""

    @property
    def path(self) -> Path:
        """Where it is, or would be, on this node."""
        return self.memory.folder / f"step-{self.step:08d}"

    def where(self, name: str) -> str:
        nodes = " and ".join(map(str, self.holders.get(name, ())))
        return f"{self.path.name}/{name} in the memory of node {nodes}"

    def read_into(self, name: str, start: int, view: memoryview) -> int:
        """As `PieceFiles` has it: from this node, or from one that answers."""
        holders, why = self.holders.get(name, ()), "nobody has it"
        if self.memory.node in holders:
            return InFolder(self.path).read_into(name, start, view)
        for place in filter(None, map(self.memory.place, holders)):
            try:
                return place.read_into(f"{self.path.name}/{name}", start, view)
            except OSError as error:
                why = str(error)
        raise DamagedError(f"{self.where(name)} cannot be read: {why}")


def newest(memory: NodeMemory, known: int) -> Remembered | None:
    """The newest state in memory, if all of it is there and it is of a later step than `known`; all
    ranks call it."""
    rank_0 = int(os.environ.get("RANK", "0")) == 0
    found = from_first(_newest(memory, known) if rank_0 else None)
    return None if found is None else Remembered(memory, *found)


def _newest(memory: NodeMemory, known: int) -> tuple[int, Manifest, dict[str, list[int]]] | None:
    with ThreadPoolExecutor(_AT_ONCE) as beside:
        listed = list(beside.map(lambda place: (place.node, _held_at(place)), memory.others))
    saves: dict[tuple[int, str, int], dict[str, list[int]]] = {}
    for node, all_held in ((memory.node, held(memory.folder)), *listed):
        for one in all_held:
            holders = saves.setdefault((one.step, one.save, one.ranks), {})
            for name in one.files:
                holders.setdefault(name, []).append(node)
    for (step, _, ranks), holders in sorted(saves.items(), reverse=True):
        if step <= known:
            return None
        try:
            return step, _joined(memory, step, ranks, holders), holders
        except (PlanError, OSError) as error:
            text = f"meshwright: the state of step {step} in memory is of no use: {error}"
            print(text, file=sys.stderr, flush=True)
    return None


def _held_at(place: MemoryPlace) -> list[KeptSave]:
    """Nothing of a node that does not answer."""
    try:
        return [KeptSave(**{**one, "files": tuple(one["files"])}) for one in place.held()]
    except OSError:
        return []


def _joined(
    memory: NodeMemory, step: int, ranks: int, holders: Mapping[str, Sequence[int]]
) -> Manifest:
    """The whole manifest; PlanError if a rank's part is nowhere."""
    wanted = [(f"part-{rank:05d}.json", f"part-{rank:05d}.safetensors") for rank in range(ranks)]
    lacks = [rank for rank, names in enumerate(wanted) if not all(n in holders for n in names)]
    if lacks:
        raise PlanError(f"nobody has the parts of ranks {', '.join(map(str, lacks[:8]))}")
    path = memory.folder / f"step-{step:08d}"

    def read(name: str) -> Manifest:
        text = "".join(_texts(memory, path, name, holders[name]))
        return manifest.parsed(text.partition("\n")[2], path / name, whole=False)

    with ThreadPoolExecutor(_AT_ONCE) as beside:
        return manifest.joined(list(beside.map(read, (said for said, _ in wanted))), path)


def _texts(memory: NodeMemory, path: Path, name: str, holders: Sequence[int]) -> Iterator[str]:
    """The text of a file, from the first node that gives it."""
    if memory.node in holders:
        yield (path / name).read_text(encoding="utf-8", errors="replace")
        return
    why: OSError | None = None
    for place in filter(None, map(memory.place, holders)):
        try:
            yield place.read_text(f"{path.name}/{name}")
            return
        except OSError as error:
            why = error
    raise why or OSError("its node is gone")
