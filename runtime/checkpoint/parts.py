"""The files that hold a checkpoint's tensors: safetensors, one a rank, each piece with a sum."""

import json
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.runtime.checkpoint.files import DamagedError, opened
from meshwright.runtime.checkpoint.manifest import PartFile, StoredPiece, Wanted
from meshwright.runtime.checkpoint.piece_files import PieceFiles
from meshwright.runtime.checkpoint.values import dtype_name, dtype_named, raw

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
}  # fmt: skip
"""What safetensors calls them; others are bytes to it."""


@dataclass(frozen=True, eq=False, slots=True)
class Box:
    """A box of a tensor, to be written."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    content: Tensor


@dataclass(frozen=True, slots=True)
class Written:
    """A box that was written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    piece: StoredPiece


def write(boxes: Sequence[Box], path: Path) -> tuple[PartFile, list[Written]]:
    """Writes one file; each tensor comes to the host only while it is written."""
    boxes = sorted(boxes, key=lambda box: -box.content.itemsize)  # stays aligned, as usual
    header = _header(boxes)
    found, start = [], len(header)
    with path.open("xb") as file, ThreadPoolExecutor(1) as beside:
        file.write(header)
        for box in boxes:
            data = raw(box.content)
            summed = beside.submit(zlib.crc32, data)
            file.write(data)
            piece = StoredPiece(
                box.offsets, tuple(box.content.shape), path.name, start, len(data), summed.result()
            )
            found.append(Written(box.name, dtype_name(box.content.dtype), box.shape, piece))
            start += len(data)
        file.flush()
        os.fsync(file.fileno())
    return PartFile(start, len(header), zlib.crc32(header)), found


def _header(boxes: Sequence[Box]) -> bytes:
    entries, start = {}, 0
    for box in boxes:
        x = box.content
        known = _DTYPES.get(dtype_name(x.dtype))
        place = "@" + ",".join(map(str, box.offsets)) if x.shape != torch.Size(box.shape) else ""
        entries[box.name + place] = {
            "dtype": known or "U8", "shape": list(x.shape) if known else [x.nbytes],
            "data_offsets": [start, start + x.nbytes],
        }  # fmt: skip
        start += x.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check(path: Path, part: PartFile) -> None:
    """DamagedError unless the file is as long as it was and begins as it did."""
    with opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != part.nbytes:
            raise DamagedError(
                f"{path} is damaged: it has {found} bytes, {part.nbytes} were written"
            )
        if part.header_bytes > part.nbytes or zlib.crc32(file.read(part.header_bytes)) != (
            part.header_crc32
        ):
            raise DamagedError(f"{path} is damaged: its header is not the one that was written")


def read(files: PieceFiles, wanted: Wanted, memory: Tensor) -> Tensor:
    """A piece, in its room or in `memory`; DamagedError if its bytes are not as written."""
    piece = wanted.piece
    memory = memory[: piece.nbytes] if wanted.room is None else wanted.room
    view = memory.numpy().data
    count = files.read_into(piece.file, piece.start, view)
    if count != piece.nbytes or zlib.crc32(view) != piece.crc32:
        raise DamagedError(
            f"{files.where(piece.file)} is damaged: the bytes of {wanted.name!r} at "
            f"{list(piece.offsets)} are not those that were written"
        )
    return memory.view(dtype_named(wanted.dtype)).reshape(piece.sizes)


_AHEAD = 2
"""Pieces that are read and summed while one is copied: more would only take memory."""


def read_all(files: PieceFiles, wanted: Sequence[Wanted]) -> Iterator[tuple[int, Tensor]]:
    """Each of `wanted` by its number; it holds until the next is asked for."""
    longest = max((w.piece.nbytes for w in wanted if w.room is None), default=0)
    # The same memory again and again: new memory would cost more than reading into it.
    memory = [torch.empty(longest, dtype=torch.uint8) for _ in range(_AHEAD + 1)]
    with ThreadPoolExecutor(_AHEAD) as beside:
        running: deque[tuple[int, Future[Tensor]]] = deque()
        for number, one in enumerate(wanted):
            slot = memory[number % len(memory)]
            running.append((number, beside.submit(read, files, one, slot)))
            if len(running) > _AHEAD:
                first, made = running.popleft()
                yield first, made.result()
        for first, made in running:
            yield first, made.result()
