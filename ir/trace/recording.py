"""What one call of a training step does, as data that two calls can be compared by.

Operators are recorded below autograd, on fake tensors. What depends on no parameter, buffer or
input (a mask, a table of angles) is known by how it was made, so that a call which made it and a
later one that finds it in a cache are equal. What neither the loss nor a buffer needs is left out.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from meshwright.ir.text.digest import digest
from meshwright.ir.torch_modes import recording
from meshwright.ir.torch_private import (
    is_random,
    leaves,
    makes_view,
    real_mode,
    schema_arguments,
    storage_key,
    written_arguments,
)

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
REAL = (Tensor, torch.nn.Parameter)
OLD = "old"
LARGEST = 1 << 20
"""Elements of a real tensor that is known by its values."""


@dataclass(frozen=True, slots=True)
class ReadMemory:
    """A tensor as a call reads it: a piece of memory, and how it lies there."""

    memory: int
    form: str
    content: str
    """What is in it, if that depends on no data; "old ..." if an earlier call computed it."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operator that depends on data."""

    operator: str
    args: tuple[Any, ...]
    """As given, tensors as `ReadMemory`."""
    outputs: tuple[int, ...]
    written: tuple[int, ...]
    """Memory that it makes or changes, and that it changes."""
    grad: bool
    file: str
    line: int


@dataclass(slots=True)
class CallRecorder:
    """Follows one copy of a step through its calls."""

    given: dict[int, str] = field(default_factory=dict)
    """Memory of parameters, buffers and inputs -> what it is called."""
    _content: dict[int, str] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)
    """Keeps memory from being given to other tensors."""
    _bound: set[int] = field(default_factory=set)
    """Memory whose content depends on data."""
    _from_outside: set[int] = field(default_factory=set)
    """Memory of tensors that no recorded call made."""
    _entries: list[RecordedCall] = field(default_factory=list)

    @contextmanager
    def call(self) -> Iterator[list[RecordedCall]]:
        """Records what is done inside, as the next call."""
        for memory in self._bound - self.given.keys():
            self._content[memory] = f"{OLD} {memory}"
        for memory in self._from_outside:
            self._content.pop(memory, None)
        self._bound, self._from_outside, self._entries = set(self.given), set(), []
        with recording(self._called):
            yield self._entries

    def know(self, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        """Name what the next call is given: parameters, buffers, inputs; and plain attributes."""
        self.given = {storage_key(tensor): name for name, tensor in tensors.items()}
        for name, tensor in held.items():
            if storage_key(tensor) not in self.given and type(tensor) not in REAL:
                self._content.setdefault(storage_key(tensor), f"held {name}")
        self._alive += [*tensors.values(), *held.values()]

    def is_computed(self, tensor: Tensor) -> bool:
        """Whether a recorded call computed it from data."""
        memory = storage_key(tensor)
        bound = memory in self._bound or self._content.get(memory, "").startswith(OLD)
        return bound and memory not in self.given

    def _called(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        given = leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, Tensor)]
        results = [x for x in leaves(result) if isinstance(x, Tensor)]
        self._alive += [*tensors, *results]
        read = tuple(self._operand(x) if isinstance(x, Tensor) else _plain(x) for x in given)
        operands = [x for x in read if isinstance(x, ReadMemory)]
        made = dict.fromkeys(map(storage_key, results))
        if _is_operator(func) and makes_view(func) and operands:
            self._viewed(operands[0], made)
            return
        written = self._written(func, args, kwargs)
        changed = tuple(dict.fromkeys((*made, *written)))
        if any(_depends(x) for x in operands) or (_is_operator(func) and is_random(func)):
            self._bound.update(changed)
            for memory in changed:
                self._content.pop(memory, None)
            entry = RecordedCall(
                str(func), read, changed, written, torch.is_grad_enabled(), *_place()
            )  # fmt: skip
            self._entries.append(entry)
            return
        known = [x.content + x.form if isinstance(x, ReadMemory) else x for x in read]
        how = digest([str(func), known])
        for number, memory in enumerate(changed):
            self._content[memory] = f"{how} {number}"

    def _viewed(self, base: ReadMemory, made: Iterable[int]) -> None:
        """The fake of a real tensor has memory of its own."""
        for memory in made:
            if memory != base.memory and memory not in self._content:
                if _depends(base):
                    self._bound.add(memory)
                else:
                    self._content[memory] = f"view {base.content}"

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        if not _is_operator(func) or not (names := written_arguments(func)):
            return ()
        bound = dict(zip((a.name for a in schema_arguments(func)), args, strict=False)) | kwargs
        found = [x for name in names for x in leaves(bound.get(name)) if isinstance(x, Tensor)]
        return tuple(map(storage_key, found))

    def _operand(self, tensor: Tensor) -> ReadMemory:
        memory = storage_key(tensor)
        form = f"{tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {tensor.dtype}"
        if memory in self._bound:
            return ReadMemory(memory, form, "")
        if memory not in self._content:
            self._content[memory] = _values(tensor)
            self._from_outside.add(memory)
        return ReadMemory(memory, form, self._content[memory])


def _is_operator(func: Any) -> bool:
    return hasattr(func, "_schema")


def _depends(operand: ReadMemory) -> bool:
    return not operand.content or operand.content.startswith(OLD)


def _values(tensor: Tensor) -> str:
    """A tensor that no recorded call made: by its values, where it has some."""
    constant = getattr(tensor, "constant", None)
    tensor = tensor if constant is None else constant
    if type(tensor) not in REAL or tensor.device.type == "meta":
        return f"unknown {storage_key(tensor)}"
    with real_mode():
        if tensor.layout is not torch.strided or tensor.numel() > LARGEST:
            return f"tensor {storage_key(tensor)} {tensor._version}"
        return f"values {digest([str(tensor.dtype), tensor.detach().cpu().reshape(-1).tolist()])}"


def _plain(value: Any) -> Any:
    """An argument that is no tensor, as something that tells whether it is the same."""
    if isinstance(value, int | float | bool | str | None):
        return (type(value).__name__, repr(value))
    return (type(value).__name__, str(value) if isinstance(value, _TOLD) else "")


_TOLD = (torch.dtype, torch.device, torch.layout, torch.memory_format, complex)


def needed(entries: list[RecordedCall], loss: int, given: Mapping[int, str]) -> list[RecordedCall]:
    """The entries that the loss or what a parameter or buffer becomes depends on."""
    wanted, kept = {loss}, []
    for entry in reversed(entries):
        if any(m in given for m in entry.written) or not wanted.isdisjoint(entry.outputs):
            wanted.update(x.memory for x in entry.args if isinstance(x, ReadMemory))
            kept.append(entry)
    return kept[::-1]


def _place() -> tuple[str, int]:
    """File and line of the model's code that is being run."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _theirs(frame):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _theirs(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not (
        file.startswith(_OURS) or file[:1] == "<" or frame.f_code.co_name == "__torch_function__"
    )
