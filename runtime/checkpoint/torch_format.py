"""Checkpoints that older versions wrote in torch's own format, read without running their code.

Their index is a pickle. Here it makes inert records of the few classes that such an index has, and
refuses every other name; tensors and settings are read with torch's `weights_only`.
"""

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint.files import DamagedError, opened
from meshwright.runtime.checkpoint.manifest import StoredPiece, StoredTensor, Wanted
from meshwright.runtime.checkpoint.values import dtype_name

INDEX = ".metadata"
MAX_BYTES = 4 * 2**30
_FILE = re.compile(r"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset(
    {(_METADATA, name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )}
    | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
       ("torch.serialization", "_get_layout")}
    | {("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")}
)  # fmt: skip
_BROKEN = (
    RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError, OSError,
    AssertionError, ImportError, OverflowError, MemoryError, pickle.UnpicklingError,
    zipfile.BadZipFile,
)  # fmt: skip
"""What readers of pickles and zip files raise on damaged bytes."""


class _PickledObject:
    """Stands for an object of the index: holds what the pickle says, does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__ |= {k: v for k, v in state.items() if isinstance(k, str)}
        else:
            self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_PickledObject,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise PlanError(
            f"{self._path} asks for {module}.{name}, which no index of a checkpoint needs: the "
            "file was not written by a checkpoint, or was changed to run code. It was not run"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise PlanError(f"{self._path} asks for a persistent object, which no index has")


@dataclass(frozen=True, slots=True)
class TorchCheckpoint:
    """What the index of an old checkpoint says, and the values that lie beside its tensors."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredPiece]
    """Names of what is no tensor."""

    def value(self, name: str) -> Any:
        """A number, text, or dict or list of them; PlanError if it needs code to be read."""
        if name not in self.values:
            raise DamagedError(f"{self.folder / INDEX} has no {name!r}")
        return _load(self.folder, name, self.values[name])

    def read_all(self, wanted: Sequence[Wanted]) -> Iterator[tuple[int, Tensor]]:
        """Each of `wanted` by its number."""
        for number, one in enumerate(wanted):
            name, piece = one.name, one.piece
            found = _load(self.folder, name, piece)
            if (
                not isinstance(found, Tensor)
                or dtype_name(found.dtype) != one.dtype
                or tuple(found.shape) != piece.sizes
            ):
                raise DamagedError(
                    f"{self.folder / piece.file} is damaged: {name!r} is not of the shape or dtype "
                    f"that {INDEX} says"
                )
            yield number, found


def read(folder: Path) -> TorchCheckpoint:
    """The index of a folder that torch wrote; DamagedError or PlanError if it is none."""
    path = folder / INDEX
    with opened(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DamagedError(f"{path} is longer than {MAX_BYTES} bytes")
    try:
        return _index(_Unpickler(io.BytesIO(content), path).load(), folder)
    except PlanError:
        raise
    except (*_BROKEN, RecursionError) as error:
        raise DamagedError(
            f"{path} is damaged: it is no index of torch's ({type(error).__name__}: {error})"
        ) from error


def _index(found: Any, folder: Path) -> TorchCheckpoint:
    where = {(key.fqn, _offsets(key)): info for key, info in found.storage_data.items()}
    tensors, values = {}, {}
    for name, stored in found.state_dict_metadata.items():
        if type(stored).__name__ != "TensorStorageMetadata":
            values[name] = _piece((), (), where[name, ()], folder)
            continue
        pieces = tuple(
            _piece(_ints(c.offsets), _ints(c.sizes), where[name, _ints(c.offsets)], folder)
            for c in stored.chunks
        )
        properties = stored.properties
        dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
        tensors[str(name)] = StoredTensor(dtype_name(dtype), _ints(stored.size), pieces)
    return TorchCheckpoint(folder, tensors, values)


def _offsets(key: Any) -> tuple[int, ...]:
    offset = getattr(key, "offset", None)
    return () if offset is None else _ints(offset)


def _ints(found: Any) -> tuple[int, ...]:
    if not isinstance(found, tuple) or any(type(x) is not int for x in found):
        raise ValueError(f"{found!r} is not a shape")
    return found


def _piece(
    offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any, folder: Path
) -> StoredPiece:
    file, start, nbytes = info.relative_path, info.offset, info.length
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise PlanError(f"{folder / INDEX} names a file {file!r}, which is none of a checkpoint's")
    if getattr(info, "transform_descriptors", None):
        raise PlanError(f"{folder / INDEX}: {file} is compressed or changed; it cannot be read")
    (start, nbytes) = _ints((start, nbytes))
    return StoredPiece(offsets, sizes, file, start, nbytes, -1)


def _load(folder: Path, name: str, piece: StoredPiece) -> Any:
    """One object. Its bytes are a zip file, whose own sums say whether it is as it was."""
    path = folder / piece.file
    with opened(path) as file:
        file.seek(piece.start)
        content = file.read(piece.nbytes)
    if len(content) != piece.nbytes:
        raise DamagedError(f"{path} is damaged: it ends within {name!r}")

    def failed(why: str) -> DamagedError:
        return DamagedError(
            f"{path} is damaged: the bytes of {name!r} at {list(piece.offsets)} are not those that "
            f"were written ({why})"
        )

    try:
        broken = zipfile.ZipFile(io.BytesIO(content)).testzip()
    except (*_BROKEN, NotImplementedError) as error:
        raise failed(str(error)) from error
    if broken is not None:
        raise failed(f"the sum of {broken!r}")
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise PlanError(
            f"{path}: {name!r} needs code to be read, and it was not run: {_short(error)}"
        ) from error
    except _BROKEN as error:
        raise failed(str(error)) from error


def _short(error: Exception) -> str:
    """What torch says it will not load, without its advice to load it all the same."""
    lines = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line]
    return (lines or [type(error).__name__])[0][:200]
