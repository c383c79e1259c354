"""Candidates of tiles for products beside peers and for attention with dropout, to be timed on a
device, and what to propose."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import attention_tiles
from benchmarks.attention_tiles import LENGTH
from benchmarks.tiles import CLASSES, DEPTH, RANKS, ROWS, candidates
from meshwright.ir.kernels.gather_linear import (
    BY_DESCRIPTOR,
    BY_POINTERS,
    POINTERS,
    product,
    readable,
)
from meshwright.ir.random.attention_tiles import FORWARD, KERNELS, attention_tile, head_room
from meshwright.ir.random.dropped_attention import backward, forward
from meshwright.ir.tiles import SCHEMA, Tile, choices, device_of

Timed = Mapping[tuple[str, Tile], float]
"""By kernel and tile, seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class TileCase:
    """One kernel in bfloat16 with one tile."""

    kernel: str
    tile: Tile
    run: Callable[[], object]

    @property
    def kind(self) -> tuple[str, int | None]:
        """The kernel and the class of columns."""
        return self.kernel, self.tile.most_columns

    @property
    def name(self) -> str:
        """As results call it."""
        size = f"{self.tile.rows}x{self.tile.columns}x{self.tile.depth}"
        wide = self.tile.most_columns or "more"
        return f"tiles of {self.kernel} {size}, {self.tile.warps} warps, to {wide}"


def tile_cases(device: str, tiny: bool) -> Iterator[TileCase]:
    """Yields all, those of a kernel and a class of columns one after the other: attention's first,
    as all devices run it by itself."""
    for heads in attention_tiles.HEADS[: 1 if tiny else None]:
        yield from _attending(device, tiny, heads)
    yield from _products(device, tiny)


def _attending(device: str, tiny: bool, heads: tuple[int, int]) -> Iterator[TileCase]:
    """Yields attention with heads so wide, in float16 where it is interpreted; a candidate of one
    of the backward's two kernels goes with the other's choice."""
    number, length, count = (1, 16, 1) if tiny else (8, LENGTH, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    query, key, value = (
        torch.randn(number, count, length, width, device=device).to(dtype)
        for width in (heads[0], *heads)
    )
    room, kind = head_room(*heads), device_of(query)
    found = {kernel: attention_tile(kind, kernel, room) for kernel in KERNELS}
    chosen = {kernel: tile for kernel, tile in found.items() if tile is not None}
    if len(chosen) < len(found):
        return
    numbered: Any = (0.1, 1, 0, (-1,), (1,))
    given: Any = (query, key, value, None)
    ahead: Any = forward
    back: Any = backward
    out, total = ahead(*given, True, 1.0, *numbered)
    for kernel in KERNELS:
        every = dict.fromkeys((chosen[kernel], *attention_tiles.candidates(room)))
        for tile in list(every)[: 2 if tiny else None]:
            tiles = {**chosen, kernel: tile}
            run = (
                partial(ahead, *given, True, 1.0, *numbered, tiles=tiles)
                if kernel == FORWARD
                else partial(back, out, *given, out, total, True, 1.0, *numbered, tiles=tiles)
            )
            yield TileCase(kernel, tile, run)


def _products(device: str, tiny: bool) -> Iterator[TileCase]:
    """Yields products with columns of each class."""
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
        classes = [most for most, _ in CLASSES]
        if kernel in KERNELS:
            classes = [tile.most_columns for tile in tiles]
        fastest = [_fastest(kernel, most, timed) for most in classes]
        own = [replace(tile, source=f"measured on {name}") for tile in fastest if tile]
        whole = len(own) == len(classes)
        kept = [tile for tile in tiles if not whole or tile.item_bytes != own[0].item_bytes]
        found[kernel] = [*(own if whole else []), *kept]
    written = {kernel: [asdict(tile) for tile in tiles] for kernel, tiles in found.items()}
    return {"schema": SCHEMA, "devices": {device: written}}


def _fastest(kernel: str, most: int | None, timed: Timed) -> Tile | None:
    own = {t: s for (k, t), s in timed.items() if (k, t.most_columns) == (kernel, most)}
    return min(own, key=lambda tile: own[tile], default=None)
