"""Small tensors to try an op on: dims that are equal in the graph stay equal, others differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshwright.ir.graph import Graph, Op
from meshwright.planner.discovery.trial import CannotRun, Trial, numbered

Shape = tuple[int, ...]
SMALLEST, STEP = 4, 2
LARGEST = 1 << 20
"""Elements up to which an op is tried at its own sizes."""
SEED = 11


@dataclass(frozen=True, slots=True)
class Sample:
    """A trial, with what the op makes of its tensors."""

    trial: Trial
    outputs: tuple[Tensor | None, ...]


def sample(op: Op, graph: Graph, at: tuple[Shape, ...] = ()) -> Sample | None:
    """The op on the smallest tensors that it takes, or `at` these; None if it cannot be tried."""
    shapes = tuple(graph.tensors[name].shape for name in op.inputs)
    wanted = tuple(len(graph.tensors[name].shape) if name else 0 for name in op.outputs)
    for sizes in (at,) if at else _tried(shapes):
        for positive in (False, True):
            found = _try(op, graph, sizes, positive)
            if found is None:
                break
            ranks = tuple(0 if x is None else x.ndim for x in found.outputs)
            same = all(a == b or x is None
                       for a, b, x in zip(ranks, wanted, found.outputs, strict=True))  # fmt: skip
            if same and all(x is None or _is_finite(x) for x in found.outputs):
                return found
    return None


def _tried(shapes: tuple[Shape, ...]) -> Iterator[tuple[Shape, ...]]:
    yield shrunk(shapes)
    if sum(map(prod, shapes)) <= LARGEST:
        yield shapes


def shrunk(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """The shapes with every size as small as can be, distinct sizes kept distinct."""
    sizes = sorted({n for shape in shapes for n in shape if n > 1})
    new = {n: min(n, SMALLEST + STEP * i) for i, n in enumerate(sizes)}
    if len(set(new.values())) < len(new):
        return shapes
    return tuple(tuple(new.get(n, n) for n in shape) for shape in shapes)


def _try(op: Op, graph: Graph, shapes: tuple[Shape, ...], positive: bool) -> Sample | None:
    generator = torch.Generator().manual_seed(SEED)
    inputs = tuple(
        _drawn(shape, graph.tensors[name].dtype, positive, generator)
        for name, shape in zip(op.inputs, shapes, strict=True)
    )
    live = tuple(
        graph.tensors[name].requires_grad and differs(x)
        for name, x in zip(op.inputs, inputs, strict=True)
    )
    read = tuple(bool(name) and (name in graph.users or name == graph.loss) for name in op.outputs)
    trial = Trial(op.target, numbered(op), inputs, live, read)
    before = tuple(x.clone() for x in inputs)
    try:
        outputs, again = trial.forward(inputs), trial.forward(inputs)
    except CannotRun:
        return None
    pure = all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    return Sample(trial, outputs) if pure and _equal(outputs, again) else None


def _drawn(shape: Shape, dtype: str, positive: bool, generator: torch.Generator) -> Tensor:
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        return made.abs() + 0.1 if positive else made
    if kind.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    # Indices of what they may look up: all dims have two elements or one.
    return torch.randint(2, shape, generator=generator).to(kind)


def differs(x: Tensor) -> bool:
    """Whether tensors of its kind have gradients and may be summands."""
    return x.is_floating_point() or x.is_complex()


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _equal(left: tuple[Tensor | None, ...], right: tuple[Tensor | None, ...]) -> bool:
    """Whether twice the same came out: nothing is drawn at random."""
    pairs = zip(left, right, strict=True)
    return all((a is None or b is None or torch.equal(a, b)) for a, b in pairs)
