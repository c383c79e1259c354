"""Tiles of attention with dropout: candidates, and which of them is chosen by count.

Counted are the turns of a head's programs over their loops, causal: what differs is how much a turn
does, and what it takes. Chosen is the least, of those that spill nothing and fit with every kind of
mask.
"""

from collections.abc import Iterable, Iterator
from functools import cache

from benchmarks.tile_targets import COUNT, TARGETS, is_legal, turn_cycles
from meshwright.ir.random.attention_kernels import ADDED, LOOKS, NO_MASK
from meshwright.ir.random.attention_tiles import (
    FORWARD,
    ITEM_BYTES,
    KEYS,
    HeadRoom,
    build,
    head_room,
)
from meshwright.ir.tiles import Tile
from meshwright.testing.machine_code import Code, machine_code

HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
"""Widths of keys and values that stand for all that have such room."""
NARROW = ((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2))
WIDE = ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 1), (32, 16, 4, 1))
"""Rows, depth, warps, stages that are compared; for keys and values of more than 128 each."""
SMALL = ((32, 32, 4, 2), (32, 16, 4, 1))
"""Where none of these is legal."""
LENGTH = 1024
"""Of the sequences that are counted."""


def candidates(room: HeadRoom) -> Iterator[Tile]:
    """Yields what is compared for heads with such room."""
    yield from _tiles(room, NARROW if room.keys <= 128 else WIDE)


def _tiles(room: HeadRoom, sizes: Iterable[tuple[int, int, int, int]]) -> Iterator[Tile]:
    for rows, depth, warps, stages in sizes:
        yield Tile(ITEM_BYTES, room.columns, rows, room.columns, depth, warps, stages, COUNT)


@cache
def code_of(capability: int, kernel: str, heads: tuple[int, int], mask: int, tile: Tile) -> Code:
    """Returns a kernel's machine code."""
    return machine_code(build(kernel, "bf16", *heads, mask, tile, capability), capability)


def is_legal_with(device: str, kernel: str, heads: tuple[int, int], mask: int, tile: Tile) -> bool:
    """Says whether a kernel spills nothing and fits; what cannot be compiled does not."""
    try:
        code = code_of(TARGETS[device].capability, kernel, heads, mask, tile)
    except RuntimeError:
        return False
    return is_legal(device, code)


def cycles(device: str, kernel: str, heads: tuple[int, int], tile: Tile) -> float:
    """Counts those of one head on one processor: every query with every key, a tile at a time."""
    room = head_room(*heads)
    products = {FORWARD: room.keys + room.values, KEYS: 2 * (room.keys + room.values)}
    each = products.get(kernel, 2 * room.keys + room.values)
    code = code_of(TARGETS[device].capability, kernel, heads, NO_MASK, tile)
    turn = turn_cycles(
        device, code, tile.warps, 2 * tile.rows * tile.depth * each,
        tile.depth * (room.keys + room.values) * ITEM_BYTES, ITEM_BYTES,
    )  # fmt: skip
    return -(-LENGTH // tile.rows) * -(-LENGTH // tile.depth) * turn


def choose(device: str, kernel: str) -> Iterator[Tile]:
    """Yields the choice for each width of heads; none where no candidate fits."""
    for heads in HEADS:
        room = head_room(*heads)
        for tiles in (candidates(room), _tiles(room, SMALL)):
            if found := _least(device, kernel, heads, tiles):
                yield found
                break


def _least(device: str, kernel: str, heads: tuple[int, int], tiles: Iterable[Tile]) -> Tile | None:
    """Returns the one with the fewest cycles of those that are legal with every kind of mask."""
    legal = [one for one in tiles if is_legal_with(device, kernel, heads, NO_MASK, one)]
    for tile in sorted(legal, key=lambda one: cycles(device, kernel, heads, one)):
        if all(is_legal_with(device, kernel, heads, mask, tile) for mask in (LOOKS, ADDED)):
            return tile
    return None
