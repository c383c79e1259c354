"""Tiles of products beside peers and of attention with dropout, chosen by machine code, for each
kind of device.

python -m benchmarks.tiles [--device sm_90] [--out ir/tiles/choices.json]

Compiles the candidates for a target without a GPU, a weight as it is and transposed, and drops what
spills registers or needs more shared memory than the device has. Of the rest it takes the one with
which products of usual sizes take the fewest cycles by count: waves of tiles over the processors,
times the steps of a tile, times the cycles of a step, which are those of the busiest of tensor
cores, the cache (`meshwright.testing.copy_share` says which of its figures are assumptions) and
the instructions of the loop. Nothing is measured.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import attention_tiles
from benchmarks.tile_targets import COUNT, TARGETS, is_legal, turn_cycles
from meshwright.ir.kernels import gather_linear, linear_scatter
from meshwright.ir.kernels.gather_linear import BY_DESCRIPTOR, BY_POINTERS, PLAIN, POINTERS, TURNED
from meshwright.ir.launch import Build, tl
from meshwright.ir.random.attention_tiles import KERNELS
from meshwright.ir.tiles import SCHEMA, Tile
from meshwright.testing.machine_code import Code, machine_code

RANKS, ROWS, DEPTH = 4, 1024, 4096
"""Of the products that are counted: ranks, rows of each, and what is summed over."""
CLASSES = ((1536, 1024), (None, 4096))
"""Columns at most, and of the product that stands for them."""
CANDIDATES: dict[int, tuple[tuple[int, int, int, int, int], ...]] = {
    2: ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 64, 64, 4, 3), (64, 64, 64, 4, 2),
        (64, 64, 32, 4, 3)),
    4: ((128, 128, 16, 8, 3), (128, 64, 16, 8, 3), (64, 64, 16, 4, 3)),
}  # fmt: skip
"""Rows, columns, depth, warps, stages; by bytes of a value."""
READS = {BY_POINTERS: (POINTERS, POINTERS), BY_DESCRIPTOR: (PLAIN, TURNED)}
_NAMES = {2: "bf16", 4: "fp32"}


def candidates(item_bytes: int) -> Iterator[Tile]:
    """Yields what is compared."""
    for rows, columns, depth, warps, stages in CANDIDATES[item_bytes]:
        yield Tile(item_bytes, None, rows, columns, depth, warps, stages, COUNT)


@cache
def codes(device: str, kernel: str, tile: Tile, module: Any = gather_linear) -> tuple[Code, ...]:
    """Machine code of a product with a tile, with a weight as it is and transposed."""
    target, name = TARGETS[device].capability, _NAMES[tile.item_bytes]
    found = builds(module, name, target, tile, READS[kernel])
    return tuple([machine_code(build, target) for build in found])


def builds(
    module: Any, name: str, target: int, tile: Tile, reads: tuple[int, int]
) -> Iterator[Build]:
    """As launches have it."""
    constants: dict[str, Any] = {"BIASED": True}
    if module is linear_scatter:
        constants["ELEMENT"] = {"bf16": tl.bfloat16, "fp32": tl.float32}[name]
    yield from gather_linear.both_ways(
        module.product_kernel, module.signature(name), constants, DEPTH, target, tile, reads
    )


def step_cycles(device: str, tile: Tile, code: Code) -> float:
    """Count the cycles in which a processor takes `depth` of a tile's sums."""
    read = (tile.rows + tile.columns) * tile.depth * tile.item_bytes
    flops = 2 * tile.rows * tile.columns * tile.depth
    return turn_cycles(device, code, tile.warps, flops, read, tile.item_bytes)


def cycles(device: str, tile: Tile, columns: int, found: Sequence[Code]) -> float:
    """Count those of a whole product: of its forms the longer one's."""
    tiles = RANKS * -(-ROWS // tile.rows) * -(-columns // tile.columns)
    waves = -(-tiles // TARGETS[device].processors)
    steps = waves * -(-DEPTH // tile.depth)
    return steps * max(step_cycles(device, tile, code) for code in found)


def choose(device: str, kernel: str, item_bytes: int) -> Iterator[Tile]:
    """Yields the choice for each class of columns; equal neighbours are one."""
    legal = [
        tile
        for tile in candidates(item_bytes)
        if all(is_legal(device, code) for code in codes(device, kernel, tile))
    ]
    chosen: list[Tile] = []
    for most, columns in CLASSES:
        order = sorted(
            legal, key=lambda one: cycles(device, one, columns, codes(device, kernel, one))
        )
        best = next((one for one in order if scatters(device, kernel, one)), None)
        if best is None:
            return
        if chosen and _size(chosen[-1]) == _size(best):
            chosen.pop()
        chosen.append(Tile(**{**asdict(best), "most_columns": most}))
    yield from chosen


def scatters(device: str, kernel: str, tile: Tile) -> bool:
    """Whether the product that sends its parts has room for the tile, too."""
    return all(is_legal(device, code) for code in codes(device, kernel, tile, linear_scatter))


def _size(tile: Tile) -> tuple[int, ...]:
    return tile.rows, tile.columns, tile.depth, tile.warps, tile.stages


def kernels_of(device: str) -> tuple[tuple[str, int], ...]:
    """What a device has choices for. Descriptors (TMA) came with sm_90; with values of four bytes,
    whose products plain registers make, kernels that use them spill."""
    by_pointers = tuple(product((BY_POINTERS,), CANDIDATES))
    return (*by_pointers, (BY_DESCRIPTOR, 2)) if device == "sm_90" else by_pointers


def made(devices: Sequence[str]) -> dict[str, Any]:
    """The file's data."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for device in devices:
        for kernel, item_bytes in kernels_of(device):
            own = found.setdefault(device, {}).setdefault(kernel, [])
            own += map(asdict, choose(device, kernel, item_bytes))
        for kernel in KERNELS:
            found[device][kernel] = [asdict(one) for one in attention_tiles.choose(device, kernel)]
    return {"schema": SCHEMA, "devices": found}


def main() -> None:
    """Prints the file, or writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=tuple(TARGETS), nargs="+", default=tuple(TARGETS))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    text = json.dumps(made(asked.device), indent=1) + "\n"
    if asked.out:
        asked.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
