"""The manifest of a checkpoint: its tensors, their bytes in its files, and the sums of all.

It is one JSON file, `checkpoint.json`. Its own sum covers all that it says, the sums in it cover
every other byte that is read.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Annotated, Any

from pydantic import StringConstraints, TypeAdapter, ValidationError
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint.files import DamagedError, opened
from meshwright.runtime.checkpoint.values import dtype_named

NAME = "checkpoint.json"
FORMAT = "meshwright checkpoint"
VERSION = 1
MAX_BYTES = 4 * 2**30
PART = re.compile(r"part-[0-9]{5,9}\.safetensors")
"""Names of the files that hold tensors."""
FRAGMENT = re.compile(r"part-[0-9]{5,9}\.json")
"""Names of files that say what one rank has written, where nobody has joined them."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor: where it lies in the tensor, and its bytes in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    crc32: int
    """-1 where the format has no such sum."""


@dataclass(frozen=True, eq=False, slots=True)
class Wanted:
    """A piece that is to be read."""

    name: str
    dtype: str
    piece: StoredPiece
    room: Tensor | None = None
    """Memory of bytes where it may be put at once."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor, in pieces that do not overlap."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file that holds pieces: what comes before them, and how long it is."""

    nbytes: int
    header_bytes: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class SyncValues:
    """What a form of synchronisation kept of a rank, beside its tensors; encoded."""

    layout: str
    """Of the stage: what another plan must have in common to go on from it."""
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a checkpoint says beside its tensors' bytes; `settings` and `extra` are encoded."""

    step: int
    model: str
    """Fingerprint of the traced model."""
    settings: Any
    extra: Any
    files: Mapping[str, PartFile]
    tensors: Mapping[str, StoredTensor]
    sync: Mapping[str, SyncValues] = field(default_factory=dict)
    """What forms of synchronisation kept (`sync_state`): `stage/rank` -> values."""


_FILES = TypeAdapter(dict[str, PartFile])
_TENSORS = TypeAdapter(dict[str, StoredTensor])
_SYNC = TypeAdapter(
    dict[Annotated[str, StringConstraints(pattern=r"^\d{1,9}/\d{1,9}$")], SyncValues]
)


def dumps(manifest: Manifest) -> str:
    """The text of `checkpoint.json`."""
    content = {
        "step": manifest.step, "model": manifest.model, "settings": manifest.settings,
        "extra": manifest.extra,
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "tensors": {name: asdict(tensor) for name, tensor in manifest.tensors.items()},
        **({"sync": {k: asdict(v) for k, v in manifest.sync.items()}} if manifest.sync else {}),
    }  # fmt: skip
    text = _canonical(content)
    head = {"format": FORMAT, "version": VERSION, "sha256": _sum(text)}
    return f'{json.dumps(head)[:-1]}, "content": {text}}}\n'


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder, checked; DamagedError says what is wrong with it."""
    path = folder / NAME
    with opened(path) as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise DamagedError(f"{path} is longer than {MAX_BYTES} bytes")
    return parsed(text, path)


def parsed(text: str | bytes, path: Path, *, whole: bool = True) -> Manifest:
    """The manifest that `dumps` wrote as `text`, checked; of one rank alone if not `whole`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DamagedError(f"{path} is not the manifest of a checkpoint (format {FORMAT!r})")
    if data.get("version") != VERSION:
        raise PlanError(
            f"{path} has version {data.get('version')!r}; this meshwright reads {VERSION}"
        )
    content = data.get("content")
    if not isinstance(content, dict) or data.get("sha256") != _sum(_canonical(content)):
        raise DamagedError(f"{path} is damaged: its sum is not that of what it says")
    return _checked(content, path, whole)


def joined(fragments: Sequence[Manifest], path: Path) -> Manifest:
    """The manifest of a checkpoint, of those of its ranks, the first one's first; DamagedError if
    they do not make a whole. Of a number that several ranks wrote, the first counts."""
    first = fragments[0]
    pieces: dict[str, dict[tuple[int, ...], StoredPiece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for one in fragments:
        if (one.step, one.model) != (first.step, first.model):
            raise DamagedError(f"{path}: its ranks tell of different steps or models")
        for name, tensor in one.tensors.items():
            if kinds.setdefault(name, kind := (tensor.dtype, tensor.shape)) != kind:
                raise DamagedError(f"{path}: ranks keep {name!r} in different ways")
            for piece in tensor.pieces:
                pieces.setdefault(name, {}).setdefault(piece.offsets, piece)
    made = Manifest(
        first.step, first.model, first.settings, first.extra,
        {name: file for one in fragments for name, file in one.files.items()},
        {name: StoredTensor(*kinds[name], tuple(found.values())) for name, found in pieces.items()},
        {where: entry for one in fragments for where, entry in one.sync.items()},
    )  # fmt: skip
    for name, tensor in made.tensors.items():
        _check_tensor(name, tensor, made.files, path, whole=True)
    return made


def _checked(content: dict[str, Any], path: Path, whole: bool) -> Manifest:
    try:
        made = Manifest(
            content["step"], content["model"], content["settings"], content["extra"],
            _FILES.validate_json(_canonical(content["files"]), strict=True),
            _TENSORS.validate_json(_canonical(content["tensors"]), strict=True),
            _SYNC.validate_json(_canonical(content.get("sync", {})), strict=True),
        )  # fmt: skip
    except KeyError as error:
        raise DamagedError(f"{path} lacks {error.args[0]!r}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedError(f"{path}: {first['loc']}: {first['msg']}") from error
    if type(made.step) is not int or type(made.model) is not str:
        raise DamagedError(f"{path}: step and model are {made.step!r} and {made.model!r}")
    for name in made.files:
        if not PART.fullmatch(name):
            raise PlanError(f"{path} names a file {name!r}, which is none of a checkpoint's")
    for name, tensor in made.tensors.items():
        _check_tensor(name, tensor, made.files, path, whole=whole)
    return made


def _check_tensor(
    name: str, tensor: StoredTensor, files: Mapping[str, PartFile], path: Path, *, whole: bool
) -> None:
    size, count = dtype_named(tensor.dtype).itemsize, 0
    for piece in tensor.pieces:
        numbers = prod(piece.sizes)
        fits = len(piece.offsets) == len(piece.sizes) == len(tensor.shape) and all(
            0 <= start and 0 < length and start + length <= extent
            for start, length, extent in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
        )
        file = files.get(piece.file)
        if not fits or file is None or piece.nbytes != numbers * size or piece.start < 0:
            raise DamagedError(f"{path}: a piece of {name!r} at {piece.offsets} does not fit")
        if piece.start + piece.nbytes > file.nbytes:
            raise DamagedError(f"{path}: a piece of {name!r} lies beyond the end of {piece.file}")
        count += numbers
    if whole and count != prod(tensor.shape):
        raise DamagedError(
            f"{path}: the pieces of {name!r} have {count} elements, it has {prod(tensor.shape)}"
        )


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
