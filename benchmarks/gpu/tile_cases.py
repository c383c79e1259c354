"""Candidates of tiles for products beside peers, to be timed on a device, and what to propose."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.tiles import CLASSES, DEPTH, RANKS, ROWS, candidates
from meshwright.ir.kernels.gather_linear import (
    BY_DESCRIPTOR,
    BY_POINTERS,
    POINTERS,
    product,
    readable,
)
from meshwright.ir.tiles import SCHEMA, Tile, choices, device_of

Timed = Mapping[tuple[str, Tile], float]
"""By kernel and tile, seconds."""


@dataclass(frozen=True, slots=True)
class TileCase:
    """One product in bfloat16 with one tile."""

    kernel: str
    tile: Tile
    run: Callable[[], object]

    @property
    def name(self) -> str:
        """As results call it."""
        size = f"{self.tile.rows}x{self.tile.columns}x{self.tile.depth}"
        wide = self.tile.most_columns or "more"
        return f"tiles/{self.kernel} {size}, {self.tile.warps} warps, to {wide}"


def tile_cases(device: str, tiny: bool) -> Iterator[TileCase]:
    """Yields those that the device has room for, with columns of each class."""
    rows, depth = (16, 32) if tiny else (ROWS, DEPTH)
    for most, columns in CLASSES:
        parts = torch.randn(RANKS, rows, depth, device=device).bfloat16()
        weight = torch.randn(64 if tiny else columns, depth, device=device).bfloat16()
        signals = torch.ones(RANKS, dtype=torch.int32, device=device)
        for kernel in (BY_POINTERS, BY_DESCRIPTOR):
            read = POINTERS if kernel == BY_POINTERS else readable(weight)
            if kernel not in choices()[device_of(weight)]:
                continue
            for tile in candidates(2):
                launch = {**tile.launch, "READ": read}
                yield TileCase(
                    kernel, replace(tile, most_columns=most), _call(parts, signals, weight, launch)
                )


def _call(
    parts: Tensor, signals: Tensor, weight: Tensor, launch: dict[str, int]
) -> Callable[[], object]:
    return lambda: product(parts, signals, 1, weight, None, parts.shape[1], 0, launch)


def proposal(device: str, name: str, timed: Timed) -> dict[str, Any]:
    """The file's data for a device, with the fastest tiles that were measured on it, which is
    called `name`, in place of counted ones, where all classes of columns were."""
    found: dict[str, list[Tile]] = {}
    for kernel, tiles in choices()[device].items():
        fastest = [_fastest(kernel, most, timed) for most, _ in CLASSES]
        own = [replace(tile, source=f"measured on {name}") for tile in fastest if tile]
        whole = len(own) == len(CLASSES)
        kept = [tile for tile in tiles if not whole or tile.item_bytes != own[0].item_bytes]
        found[kernel] = [*(own if whole else []), *kept]
    written = {kernel: [asdict(tile) for tile in tiles] for kernel, tiles in found.items()}
    return {"schema": SCHEMA, "devices": {device: written}}


def _fastest(kernel: str, most: int | None, timed: Timed) -> Tile | None:
    own = {t: s for (k, t), s in timed.items() if (k, t.most_columns) == (kernel, most)}
    return min(own, key=lambda tile: own[tile], default=None)
