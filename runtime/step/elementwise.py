"""Whether an optimizer steps each element by itself, found by trying it.

Ranks may hold parts of parameters (ZeRO, tensor parallelism), and other ranks other parameters.
Adam does not notice; Adafactor, Muon or LARS would take another step. So a class that is not known
is run with its settings on small float64 tensors, whole, in parts and one parameter at a time, and
what it makes of them is compared.
"""

from collections.abc import Callable, Mapping, Sequence
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

STEPS = 40
"""Some precondition only every so many steps, or start late."""
NEAR = 1e-6
"""Of the largest change."""
SHAPES = (((6, 4), (5,), (4, 2, 3)), ((6, 4), (4, 6)), ((6,), (5,)))
"""Tried together; the first that the optimizer takes: Muon takes matrices only."""
SCALES = (1.0, 30.0, 0.1, 1.0, 1e-3)
"""Of gradients, step after step: clipping begins at some size."""
LEAST_LR, TRIED_LR = 1e-3, 0.02


class CannotTry(Exception):
    """The optimizer refuses the tensors of the trial."""


@dataclass(frozen=True)
class _Run:
    """Changes of the parameters, and whether all state is a number or shaped as a parameter."""

    changes: tuple[Tensor, ...]
    shaped: bool


_SEEN: dict[tuple[object, ...], Reach] = {}
"""By class and settings."""


def reach(kind: type, settings: Mapping[str, Any], make: Make) -> Reach:
    """What the optimizer that `make` makes of groups looks at; CannotTry if it cannot be run."""
    if kind in KNOWN:
        return Reach.ELEMENT
    key = (kind, repr(sorted((k, v) for k, v in settings.items() if k != "params")))
    if key not in _SEEN:
        with torch.random.fork_rng(devices=[]):
            _SEEN[key] = _tried(make)
    return _SEEN[key]


def _tried(make: Make) -> Reach:
    errors = []
    for shapes in SHAPES:
        values = _drawn(shapes, 5)
        gradients = [_drawn(shapes, 7 + step) for step in range(STEPS)]
        try:
            return _compared(make, values, gradients)
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


def _drawn(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


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
            if isinstance(lr, int | float) and abs(lr) < LEAST_LR:
                group["lr"] = TRIED_LR  # at a rate of 0 all agree
        for count, step in enumerate(gradients):
            for p, gradient in zip(params, step, strict=True):
                p.grad = gradient * SCALES[count % len(SCALES)]
            optimizer.step()
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError, KeyError) as error:
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
        except (RuntimeError, ValueError, TypeError, AssertionError, IndexError, KeyError):
            pass
    return make([{"params": list(held)}])


def _near(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    largest = max(float(x.abs().max()) for x in wanted if x.numel())
    if not largest or largest != largest:
        raise CannotTry("its steps change nothing, or give no numbers")
    return all(
        bool(torch.allclose(a, b, rtol=0, atol=NEAR * largest))
        for a, b in zip(found, wanted, strict=True)
    )
