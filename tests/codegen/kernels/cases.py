"""Inputs of every kernel, odd and tiny shapes among them, and its check against its reference."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.ir import launch
from meshwright.ir.kernels import load_all, route

OPERATORS: dict[str, tuple[Any, Callable[..., Any]]] = {}
for module in load_all():
    OPERATORS |= getattr(module, "OPERATORS", {})
DTYPES = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Error against the reference in float64, relative to its largest value."""
ROWS = ((1, 1), (3, 37), (2, 3, 64), (5, 130), (0, 8))


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _angles(batch: int, positions: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(batch, positions, half, dtype=torch.float64).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


TURNS = (
    (1, 1, 1, 1, 1), (2, 3, 5, 4, 1), (2, 3, 5, 6, 2), (3, 2, 7, 33, 3),
    (2, 3, 5, 4, 1, 4), (1, 1, 1, 1, 1, 1, True), (2, 3, 5, 6, 2, 6, True),
    (3, 2, 7, 33, 3, 66, True),
)  # fmt: skip


def _turns(
    b: int, h: int, t: int, half: int, angles: int, wide: int = 0, paired: bool = False
) -> tuple[Any, ...]:
    """Heads as they lie after their projection, and angles `wide` wide."""
    heads = _normal(b, h, t, 2 * half).transpose(1, 2).contiguous().transpose(1, 2)
    known = (angle[..., : wide or 2 * half] for angle in _angles(angles, t, half))
    return (heads, *known, paired)


def _labels(tokens: int, words: int) -> Tensor:
    """Classes, every third ignored."""
    labels = torch.randint(0, words, (tokens,))
    return labels.masked_fill(torch.arange(tokens) % 3 == 2, -100)


def _rows(make: Callable[[tuple[int, ...]], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [make(shape) for shape in ROWS]


def _strided(x: Tensor) -> Tensor:
    """Of the same values, but not contiguous."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


CASES: dict[str, Callable[[], list[tuple[Any, ...]]]] = {
    "rms_norm": lambda: _rows(lambda s: (_strided(_normal(*s)), _normal(s[-1]), 1e-6)),
    "add_rms_norm": lambda: _rows(
        lambda s: (_strided(_normal(*s)), _normal(*s), _normal(s[-1]), 1e-6)
    ),
    "add_layer_norm": lambda: _rows(
        lambda s: (_normal(*s), _strided(_normal(*s)), _normal(s[-1]), _normal(s[-1]), 1e-5)
    ),
    "swiglu": lambda: _rows(lambda s: (_strided(_normal(*s)), _normal(*s) * 9)),
    "bias_gelu": lambda: [
        (_strided(_normal(*s) * 9), _normal(s[-1]), tanh) for tanh in (False, True) for s in ROWS
    ],
    "cross_entropy": lambda: [
        (_strided(_normal(tokens, words) * 5), torch.randint(-1, words + 1, (tokens,)))
        for tokens, words in ((1, 1), (5, 37), (3, 5000), (0, 8))
    ],
    "cross_entropy_total": lambda: [
        (_strided(_normal(tokens, words) * 5), _labels(tokens, words), -100)
        for tokens, words in ((1, 1), (5, 37), (3, 5000), (0, 8))
    ],
    "linear_cross_entropy": lambda: [
        (_normal(tokens, width), _normal(words, width), _labels(tokens, words), -100)
        for tokens, width, words in ((1, 1, 1), (5, 3, 37), (0, 3, 8))
    ],
    "rotary": lambda: [_turns(*case) for case in TURNS],
}


def _routes(home: bool) -> list[tuple[Any, ...]]:
    """Tokens that go to some of the ranks, to all, to none; rows of two dims and of one."""
    found = []
    for ranks, count, shape in ((1, 1, (1,)), (3, 5, (37,)), (4, 7, (2, 3)), (2, 3, (1500,))):
        owned = torch.arange(ranks * count).view(ranks, count) % 4 != 1
        owned[:, 0] = True
        owned[:, count // 2] &= count == 1
        tokens, places = route.places_of(owned)
        rows = _normal(len(tokens) if home else count, *shape)
        found.append((_strided(rows), tokens, places))
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    found.append((_normal(0 if home else 3, 4), *route.places_of(nothing)))
    return found


CASES |= {"route_out": lambda: _routes(home=False), "route_home": lambda: _routes(home=True)}


@dataclass(frozen=True)
class Found:
    """How far a kernel is from its reference."""

    kernel: str
    case: int
    dtype: str
    way: str
    errors: list[float]
    """Of each result, then of each gradient."""


def check(
    kernel: str, cases: Sequence[tuple[Any, ...]] | None = None, dtypes: Sequence[str] = (*DTYPES,)
) -> Iterator[Found]:
    """Cases (default: all of the kernel) in all dtypes, forward and backward, on the device that
    torch makes tensors on."""
    operator, reference = OPERATORS[kernel]
    torch.manual_seed(0)
    for index, case in enumerate(CASES[kernel]() if cases is None else cases):
        for dtype in dtypes:
            given = [_as(value, getattr(torch, dtype)) for value in case]
            exact = [_as(value, torch.float64) for value in given]
            found = _run(operator, given)
            wanted = _run(reference, exact)
            errors = [_error(x, y) for x, y in zip(found, wanted, strict=True)]
            yield Found(kernel, index, dtype, launch.way("test", given[0]), errors)


def _as(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().to(dtype) if floating else value


def _run(function: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
    """Results that have gradients, then gradients of inputs that are not angles."""
    torch.manual_seed(1)
    third = inputs[2] if len(inputs) > 2 else None
    angles = 1 if isinstance(third, Tensor) and third.ndim == 3 else 9
    given = [
        x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() and i < angles else x
        for i, x in enumerate(inputs)
    ]
    made = function(*given)
    results = [y for y in (made if isinstance(made, tuple) else (made,)) if y.requires_grad]
    total = sum((y.double() * _normal(*y.shape)).sum() for y in results)
    wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    return [y.detach() for y in results] + list(torch.autograd.grad(total, wanted))


def _error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    if not found.numel():
        return 0.0
    scale = max(1.0, wanted.abs().max().item())
    worst = (found.double() - wanted).abs().max().item() / scale
    return worst if worst == worst else float("inf")


def main() -> None:
    """Prints what the kernels named do under Triton's interpreter, as JSON."""
    rows = [vars(found) for kernel in sys.argv[1:] for found in check(kernel)]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
