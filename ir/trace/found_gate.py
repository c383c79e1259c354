"""Which file of `ir/gates` computes what a module does between its experts' products: found by
running both on the same numbers, so that no name has to be known."""

from collections.abc import Callable, Iterable, Iterator
from itertools import permutations

import torch
from torch import nn

from meshwright.ir.errors import PlanError
from meshwright.ir.gates import gates, parse_gate, said
from meshwright.ir.torch_private import real_mode

_ROWS, _INNER = 48, 6
_SCALES = (1.0, 1e1, 1e2, 1e3, 1e4)
"""Of the products that are tried, so that a limit shows whether anyone tells of it or not."""
_EXACT, _FLOAT32 = 1e-12, 1e-6
"""How far results may differ, relative to the largest of their scale."""
_MOST_NUMBERS = 8


def found_gate(
    compute: Callable[[torch.Tensor], torch.Tensor], numbers: Iterable[float], *,
    gated: bool, interleaved: bool = False,
) -> str:  # fmt: skip
    """The text of the gate that maps products [pairs, 2I] (or [pairs, I] if not `gated`) to what
    `compute` maps them to; empty if no file does. `numbers`: what its settings may be."""
    known = tuple(dict.fromkeys(numbers))[:_MOST_NUMBERS]
    with real_mode(), torch.no_grad(), torch.device("cpu"):
        product = _probe(2 * _INNER if gated else _INNER)
        try:
            expected = compute(product.clone())
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return ""
        parts: tuple[torch.Tensor, ...] = (product,)
        if gated:
            parts = (
                (product[:, ::2], product[:, 1::2]) if interleaved
                else tuple(product.chunk(2, dim=-1))
            )  # fmt: skip
        if expected.shape != parts[0].shape or expected.dtype != product.dtype:
            return ""
        return next((t for t in _texts(known, len(parts)) if _same(t, parts, expected)), "")


def numbers_of(module: nn.Module) -> list[float]:
    """Plain numbers that a module, or one in it, keeps: limits, slopes. Counts come last, as few
    settings are whole numbers."""
    values = [value for child in module.modules() for value in vars(child).values()]
    numbers = [value for value in values if type(value) in (float, int)]
    return [float(value) for value in sorted(numbers, key=lambda x: type(x) is int)]


def _probe(columns: int) -> torch.Tensor:
    """Values of all scales, the same every time, without touching the user's noise."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_ROWS, columns, dtype=torch.float64, generator=generator)
    return torch.cat([drawn * scale for scale in _SCALES])


def _texts(known: tuple[float, ...], parts: int) -> Iterator[str]:
    """All gates with all numbers, the plainest first."""
    for in_float32 in (False, True):
        for name, gate in sorted(gates(), key=lambda found: (len(found[1].settings), found[0])):
            if parts in gate.parts:
                for values in permutations(known, len(gate.settings)):
                    numbers = dict(zip(gate.settings, values, strict=True))
                    yield said(name, numbers, in_float32)


def _same(text: str, parts: tuple[torch.Tensor, ...], expected: torch.Tensor) -> bool:
    try:
        gate = parse_gate(text)
    except PlanError:
        return False
    if gate.in_float32 and not torch.equal(expected, expected.float().to(expected.dtype)):
        return False
    off, largest = (
        x.abs().view(len(_SCALES), -1).amax(1) for x in (gate.forward(parts) - expected, expected)
    )
    return bool((off <= (_FLOAT32 if gate.in_float32 else _EXACT) * largest).all())
