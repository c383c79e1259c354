"""A product of what the ranks hold together, begun with the part that is there.

`product` goes over the parts in order from the rank's own on. A part is read once its signal says
that it has come; who brings it (copy engines, from the peers' memory) sets the signal. One program
per processor takes tile after tile.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.launch import Build, held_dtype, jit, tl, triton
from meshwright.ir.placed import peers
from meshwright.ir.tiles import Tile, device_of, tile

POINTERS, PLAIN, TURNED = 0, 1, 2
"""How a weight is read: by addresses of its values, or by a descriptor (TMA), rows of it or of what
it is the transpose of. Parts are read by addresses: they come while the kernel runs, and what a
descriptor reads has to be there before it."""
BY_POINTERS, BY_DESCRIPTOR = "product", "product_by_descriptor"
"""In the file of tiles (`ir.tiles`)."""
ALIGNED = 16
"""Bytes that divide where a descriptor's rows begin."""
DTYPES = tuple(getattr(torch, name) for name in peers.DTYPES)


def reference(parts: Tensor, weight: Tensor, bias: Tensor | None, inner: int) -> Tensor:
    """parts [ranks, outer x inner, k], weight [n, k], bias [n] -> [outer x ranks x inner, n]."""
    return torch.nn.functional.linear(in_order(parts, inner), weight, bias)


def in_order(parts: Tensor, inner: int) -> Tensor:
    """The parts of all ranks as the whole value has its rows: those of a rank lie in runs."""
    ranks, rows, width = parts.shape
    return parts.view(ranks, rows // inner, inner, width).transpose(0, 1).reshape(-1, width)


@jit
def wait(signal, epoch):
    """Until what the signal speaks of has come. What is read after it was written before it."""
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") < epoch:
        pass


@jit
def whole_row(row, rank, ranks, inner):
    """Which row of the whole value a row of a rank's part is."""
    return (row // inner) * (ranks * inner) + rank * inner + row % inner


@jit
def weight_read(
    weight, n, k, along, down, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr
):
    """A descriptor of the weight [n, k], or the weight."""
    if READ == 1:
        return tl.make_tensor_descriptor(weight, [n, k], [along, 1], [COLUMNS, DEPTH])
    elif READ == 2:
        return tl.make_tensor_descriptor(weight, [k, n], [down, 1], [DEPTH, COLUMNS])
    else:
        return weight


@jit
def product_tile(
    left, row, weight, bias, side, rows, n, k, along, down,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """The sums of products of rows that `left` points to with rows of the weight [n, k] from `side`
    on, which lie so far apart, and their elements; `weight` is `weight_read`."""
    column = side + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, DEPTH):
        deep = start + tl.arange(0, DEPTH)
        a = tl.load(left + deep[None, :], (row[:, None] < rows) & (deep[None, :] < k), 0.0)
        if READ == 1:
            b = tl.trans(weight.load([side, start]))
        elif READ == 2:
            b = weight.load([start, side])
        else:
            right = weight + tl.cast(column[None, :], tl.int64) * along
            deeper = tl.cast(deep[:, None], tl.int64) * down
            b = tl.load(right + deeper, (column[None, :] < n) & (deep[:, None] < k), 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, column < n, 0.0).to(tl.float32)[None, :]
    return total


@jit
def product_kernel(
    parts, signals, epoch, weight, bias, out, rows, inner, ranks, first, n, k,
    along, down, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    weight = weight_read(weight, n, k, along, down, COLUMNS, DEPTH, READ)
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(n, COLUMNS)
    for turn in range(tl.program_id(0), tiles * ranks, tl.num_programs(0)):
        rank = (first + turn // tiles) % ranks
        wait(signals + rank, epoch)
        at = turn % tiles
        row = (at // tl.cdiv(n, COLUMNS)) * ROWS + tl.arange(0, ROWS)
        side = (at % tl.cdiv(n, COLUMNS)) * COLUMNS
        column = side + tl.arange(0, COLUMNS)
        left = parts + (tl.cast(rank, tl.int64) * rows + row[:, None]) * k
        total = product_tile(
            left, row, weight, bias, side, rows, n, k, along, down,
            BIASED, ROWS, COLUMNS, DEPTH, READ,
        )  # fmt: skip
        to = tl.cast(whole_row(row, rank, ranks, inner), tl.int64)[:, None] * n + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < n)
        tl.store(out + to, total.to(out.dtype.element_ty), inside)


def product(
    parts: Tensor, signals: Tensor, epoch: int, weight: Tensor, bias: Tensor | None, inner: int,
    rank: int, launch: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """As `reference`, while parts still come. `launch`: in place of `how`, to compare tiles."""
    ranks, rows, k = parts.shape
    n = len(weight)
    out = parts.new_empty(ranks * rows, n)
    bias_or, launch = weight if bias is None else bias, launch or how(weight)
    product_kernel[(programs(launch, rows, ranks, weight),)](
        parts, signals, epoch, weight, bias_or, out, rows, inner, ranks, rank, n, k,
        *weight.stride(), BIASED=bias is not None, **launch,
    )  # fmt: skip
    return out


def how(weight: Tensor) -> dict[str, int]:
    """What a launch is told of tiles, and how it reads a weight [n, k]."""
    device, size, n = device_of(weight), weight.element_size(), len(weight)
    read = readable(weight)
    if read != POINTERS and (found := tile(device, BY_DESCRIPTOR, size, n)):
        _give_room()
        return {**found.launch, "READ": read}
    found = tile(device, BY_POINTERS, size, n)
    assert found is not None
    return {**found.launch, "READ": POINTERS}


def readable(weight: Tensor) -> int:
    """How a descriptor reads a weight; POINTERS if none can."""
    own = weight if weight.stride(1) == 1 else weight.T
    starts = own.stride(0) * weight.element_size(), weight.data_ptr()
    if not weight.numel() or own.stride(1) != 1 or any(start % ALIGNED for start in starts):
        return POINTERS
    return PLAIN if own is weight else TURNED


def programs(launch: dict[str, int], rows: int, ranks: int, weight: Tensor) -> int:
    """As many as run at once, and no more than there are tiles."""
    side = triton.cdiv(rows, launch["ROWS"]), triton.cdiv(len(weight), launch["COLUMNS"])
    return min(int(ranks * side[0] * side[1]), processors(weight))


def _give_room() -> None:
    """Triton asks for memory in which a program writes descriptors."""
    triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device="cuda"))


def processors(x: Tensor) -> int:
    """Programs that run at once; few where it is the interpreter."""
    if not x.is_cuda:
        return 2
    found: int = torch.cuda.get_device_properties(x.device).multi_processor_count
    return found


assert all(held_dtype(dtype) is torch.float32 for dtype in DTYPES)


def shapes(name: str, width: int) -> Iterator[tuple[int, Tile, tuple[int, int]]]:
    """What launches on known devices have for values of `name`: a target, a tile, and how a weight
    and one that is transposed are read."""
    for device, target in (("sm_80", 80), ("sm_90", 90)):
        for kernel, reads in ((BY_POINTERS, (POINTERS,) * 2), (BY_DESCRIPTOR, (PLAIN, TURNED))):
            if found := tile(device, kernel, 4 if name == "fp32" else 2, width):
                yield target, found, reads


def both_ways(
    kernel: Any, given: dict[str, str], constants: dict[str, Any], width: int, target: int,
    tile: Tile, reads: tuple[int, int],
) -> Iterator[Build]:  # fmt: skip
    """A product's kernel with a weight of `width` as it is, and transposed."""
    values = dict.fromkeys(("rows", "inner", "n", "k"), width)
    for one, other, read in zip(("down", "along"), ("along", "down"), reads, strict=True):
        yield Build(
            kernel, {**given, other: "i32"}, {one: 1, **constants, **tile.constants, "READ": read},
            {**values, other: width}, tile.warps, tile.stages, targets=(target,),
        )  # fmt: skip


def signature(name: str) -> dict[str, str]:
    """Types of the kernel's parameters but for the weight's strides."""
    pointer = f"*{name}"
    given = {"parts": pointer, "signals": "*i32", "epoch": "i32"}
    given |= dict.fromkeys(("weight", "bias", "out"), pointer)
    return given | dict.fromkeys(("rows", "inner", "ranks", "first", "n", "k"), "i32")


def builds(name: str, width: int) -> Iterator[Build]:
    """For values of `name`, such as bf16."""
    for shape in shapes(name, width):
        yield from both_ways(product_kernel, signature(name), {"BIASED": True}, width, *shape)
