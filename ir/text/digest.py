"""Short stable hashes of plain data."""

import hashlib
import json


def digest(data: object) -> str:
    """The same for equal data in every process; tuples and lists are alike."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), default=_written)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _written(value: object) -> list[object]:
    """A complex number, which JSON does not have."""
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    raise TypeError(f"{type(value).__name__} is not plain data")
