"""The rule of an op that no family knows: tried once, kept on disk, confirmed where it is used."""

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import torch

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.rules import Dims, Rule, input_shapes, make_rule, output_shapes
from meshwright.ir.text.digest import digest
from meshwright.ir.torch_private import written_arguments
from meshwright.planner.discovery.apart import explore_apart
from meshwright.planner.discovery.found import DimCut, FoundRule
from meshwright.planner.discovery.probe import confirm
from meshwright.planner.discovery.sample import LARGEST, sample, samples, shrunk
from meshwright.planner.discovery.store import load, save
from meshwright.planner.discovery.trial import numbered

_SEEN: dict[str, FoundRule] = {}
"""What this process has tried or confirmed, by key and sizes."""


def discovered(op: Op, graph: Graph) -> Rule | None:
    """How the op may be split, if it can be tried and may be split at all."""
    if not op.inputs or not _can_be_tried(op.target):
        return None
    found = _found(op, graph)
    return _rule(op, graph, found) if found.cuts or found.linear else None


def _can_be_tried(target: str) -> bool:
    """Whether this process knows the operator, and it changes nothing in place."""
    try:
        return not written_arguments(operator(target))
    except PlanError:
        return False


def _found(op: Op, graph: Graph) -> FoundRule:
    key = _key(op, graph)
    at = digest([key, input_shapes(op, graph)])
    if at not in _SEEN:
        _SEEN[at] = _tried(op, graph, key)
    return _SEEN[at]


def _tried(op: Op, graph: Graph, key: Mapping[str, Any]) -> FoundRule:
    drawn = samples(op, graph)
    if not drawn:
        return FoundRule()
    small, *others = drawn
    found = load(key)
    if found is None:
        found = explore_apart(small)
        save(key, found)
    else:
        # The operator may have changed since; and a file can be edited.
        found = confirm(small, found)
    for other in others:
        found = confirm(other, found)
    shapes = input_shapes(op, graph)
    if sum(map(prod, shapes)) <= LARGEST and tuple(x.shape for x in small.trial.inputs) != shapes:
        own = sample(op, graph, shapes)
        found = confirm(own, found) if own else FoundRule()
    return found


def _key(op: Op, graph: Graph) -> dict[str, Any]:
    """What the outcome depends on: operator, arguments, kinds and relative sizes of the tensors."""
    tensors = [graph.tensors[name] for name in op.inputs]
    return {
        "target": op.target,
        "torch": torch.__version__,
        "args": {name: str(value) for name, value in numbered(op).items()},
        "kinds": [_kind(t.dtype) + "!" * t.requires_grad for t in tensors],
        "shapes": [list(shape) for shape in shrunk(input_shapes(op, graph))],
        "read": [bool(n) and (n in graph.users or n == graph.loss) for n in op.outputs],
    }


@cache
def _kind(dtype: str) -> str:
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return "float"
    return "complex" if kind.is_complex else "bool" if kind is torch.bool else "int"


def _rule(op: Op, graph: Graph, found: FoundRule) -> Rule:
    shapes = (*input_shapes(op, graph), *output_shapes(op, graph))
    dims: list[list[tuple[str, ...]]] = [
        [(f"w{i}_{d}",) for d in range(len(shape))] for i, shape in enumerate(shapes)
    ]
    sizes: dict[str, int] = {}
    for number, cut in enumerate(found.cuts):
        _place(f"c{number}", cut, shapes, dims, sizes)
    count = len(op.inputs)
    sides: list[Dims] = [tuple(each) for each in dims]
    free = {f"c{n}" for n in range(len(found.cuts))}
    whole = {f for side in sides for factors in side for f in factors} - free
    return make_rule(
        op, graph, sides[:count], sides[count:], sizes=sizes, whole=whole, linear=found.linear
    )


def _place(
    factor: str,
    cut: DimCut,
    shapes: tuple[tuple[int, ...], ...],
    dims: list[list[tuple[str, ...]]],
    sizes: dict[str, int],
) -> None:
    """The factor leads each dim that the cut names, if their sizes allow it."""
    places = [(i, d) for i, d in enumerate((*cut.inputs, *cut.outputs)) if d is not None]
    units = min(shapes[i][d] for i, d in places)
    if units < 2 or any(shapes[i][d] % units for i, d in places):
        return
    sizes[factor] = units
    for i, d in places:
        rest = f"r{i}_{d}"
        sizes[rest] = shapes[i][d] // units
        dims[i][d] = (factor, rest) if sizes[rest] > 1 else (factor,)
