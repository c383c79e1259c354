"""Whether an optimizer steps each element by itself, found by trying it.

Ranks may hold parts of parameters (ZeRO, tensor parallelism), and other ranks other parameters.
Adam does not notice; Adafactor, Muon or LARS would take another step. So a class that is not known
is run with its settings on small float64 tensors, whole, in parts and one parameter at a time, and
what it makes of them is compared. Then on a large one: an optimizer that keeps its state in 8 bits
has a scale for each block of elements, and steps small parameters as any other does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.forms.updates import UPDATES, Reach, update

Group = dict[str, Any]
Make = Callable[[list[Group]], torch.optim.Optimizer]

KNOWN: frozenset[type] = frozenset(
    form.kind for form in map(update, UPDATES)
    if form.reach is Reach.ELEMENT and form.kind.__module__.startswith("torch.")
) | {
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
    torch.optim.Adadelta, torch.optim.Rprop,
}  # fmt: skip
"""Torch's own that step each element by itself; the tests try them too."""

STEPS = 128
"""Some precondition only every so many steps, or start late; what begins later is not seen."""
DTYPES = (torch.float64, torch.float32)
"""Tried in this order: kernels of libraries may lack float64."""
NEAR = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Of the largest change."""
SHAPES = (((6, 4), (5,), (4, 2, 3)), ((6, 4), (4, 6)), ((6,), (5,)))
"""Tried together; the first that the optimizer takes: Muon takes matrices only."""
SCALES = (1.0, 30.0, 0.1, 1.0, 1e-3)
"""Of gradients, step after step: clipping begins at some size."""
LEAST_LR, TRIED_LR = 1e-3, 0.02
LARGE, LARGE_STEPS = 2**17, 4
"""Elements of the large parameter. What is the same in each block shows in a few steps."""
UNEVEN = (0, 1003, 1003 + 2**15, LARGE)
"""Where it is cut: not at the border of a block."""


FAILURES = (
    RuntimeError, ValueError, TypeError, AssertionError, IndexError, KeyError, AttributeError,
)  # fmt: skip
"""What optimizers raise of tensors that they do not take."""


class CannotTry(Exception):
    """The optimizer refuses the tensors of the trial."""


@dataclass(frozen=True)
class _Run:
    """Changes of the parameters, and whether all state is a number or shaped as a parameter."""

    changes: tuple[Tensor, ...]
    shaped: bool


@dataclass(frozen=True, slots=True)
class Blocks:
    """How an optimizer whose reach is `Reach.BLOCK` cuts a parameter, row-major, in blocks."""

    elements: int
    """Of a block: parts that begin and end at its multiples are stepped as the whole is."""
    least: int
    """Parameters, and parts, of fewer elements are stepped in another way; 0: none."""


_SEEN: dict[tuple[object, ...], Reach] = {}
_BLOCKS: dict[tuple[object, ...], Blocks] = {}
"""By class and settings."""


def reach(kind: type, settings: Mapping[str, Any], make: Make) -> Reach:
    """What the optimizer that `make` makes of groups looks at; CannotTry if it cannot be run."""
    if kind in KNOWN:
        return Reach.ELEMENT
    key = _key(kind, settings)
    if key not in _SEEN:
        with torch.random.fork_rng(devices=[]), uncompiled():
            _SEEN[key] = _tried(make)
    return _SEEN[key]


def blocks(kind: type, settings: Mapping[str, Any], make: Make) -> Blocks:
    """How an optimizer whose reach is `Reach.BLOCK` cuts parameters."""
    key = _key(kind, settings)
    if key not in _BLOCKS:
        with torch.random.fork_rng(devices=[]), uncompiled():
            _BLOCKS[key] = _blocks_of(make)
    return _BLOCKS[key]


def agrees_in_parts(make: Make, borders: Sequence[int]) -> bool:
    """Whether a parameter that is cut at these elements, of which the first is 0 and the last its
    end, is stepped as when it is whole. Long parts are tried shorter by multiples of `LARGE`, so
    that they end where they did within a block."""
    short = [0]
    for first, last in pairwise(borders):
        short.append(short[-1] + min(last - first, LARGE + (last - first) % LARGE))
    with torch.random.fork_rng(devices=[]), uncompiled():
        return _large_agrees(make, short)


def uncompiled() -> AbstractContextManager[Any]:
    """What libraries would have torch.compile make, for each shape anew, runs as it is."""
    found: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return found


def _key(kind: type, settings: Mapping[str, Any]) -> tuple[object, ...]:
    return kind, repr(sorted((k, v) for k, v in settings.items() if k != "params"))


def _tried(make: Make) -> Reach:
    errors = []
    for dtype in DTYPES:
        for shapes in SHAPES:
            values = _drawn(shapes, 5, dtype)
            gradients = [_drawn(shapes, 7 + step, dtype) for step in range(STEPS)]
            try:
                found = _compared(make, values, gradients)
            except CannotTry as error:
                errors.append(str(error))
                continue
            return _at_large(make) if found is Reach.ELEMENT else found
    raise CannotTry(errors[0])


def _at_large(make: Make) -> Reach:
    """Of what steps each element of a small parameter by itself."""
    if _large_agrees(make, UNEVEN):
        return Reach.ELEMENT
    return Reach.BLOCK if _large_agrees(make, (0, LARGE // 2, LARGE)) else Reach.PARAMETER


def _blocks_of(make: Make) -> Blocks:
    """The smallest powers of two with which all larger ones agree too."""
    half = LARGE // 2
    sizes = [2**n for n in range(1, half.bit_length() - 1)]
    elements = least = half
    for size in reversed(sizes):
        if not _large_agrees(make, (0, half + size, LARGE)):
            break
        elements = size
    for size in reversed([s for s in sizes if s >= elements]):
        if not _large_agrees(make, (0, size, LARGE)):
            break
        least = size
    return Blocks(elements, 0 if least == elements else least)


def _large_agrees(make: Make, borders: Sequence[int]) -> bool:
    """Whether parts of a long parameter, between these borders, are stepped as the whole is."""
    errors = []
    for dtype in DTYPES:
        shapes = ((borders[-1],),)
        values = _drawn(shapes, 5, dtype)
        gradients = [_drawn(shapes, 7 + step, dtype) for step in range(LARGE_STEPS)]
        try:
            whole = _run(make, values, gradients).changes
            parts = [
                _run(
                    make, _part(values, 0, *piece), [_part(step, 0, *piece) for step in gradients]
                ).changes[0]
                for piece in pairwise(borders) if piece[0] < piece[1]
            ]  # fmt: skip
            return _near([torch.cat(parts)], whole)
        except CannotTry as error:
            errors.append(str(error))
    raise CannotTry(errors[0])


def _compared(make: Make, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> Reach:
    whole = _run(make, values, gradients)
    if not _near(_run(make, values, gradients).changes, whole.changes):
        return Reach.CHANCE
    alone = [
        _run(make, [value], [[step[i]] for step in gradients]).changes[0]
        for i, value in enumerate(values)
    ]
    if not _near(alone, whole.changes):
        return Reach.GROUP
    if not whole.shaped:
        return Reach.PARAMETER
    for dim in (0, 1):
        borders: tuple[int, ...] = (0, 2, 3, 99)
        parts = [
            _run(
                make, _part(values, dim, *piece), [_part(step, dim, *piece) for step in gradients]
            ).changes
            for piece in pairwise(borders)
        ]
        joined = [
            torch.cat(cut, dim) if cut[0].ndim > dim else cut[0] for cut in zip(*parts, strict=True)
        ]
        if not _near(joined, whole.changes):
            return Reach.PARAMETER
    return Reach.ELEMENT


def _drawn(shapes: Sequence[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(x, dtype=torch.float64, generator=draw).to(dtype) for x in shapes]


def _part(tensors: Sequence[Tensor], dim: int, start: int, stop: int) -> list[Tensor]:
    """Some rows, or columns, of each; a dim that is shorter has them to its end."""
    found = []
    for x in tensors:
        if x.ndim > dim:
            end = min(stop, x.shape[dim])
            x = x.narrow(dim, min(start, end), end - min(start, end))
        found.append(x.clone(memory_format=torch.contiguous_format))
    return found


def _run(
    make: Make, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> _Run:  # fmt: skip
    """What many steps make of the values; those without elements are left out, as they are of a
    job."""
    params = [nn.Parameter(x.clone(), requires_grad=True) for x in values]
    held = [p for p in params if p.numel()]
    try:
        optimizer = _made(make, held)
        for group in optimizer.param_groups:
            lr = group.get("lr")
            if isinstance(lr, int | float | Tensor) and abs(float(lr)) < LEAST_LR:
                # At a rate of 0 all agree.
                group["lr"] = torch.full_like(lr, TRIED_LR) if isinstance(lr, Tensor) else TRIED_LR
        for count, step in enumerate(gradients):
            for p, gradient in zip(params, step, strict=True):
                p.grad = gradient * SCALES[count % len(SCALES)]
            optimizer.step()
    except FAILURES as error:
        raise CannotTry(f"{type(error).__name__}: {error}") from error
    shaped = all(
        # Objects may hold what will be used in a step that is not tried.
        (x.numel() == 1 or x.shape == p.shape)
        if isinstance(x, Tensor)
        else isinstance(x, int | float | str | NoneType)
        for p, state in optimizer.state.items() if isinstance(p, Tensor)
        for x in state.values()
    )  # fmt: skip
    changes = tuple(p.detach() - x for p, x in zip(params, values, strict=True))
    return _Run(changes, shaped)


def _made(make: Make, held: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Over two groups, if it takes as many: some couple the parameters of all."""
    if len(held) > 1:
        try:
            return make([{"params": [held[0]]}, {"params": list(held[1:])}])
        except FAILURES:
            pass
    return make([{"params": list(held)}])


def _near(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    largest = max(float(x.abs().max()) for x in wanted if x.numel())
    if not largest or largest != largest:
        raise CannotTry("its steps change nothing, or give no numbers")
    return all(
        bool(torch.allclose(a, b, rtol=0, atol=NEAR[b.dtype] * largest))
        for a, b in zip(found, wanted, strict=True)
    )
