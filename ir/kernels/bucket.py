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

from meshwright.ir.launch import ELEMENTS, Build, element, jit, tl, way, wide

COLUMNS = 5
"""Of the table: tensor, its first element, how many, their place in the flat tensor, room there."""


def table(sizes: Sequence[int], chunks: Sequence[int], ranks: int) -> Tensor:
    """What each program moves of tensors with so many elements, in chunks of so many."""
    rows, width, before = [], sum(chunks), 0
    for index, (size, chunk) in enumerate(zip(sizes, chunks, strict=True)):
        for rank in range(ranks):
            own = min(max(size - rank * chunk, 0), chunk)
            for start in range(0, chunk, ELEMENTS):
                count, room = max(own - start, 0), min(chunk - start, ELEMENTS)
                to = rank * width + before + start
                rows.append((index, rank * chunk + start, min(count, ELEMENTS), to, room))
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
def pack_kernel(
    addresses, rows, flat, scale, SOURCE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Room that no tensor fills gets zeros, so nobody has to clear the flat tensor before."""
    row = rows + tl.program_id(0).to(tl.int64) * 5
    address = tl.load(addresses + tl.load(row))
    source = address.to(tl.pointer_type(SOURCE)) + tl.load(row + 1)
    at = tl.arange(0, BLOCK)
    count = tl.where(address == 0, 0, tl.load(row + 2))
    value = tl.load(source + at, at < count, 0.0).to(WIDE) * scale
    to = flat + tl.load(row + 3) + at
    tl.store(to, value.to(flat.dtype.element_ty), at < tl.load(row + 4))


@jit
def unpack_kernel(addresses, rows, flat, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 5
    target = tl.load(addresses + tl.load(row)).to(tl.pointer_type(TARGET)) + tl.load(row + 1)
    at = tl.arange(0, BLOCK)
    inside = at < tl.load(row + 2)
    value = tl.load(flat + tl.load(row + 3) + at, inside, 0.0)
    tl.store(target + at, value.to(TARGET), inside)


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
        addresses_of(given, rows), rows, flat, scale, SOURCE=element(source.dtype), BLOCK=ELEMENTS,
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
        BLOCK=ELEMENTS,
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
    """Where the tensors lie; 0 for one that is not there or has no elements."""
    found = [0 if x is None else x.data_ptr() for x in tensors]
    return torch.tensor(found, dtype=torch.int64).to(like.device, non_blocking=True)


def builds(name: str, width: int) -> Iterator[Build]:
    """For tensors of `name`, such as bf16, which go into float32 and come from it."""
    source = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[name]
    given = {"addresses": "*i64", "rows": "*i64", "flat": "*fp32"}
    constants = {"SOURCE": source, "BLOCK": ELEMENTS, "WIDE": tl.float32}
    yield Build(pack_kernel, {**given, "scale": "fp32"}, constants)
    yield Build(unpack_kernel, given, {"TARGET": source, "BLOCK": ELEMENTS})
