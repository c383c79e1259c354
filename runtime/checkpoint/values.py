"""Plain Python values as JSON and back, exactly: what a checkpoint keeps beside its tensors.

Numbers, texts, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of them. Nothing
else: whatever would need code to come back is refused by name when it is saved.
"""

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.ir.errors import PlanError

_TAG = "$"
_DEEPEST = 64
_SEQUENCES: Mapping[type, str] = {tuple: "tuple", torch.Size: "tuple", set: "set"}
_DICTS: Mapping[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MADE: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "dict": dict, "ordered": OrderedDict, "counter": Counter,
}  # fmt: skip
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "int": int, "float": float, "list": list, "dict": dict, "set": set,
}  # fmt: skip
"""What a defaultdict may be asked to make."""
_NUMBERS = frozenset("biufc")
"""Kinds of NumPy's numbers."""


def dtype_named(name: object) -> torch.dtype:
    """The dtype that torch calls so; PlanError if there is none."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise PlanError(f"{name!r} is not a dtype of torch")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def raw(x: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; those of `x` itself if they lie so on the CPU."""
    flat = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """What JSON can write of `value`; PlanError names the place `where` in it that it cannot."""
    if depth > _DEEPEST:
        raise PlanError(f"{where} is nested more than {_DEEPEST} deep; a checkpoint cannot keep it")
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is list:
        return [encode(x, f"{where}[{i}]", depth + 1) for i, x in enumerate(value)]
    if kind in _SEQUENCES:
        content = [encode(x, f"{where}[{i}]", depth + 1) for i, x in enumerate(value)]
        return _tagged(_SEQUENCES[kind], content)
    if kind in _DICTS:
        return _encoded_dict(value, where, depth)
    if kind is defaultdict and (value.default_factory is None or value.default_factory in _FACTORY):
        name = _FACTORY.get(value.default_factory, "")
        return _tagged("default", [name, _pairs(value, where, depth)])
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
        text = base64.b64encode(raw(value)).decode()
        return _tagged("tensor", [dtype_name(value.dtype), list(value.shape), text])
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        form = "array" if isinstance(value, np.ndarray) else "number"
        text = base64.b64encode(value.tobytes()).decode()
        return _tagged(form, [value.dtype.str, list(value.shape), text])
    if kind is bytes:
        return _tagged("bytes", base64.b64encode(value).decode())
    if kind is torch.dtype:
        return _tagged("dtype", dtype_name(value))
    if kind is torch.device:
        return _tagged("device", str(value))
    raise PlanError(
        f"{where} is a {kind.__module__}.{kind.__qualname__} ({repr(value)[:80]}): a checkpoint "
        "keeps numbers, texts, tensors, and lists, tuples, sets and dicts of them, since anything "
        "else would need code to be read. Keep it elsewhere, or leave it out of that state"
    )


_FACTORY = {made: name for name, made in _EMPTY.items()}


def _tagged(form: str, content: Any) -> dict[str, Any]:
    return {_TAG: form, "of": content}


def _encoded_dict(value: Any, where: str, depth: int) -> Any:
    if type(value) is dict and all(type(k) is str and k != _TAG for k in value):
        return {k: encode(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    return _tagged(_DICTS[type(value)], _pairs(value, where, depth))


def _pairs(value: Mapping[Any, Any], where: str, depth: int) -> list[Any]:
    return [
        [encode(k, f"a key of {where}", depth + 1), encode(v, f"{where}[{k!r}]", depth + 1)]
        for k, v in value.items()
    ]


def decode(data: Any) -> Any:
    """What `encode` was given; PlanError if it is none of its forms."""
    if isinstance(data, list):
        return [decode(x) for x in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {k: decode(v) for k, v in data.items()}
    form, content = data[_TAG], data.get("of")
    try:
        return _decoded(form, content)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"{form!r} of {str(content)[:60]!r} is no value: {error}") from error


def _decoded(form: Any, content: Any) -> Any:
    match form:
        case "float":
            return {"inf": math.inf, "-inf": -math.inf}.get(content, math.nan)
        case "tuple" | "set":
            return _MADE[form](decode(x) for x in content)
        case "dict" | "ordered" | "counter":
            return _MADE[form]({decode(k): decode(v) for k, v in content})
        case "default":
            name, pairs = content
            factory = _EMPTY[name] if name in _EMPTY else None
            return defaultdict(factory, {decode(k): decode(v) for k, v in pairs})
        case "tensor":
            name, shape, text = content
            memory = bytearray(base64.b64decode(text))
            if not memory:
                return torch.zeros(shape, dtype=dtype_named(name))
            return torch.frombuffer(memory, dtype=dtype_named(name)).reshape(shape)
        case "array" | "number":
            name, shape, text = content
            kind = np.dtype(str(name))
            if kind.kind not in _NUMBERS:
                raise ValueError(f"{name!r} is no number")
            array = np.frombuffer(bytearray(base64.b64decode(text)), kind).reshape(shape)
            return array if form == "array" else array[()]
        case "bytes":
            return base64.b64decode(content)
        case "dtype":
            return dtype_named(content)
        case "device":
            return torch.device(content)
    raise ValueError("unknown form")
