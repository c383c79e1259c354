"""Tries splits of an op: the parts, computed one by one, must make up the whole, both ways."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from meshwright.planner.discovery.found import Dim, DimCut, FoundRule
from meshwright.planner.discovery.sample import SEED, TrialSample, differs
from meshwright.planner.discovery.trial import CannotRun, Tensors, near

Note = Callable[[DimCut | None, bool | None], None]
"""Hears of a split before it is tried, with None, and then whether it holds; of no split at last.
"""
MOST = 4096
"""Combinations of dims that are tried for one size."""


class Probe:
    """A sample with gradients of its outputs, and what follows from them."""

    def __init__(self, sample: TrialSample) -> None:
        self.trial, self.outputs = sample.trial, sample.outputs
        generator = torch.Generator().manual_seed(SEED + 1)
        self.given: Tensors = tuple(
            torch.randn(x.shape, dtype=x.dtype, generator=generator)
            if x is not None and differs(x)
            else None
            for x in sample.outputs
        )
        self.grads = self.trial.both(self.trial.inputs, self.given)[1]

    def holds(self, cut: DimCut) -> bool:
        """Whether the op agrees with its parts, cut evenly and at the last unit."""
        size = self.units(cut)
        try:
            return all(self._agrees(cut, at, size) for at in dict.fromkeys((size // 2, size - 1)))
        except CannotRun:
            return False

    def units(self, cut: DimCut) -> int:
        """How many units are split: the size of the smallest dim."""
        return min(x.shape[d] for x, d in self._cut_dims(cut))

    def _cut_dims(self, cut: DimCut) -> Iterator[tuple[Tensor, int]]:
        tensors = (*self.trial.inputs, *self.outputs)
        for x, dim in zip(tensors, (*cut.inputs, *cut.outputs), strict=True):
            if x is not None and dim is not None:
                yield x, dim

    def _agrees(self, cut: DimCut, at: int, units: int) -> bool:
        pieces = ((0, at), (at, units))
        inputs = [_parts(self.trial.inputs, cut.inputs, piece, units) for piece in pieces]
        # Most splits are wrong already forwards.
        made = [self.trial.forward(part) for part in inputs]
        if not near(_joined(made, cut.outputs, self.outputs), self.outputs):
            return False
        if not any(self.trial.live):
            return True
        given = [_parts(self.given, cut.outputs, piece, units) for piece in pieces]
        grads = [self.trial.both(x, g)[1] for x, g in zip(inputs, given, strict=True)]
        return near(_joined(grads, cut.inputs, self.grads), self.grads)

    def is_linear(self, group: Sequence[int]) -> bool:
        """Whether summands of these inputs give summands of the outputs, and gradients alike."""
        generator = torch.Generator().manual_seed(SEED + 2)
        halves: list[list[Tensor]] = [list(self.trial.inputs), list(self.trial.inputs)]
        for i in group:
            x = self.trial.inputs[i]
            halves[0][i] = torch.randn(x.shape, dtype=x.dtype, generator=generator)
            halves[1][i] = x - halves[0][i]
        try:
            runs = [self.trial.both(half, self.given) for half in halves]
        except CannotRun:
            return False
        nowhere: tuple[Dim, ...] = (None,) * len(self.outputs)
        if not near(_joined([outs for outs, _ in runs], nowhere, self.outputs), self.outputs):
            return False
        return all(
            near((grads[0],), (whole,)) if i in group else near((_sum(grads),), (whole,))
            for i, whole in enumerate(self.grads)
            for grads in ([run[1][i] for run in runs],)
        )


def _parts(
    tensors: Sequence[Tensor | None], dims: Sequence[Dim], piece: tuple[int, int], units: int
) -> tuple[Tensor, ...]:
    """The piece of each tensor that is cut; a dim may have several elements per unit."""
    found = []
    for x, dim in zip(tensors, dims, strict=True):
        if x is not None and dim is not None:
            each = x.shape[dim] // units
            x = x.narrow(dim, piece[0] * each, (piece[1] - piece[0]) * each).contiguous()
        found.append(x)
    return tuple(found)  # type: ignore[arg-type]


def _joined(parts: Sequence[Tensors], dims: Sequence[Dim], like: Tensors) -> Tensors:
    """Parts one after the other along their dim, sums where there is none."""
    found: list[Tensor | None] = []
    for i, dim in enumerate(dims):
        mine, whole = [part[i] for part in parts], like[i]
        if dim is None or all(x is None for x in mine):
            found.append(_sum(mine))
        elif any(x is None or whole is None or x.ndim != whole.ndim for x in mine):
            raise CannotRun("the parts are not alike")
        else:
            found.append(_cat([x for x in mine if x is not None], dim))
    return tuple(found)


def _cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    shapes = {x.shape[:dim] + x.shape[dim + 1 :] for x in parts}
    if len(shapes) > 1:
        raise CannotRun("the parts are not alike")
    return torch.cat(list(parts), dim)


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [x for x in parts if x is not None]
    if not there:
        return None
    if any(x.shape != there[0].shape or x.dtype == torch.bool for x in there):
        raise CannotRun("the parts do not add up")
    return sum(there[1:], there[0])


def explore(
    sample: TrialSample, known: Mapping[DimCut, bool] = MappingProxyType({}),
    about: Note = lambda cut, holds: None,
) -> FoundRule:  # fmt: skip
    """All ways to split the op; a dim is part of one of them at most.

    `known`: whether splits hold that are not tried again.
    """
    try:
        probe = Probe(sample)
    except CannotRun:
        return FoundRule()
    cuts: list[DimCut] = []
    taken: set[tuple[bool, int, int]] = set()
    for cut in candidates(sample):
        places = set(_places(cut))
        if places & taken:
            continue
        holds = known.get(cut)
        if holds is None:
            about(cut, None)
            holds = probe.holds(cut)
            about(cut, holds)
        if holds:
            cuts.append(cut)
            taken |= places
    about(None, None)
    return FoundRule(tuple(cuts), tuple(_linear(probe)))


def confirm(sample: TrialSample, found: FoundRule) -> FoundRule:
    """What of it still holds: an operator may have changed since it was tried."""
    try:
        probe = Probe(sample)
    except CannotRun:
        return FoundRule()
    return FoundRule(
        tuple(cut for cut in found.cuts if _fits(cut, sample) and probe.holds(cut)),
        tuple(group for group in found.linear if probe.is_linear(group)),
    )


def _fits(cut: DimCut, sample: TrialSample) -> bool:
    tensors = (*sample.trial.inputs, *sample.outputs)
    dims = (*cut.inputs, *cut.outputs)
    return len(dims) == len(tensors) and all(
        d is None or (x is not None and d < x.ndim) for x, d in zip(tensors, dims, strict=True)
    )


def _places(cut: DimCut) -> Iterator[tuple[bool, int, int]]:
    for is_output, dims in ((False, cut.inputs), (True, cut.outputs)):
        for i, dim in enumerate(dims):
            if dim is not None:
                yield is_output, i, dim


def candidates(sample: TrialSample) -> Iterator[DimCut]:
    """Splits worth trying: those that cut more tensors first, sums last."""
    inputs, outputs = sample.trial.inputs, sample.outputs
    found: dict[DimCut, None] = {}
    for size in sorted({n for x in inputs for n in x.shape if n > 1}):
        for dims in product(*_choices((*inputs, *outputs), size)):
            cut = DimCut(dims[: len(inputs)], dims[len(inputs) :])
            if any(d is not None for d in cut.inputs) and _least(cut, sample) == size:
                found[cut] = None
    yield from sorted(found, key=lambda cut: (_sums(cut, sample), -len([*_places(cut)]), str(cut)))


def _choices(tensors: Tensors, size: int) -> list[list[Dim]]:
    """Per tensor, None and the dims that have so many units; only those of one element per unit
    where that makes too many combinations."""
    for most in (1 << 40, 1):
        found: list[list[Dim]] = [
            [d for d, n in enumerate(x.shape if x is not None else ())
             if n % size == 0 and 0 < n // size <= most]
            for x in tensors
        ]  # fmt: skip
        if prod(len(dims) + 1 for dims in found) <= MOST:
            return [[*dims, None] for dims in found]
    return [[None] for _ in tensors]


def _least(cut: DimCut, sample: TrialSample) -> int:
    tensors = (*sample.trial.inputs, *sample.outputs)
    dims = (*cut.inputs, *cut.outputs)
    pairs = zip(tensors, dims, strict=True)
    return min(x.shape[d] for x, d in pairs if x is not None and d is not None)


def _sums(cut: DimCut, sample: TrialSample) -> int:
    return sum(
        x is not None and d is None for x, d in zip(sample.outputs, cut.outputs, strict=True)
    )


def _linear(probe: Probe) -> Iterator[tuple[int, ...]]:
    """Single inputs and all of them together; only reals and complex numbers are summed."""
    floats = tuple(i for i, x in enumerate(probe.trial.inputs) if differs(x))
    groups = [(i,) for i in floats] + ([floats] if len(floats) > 1 else [])
    if all(x is None or differs(x) for x in probe.outputs):
        yield from (group for group in groups if probe.is_linear(group))
