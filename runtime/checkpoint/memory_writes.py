"""Writes the newest state into the memory of nodes (`node_memory`)."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.ir.comm.by_store import Aside, judged
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint import manifest, parts
from meshwright.runtime.checkpoint.checkpoint import Snapshot, stored_tensors, told
from meshwright.runtime.checkpoint.manifest import Manifest
from meshwright.runtime.checkpoint.node_memory import NodeMemory, free_bytes


def write_parts(
    found: Snapshot, memory: NodeMemory, number: int, rank: int, ranks: int, aside: Aside | None
) -> bool:
    """Writes this rank's part, of the save of that `number` in this start, here and at the
    neighbour, once all nodes have room; whether they had. All ranks call it; what fails on one of
    them is a PlanError on all.

    Until all have the new state whole, all have the one before.
    """
    alone, leads = ranks == 1, os.environ.get("LOCAL_RANK", "0") == "0"
    size = sum(box.content.nbytes for box in found.boxes)
    wanted = (memory.node, memory.neighbour, size, free_bytes(memory.folder))
    if not judged(wanted, _all_have_room, aside):
        return False
    failed = "the state cannot be kept in memory"
    partial = memory.folder / f"{found.in_folder(memory.folder).name}.partial"
    with told(alone, failed, aside):
        if leads:
            folders.begin(memory.folder, found.step)
    with told(alone, failed, aside):
        head = {"save": f"{memory.start}/{number:09d}", "ranks": ranks}
        names = _written(found, head, partial, rank)
        place = memory.place(memory.neighbour)
        if place is not None:
            for name in names:
                place.put(memory.start, f"{partial.name}/{name}", partial / name)
    with told(alone, failed, aside):
        if leads:
            folders.finish(memory.folder, partial, keep=2)
    if leads:  # all have it whole
        folders.tidy(memory.folder, found.in_folder(memory.folder), keep=1)
    return True


def _written(found: Snapshot, head: Mapping[str, Any], partial: Path, rank: int) -> tuple[str, str]:
    """Names of the files that it has written."""
    name, said = f"part-{rank:05d}.safetensors", f"part-{rank:05d}.json"
    file, boxes = parts.write(found.boxes, partial / name)
    own = Manifest(
        found.step, found.model, found.settings, found.extra, {name: file},
        stored_tensors([(name, file, boxes, found.sync)]), found.sync,
    )  # fmt: skip
    (partial / said).write_text(f"{json.dumps(head)}\n{manifest.dumps(own)}", encoding="utf-8")
    return name, said


def _all_have_room(everyone: Sequence[tuple[int, int, int, int]]) -> bool:
    """Node, its neighbour, bytes and free bytes of each rank: whether what comes to each node is no
    more than it has."""
    comes: dict[int, int] = {}
    free: dict[int, int] = {}
    for node, neighbour, size, left in everyone:
        comes[node] = comes.get(node, 0) + size
        comes[neighbour] = comes.get(neighbour, 0) + size
        free[node] = min(left, free.get(node, left))
    return all(comes.get(node, 0) <= left for node, left in free.items())
