"""What experts compute between their two products, one file each; the file name is its key, with
dashes.

A file has `GATE`, a `gate.ExpertGate`. MESHWRIGHT_GATES names folders with more. A text says which
one it is and with which numbers: `silu`, `clamped-silu limit=7.0`. With `float32` at the end it is
computed in that dtype, whatever comes in, and goes back to what came in.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isnan
from pathlib import Path

import torch

from meshwright.ir.errors import PlanError
from meshwright.ir.extensions import Files, add_folders
from meshwright.ir.gates.gate import ExpertGate, Tensors

_OWN = {Path(__file__).with_name("gate.py").stem}
_IN_FLOAT32 = "float32"
add_folders("MESHWRIGHT_GATES", __path__)
_FILES = Files(sys.modules[__name__], "gate", dashed=True)


def gates() -> Iterator[tuple[str, ExpertGate]]:
    """All gates by name."""
    for name in _FILES.names:
        if name not in _OWN:
            yield name, _FILES.load(name).GATE


@dataclass(frozen=True, slots=True)
class SetGate:
    """A gate with its numbers."""

    gate: ExpertGate
    settings: dict[str, float]
    in_float32: bool

    def forward(self, parts: Tensors) -> torch.Tensor:
        """[pairs, I] of what both products, or the one, gave."""
        if not self.in_float32:
            return self.gate.forward(parts, self.settings)
        made = self.gate.forward(tuple(x.float() for x in parts), self.settings)
        return made.to(parts[0].dtype)

    def backward(self, grad: torch.Tensor, parts: Tensors) -> Tensors:
        """The gradients of the operands, from that of the result."""
        if not self.in_float32:
            return self.gate.backward(grad, parts, self.settings)
        wide = tuple(x.float() for x in parts)
        made = self.gate.backward(grad.float(), wide, self.settings)
        return tuple(x.to(grad.dtype) for x in made)

    def at_once(self, operands: int, width: int) -> float:
        """Values as large as one of so many operands that the backward has made and still has, at
        most, each as wide as an operand is."""
        count, flags = self.gate.at_once[operands], self.gate.flags / width
        if not self.in_float32:
            return count + flags
        return (count + operands + 1) * 4 / width + flags


def said(name: str, settings: dict[str, float], in_float32: bool = False) -> str:
    """The text of a gate with its numbers; `parse_gate` reads it."""
    words = [name, *(f"{key}={value!r}" for key, value in settings.items())]
    return " ".join([*words, _IN_FLOAT32] if in_float32 else words)


@lru_cache(maxsize=256)
def parse_gate(text: str) -> SetGate:
    """The gate of a text; PlanError that names what is wrong with it."""
    name, *words = text.split() or [""]
    in_float32 = words[-1:] == [_IN_FLOAT32]
    gate: ExpertGate = _FILES.load(name).GATE
    settings: dict[str, float] = {}
    for word in words[:-1] if in_float32 else words:
        key, _, value = word.partition("=")
        try:
            settings[key] = float(value)
        except ValueError:
            settings[key] = float("nan")
        if key not in gate.settings or isnan(settings[key]):
            raise PlanError(
                f"gate {text!r}: {word!r} is no setting of {name}; it has "
                f"{', '.join(f'{s}=NUMBER' for s in gate.settings) or 'none'}"
            )
    if missing := [key for key in gate.settings if key not in settings]:
        raise PlanError(f"gate {text!r}: it needs {', '.join(f'{key}=NUMBER' for key in missing)}")
    return SetGate(gate, settings, in_float32)
