"""Small tensors to try an op on: dims that are equal in the graph stay equal, others differ."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.graph import Tensor as GraphTensor
from meshwright.planner.discovery.trial import CannotRun, OpTrial, numbered

Shape = tuple[int, ...]
SMALLEST, STEP = 4, 2
LARGEST = 1 << 20
"""Elements up to which an op is tried at its own sizes."""
SEED = 11
DRAWS = ("normal", "positive", "unit", "signs", "wide")
"""How floats are drawn: many an op takes only some of them (logarithms, probabilities), is zero for
others (a loss whose targets are 1 or -1), or changes beyond a threshold."""
WIDE = 6.0


@dataclass(frozen=True, slots=True)
class TrialSample:
    """A trial, with what the op makes of its tensors."""

    trial: OpTrial
    outputs: tuple[Tensor | None, ...]


def sample(op: Op, graph: Graph, at: tuple[Shape, ...] = ()) -> TrialSample | None:
    """The op on the smallest tensors that it takes, or `at` these; None if it cannot be tried."""
    return next(iter(samples(op, graph, at)), None)


def samples(op: Op, graph: Graph, at: tuple[Shape, ...] = ()) -> tuple[TrialSample, ...]:
    """The op on tensors of these sizes, drawn in every way from which something can be learned."""
    for sizes in (at,) if at else _tried(tuple(graph.tensors[name].shape for name in op.inputs)):
        drawn = (_try(op, graph, sizes, draw) for draw in DRAWS)
        found = tuple(x for x in drawn if x is not None and _is_telling(op, graph, x))
        if found:
            return found
    return ()


def _is_telling(op: Op, graph: Graph, found: TrialSample) -> bool:
    """Whether what it made is as the graph says, finite, and more than zeros: those of all parts
    add up to those of the whole whatever the op does."""
    wanted = tuple(len(graph.tensors[name].shape) if name else 0 for name in op.outputs)
    pairs = zip(wanted, found.outputs, strict=True)
    return all(
        x is None or (x.ndim == rank and _is_finite(x) and (not differs(x) or bool(x.any())))
        for rank, x in pairs
    )


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


def _try(op: Op, graph: Graph, shapes: tuple[Shape, ...], draw: str) -> TrialSample | None:
    generator = torch.Generator().manual_seed(SEED + DRAWS.index(draw))
    inputs = tuple(
        _drawn(shape, graph.tensors[name], draw, generator)
        for name, shape in zip(op.inputs, shapes, strict=True)
    )
    live = tuple(
        graph.tensors[name].requires_grad and differs(x)
        for name, x in zip(op.inputs, inputs, strict=True)
    )
    read = tuple(bool(name) and (name in graph.users or name == graph.loss) for name in op.outputs)
    trial = OpTrial(op.target, numbered(op), inputs, live, read)
    before = tuple(x.clone() for x in inputs)
    try:
        outputs, again = trial.forward(inputs), trial.forward(inputs)
    except CannotRun:
        return None
    pure = all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    return TrialSample(trial, outputs) if pure and _equal(outputs, again) else None


def _drawn(shape: Shape, like: GraphTensor, draw: str, generator: torch.Generator) -> Tensor:
    kind = getattr(torch, like.dtype)
    if kind.is_floating_point or kind.is_complex:
        wide = torch.complex128 if kind.is_complex else torch.float64
        made = torch.randn(shape, generator=generator, dtype=wide)
        return made if kind.is_complex and draw != "wide" else _as(draw, made, like.requires_grad)
    # Indices of what they may look up: all dims have two elements or one.
    return torch.randint(2, shape, generator=generator).to(kind)


def _as(draw: str, made: Tensor, live: bool) -> Tensor:
    """Normal numbers as another kind of them."""
    match draw:
        case "positive":
            return made.abs() + 0.1
        case "unit":
            return made.sigmoid()
        case "signs":
            return made if live else made.sign()
        case "wide":
            return made * WIDE
    return made


def differs(x: Tensor) -> bool:
    """Whether tensors of its kind have gradients and may be summands."""
    return x.is_floating_point() or x.is_complex()


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _equal(left: tuple[Tensor | None, ...], right: tuple[Tensor | None, ...]) -> bool:
    """Whether twice the same came out: nothing is drawn at random."""
    pairs = zip(left, right, strict=True)
    return all((a is None or b is None or torch.equal(a, b)) for a, b in pairs)
