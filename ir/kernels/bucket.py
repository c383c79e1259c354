"""Parameters' gradients as one flat tensor, rank by rank, in one pass; and flat values back.

A bucket's tensors are cut into as many chunks as ranks share it, the last ones short or empty, and
a rank's chunks of all tensors lie one behind the other. One launch takes what would be a copy for
each tensor and rank: a table says which piece of which tensor each program moves. Packing can scale
and cast on the way. All this is outside autograd.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.aligned import count_of, lies_whole, run_of
from meshwright.ir.launch import Build, element, jit, tl, way, wide
from meshwright.ir.pinned import sent

COLUMNS = 5
"""Of the table: tensor, its first element, how many, their place in the flat tensor, room there."""
PIECE = 4096
"""Elements that one program moves."""


def table(sizes: Sequence[int], chunks: Sequence[int], ranks: int) -> Tensor:
    """What each program moves of tensors with so many elements, in chunks of so many."""
    rows, width, before = [], sum(chunks), 0
    for index, (size, chunk) in enumerate(zip(sizes, chunks, strict=True)):
        for rank in range(ranks):
            own = min(max(size - rank * chunk, 0), chunk)
            for start in range(0, chunk, PIECE):
                count, room = max(own - start, 0), min(chunk - start, PIECE)
                to = rank * width + before + start
                rows.append((index, rank * chunk + start, min(count, PIECE), to, room))
        before += chunk
    return torch.tensor(rows, dtype=torch.int64).view(-1, COLUMNS)


def packed(
    tensors: Sequence[Tensor | None], flat: Tensor, chunks: Sequence[int], scale: float = 1.0
) -> Tensor:
    """The reference: `flat` [ranks, width], which is all zeros, with the tensors; None is zero."""
    for part, chunk, x in zip(torch.split(flat, list(chunks), 1), chunks, tensors, strict=True):
        if x is not None and x.numel():
            for rank, piece in enumerate(torch.split(x.reshape(-1), chunk)):
                into = part[rank, : piece.numel()]
                into.copy_(piece if scale == 1.0 else piece * scale)
    return flat


def unpacked(flat: Tensor, tensors: Sequence[Tensor], chunks: Sequence[int]) -> None:
    """The reference: writes `flat` to the tensors."""
    for part, chunk, x in zip(torch.split(flat, list(chunks), 1), chunks, tensors, strict=True):
        if x.numel():
            for rank, piece in enumerate(torch.split(x.view(-1), chunk)):
                piece.copy_(part[rank, : piece.numel()])


@jit
def _pack(
    source, flat, first, count, room, scale, SOURCE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    value = tl.load(run_of(source, SOURCE, WHOLE) + at, at < count_of(count, WHOLE), 0.0)
    made = (value.to(WIDE) * scale).to(flat.dtype.element_ty)
    tl.store(flat + count_of(first, WHOLE) + at, made, at < count_of(room, WHOLE))


@jit
def pack_kernel(
    addresses, rows, flat, scale, SOURCE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Room that no tensor fills gets zeros, so nobody has to clear the flat tensor before."""
    row = rows + tl.program_id(0).to(tl.int64) * 5
    address, room = tl.load(addresses + tl.load(row)), tl.load(row + 4)
    source = address + tl.load(row + 1) * (SOURCE.primitive_bitwidth // 8)
    to, count = tl.load(row + 3), tl.where(address == 0, 0, tl.load(row + 2))
    if lies_whole(source, to | count | room):
        _pack(source, flat, to, count, room, scale, SOURCE, True, BLOCK, WIDE)
    else:
        _pack(source, flat, to, count, room, scale, SOURCE, False, BLOCK, WIDE)


@jit
def _unpack(flat, first, to, count, TARGET: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < count_of(count, WHOLE)
    value = tl.load(flat + count_of(first, WHOLE) + at, inside, 0.0)
    tl.store(run_of(to, TARGET, WHOLE) + at, value.to(TARGET), inside)


@jit
def unpack_kernel(addresses, rows, flat, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 5
    first, count = tl.load(row + 3), tl.load(row + 2)
    to = tl.load(addresses + tl.load(row)) + tl.load(row + 1) * (TARGET.primitive_bitwidth // 8)
    if lies_whole(to, first | count):
        _unpack(flat, first, to, count, TARGET, True, BLOCK)
    else:
        _unpack(flat, first, to, count, TARGET, False, BLOCK)


@custom_op("meshwright::bucket_pack", mutates_args=())
def pack(
    tensors: Sequence[Tensor | None], rows: Tensor, chunks: Sequence[int], ranks: int,
    scale: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[ranks, width]; `rows` are the `table` of the tensors, which have one dtype."""
    given = [None if x is None else x.contiguous() for x in tensors]
    shape, source = (ranks, sum(chunks)), next((x for x in given if x is not None), None)
    if source is None or not len(rows) or way("bucket", rows) == "torch":
        flat = torch.zeros(shape, dtype=dtype, device=rows.device)
        return packed(given, flat, chunks, scale)
    flat = torch.empty(shape, dtype=dtype, device=rows.device)
    pack_kernel[(len(rows),)](
        addresses_of(given, rows), rows, flat, scale, SOURCE=element(source.dtype), BLOCK=PIECE,
        WIDE=wide(source.dtype),
    )  # fmt: skip
    return flat


@custom_op("meshwright::bucket_unpack", mutates_args=("tensors",))
def unpack(flat: Tensor, tensors: Sequence[Tensor], rows: Tensor, chunks: Sequence[int]) -> None:
    """Writes the flat tensor to the tensors, which are contiguous and have one dtype."""
    if not len(rows) or way("bucket", rows) == "torch":
        unpacked(flat, tensors, chunks)
        return
    assert all(x.is_contiguous() for x in tensors)
    unpack_kernel[(len(rows),)](
        addresses_of(tensors, rows), rows, flat.contiguous(), TARGET=element(tensors[0].dtype),
        BLOCK=PIECE,
    )  # fmt: skip


@pack.register_fake
def _pack_shape(
    tensors: Sequence[Tensor | None], rows: Tensor, chunks: Sequence[int], ranks: int,
    scale: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return rows.new_empty((ranks, sum(chunks)), dtype=dtype)


@unpack.register_fake
def _unpack_shape(
    flat: Tensor, tensors: Sequence[Tensor], rows: Tensor, chunks: Sequence[int]
) -> None:
    return None


def addresses_of(tensors: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Where the tensors lie; 0 for one that is not there or has no elements. Torch gives gradients
    the same memory step after step, so that most lists are on the device already."""
    found = tuple([0 if x is None else x.data_ptr() for x in tensors])
    key = like.device, found
    known = _ADDRESSES.pop(key, None)
    if known is None:
        known = sent(torch.tensor(found, dtype=torch.int64, device="cpu"), like.device)
    _ADDRESSES[key] = known  # the newest last
    if len(_ADDRESSES) > MOST_ADDRESSES:
        del _ADDRESSES[next(iter(_ADDRESSES))]
    return known


MOST_ADDRESSES = 1024
"""Lists that are kept on devices: a few for each bucket of a job."""
_ADDRESSES: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
"""By device and addresses, the list on the device; that used longest ago first."""


def builds(name: str, width: int) -> Iterator[Build]:
    """For tensors of `name`, such as bf16, which go into float32 and come from it."""
    source = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[name]
    given = {"addresses": "*i64", "rows": "*i64", "flat": "*fp32"}
    constants = {"SOURCE": source, "BLOCK": PIECE, "WIDE": tl.float32}
    moves = PIECE * (source.primitive_bitwidth // 8 + 4)
    yield Build(pack_kernel, {**given, "scale": "fp32"}, constants, moves=moves)
    yield Build(unpack_kernel, given, {"TARGET": source, "BLOCK": PIECE}, moves=moves)
