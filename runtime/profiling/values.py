"""Tensors to measure with: random numbers, and whole numbers that are legal where they are used."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn

from meshwright.ir.graph.expert_form import form_of
from meshwright.ir.graph.experts import EXPERTS_TARGET
from meshwright.ir.graph.graph import Graph, Kind, Op, Ref
from meshwright.ir.graph.param import Param

_TABLES = {
    "aten.embedding": ("indices", "weight", 0),
    "aten.embedding_bag": ("indices", "weight", 0),
    "aten._embedding_bag": ("indices", "weight", 0),
    "aten.index_select": ("index", "self", -1),
    "aten.gather": ("index", "self", -1),
    "aten.scatter": ("index", "self", -1),
    "aten.scatter_add": ("index", "self", -1),
    "aten.take_along_dim": ("indices", "self", -1),
    "aten.cross_entropy_loss": ("target", "self", 1),
    "aten.nll_loss": ("target", "self", 1),
    "aten.nll_loss_nd": ("target", "self", 1),
    "meshwright.cross_entropy_sum": ("target", "logits", 1),
    "meshwright.cross_entropy_total": ("target", "logits", 1),
    "meshwright.experts": ("top_k_index", "gate_up", 0),
}
"""Op -> its argument that names rows, the tensor they are of, its dim; -1: what `dim` says."""
_MOVES = frozenset({
    "view", "reshape", "slice", "select", "clone", "where", "masked_fill", "expand", "cat",
    "transpose", "permute", "squeeze", "unsqueeze", "flatten", "contiguous", "detach", "to",
    "_to_copy", "alias", "copy", "_unsafe_view", "constant_pad_nd", "masked_fill_", "copy_",
})  # fmt: skip
"""Ops that leave whole numbers as they are."""


def rows_below(graph: Graph, name: str) -> int:
    """What whole numbers called `name` must be below, by what is looked up with them; 0: nothing.

    Where they are calculated with on the way, half of it.
    """
    found = list(_limits(graph, name, 1, set()))
    return max(1, min(found)) if found else 0


def _limits(graph: Graph, name: str, share: int, seen: set[str]) -> Iterator[int]:
    seen.add(name)
    for op in graph.users.get(name, ()):
        yield from (limit // share for limit in _looked_up(graph, op, name))
        for out in op.outputs:
            if out and out not in seen and "int" in graph.tensors[out].dtype:
                kept = op.target.split(".")[1] in _MOVES
                yield from _limits(graph, out, share if kept else 2, seen)


def _looked_up(graph: Graph, op: Op, name: str) -> Iterator[int]:
    """Sizes of the dims in which the op looks up `name`."""
    short = op.target.rpartition(".")[0]
    args = dict(op.args)
    if short in ("aten.index", "aten.index_put", "aten.index_put_"):
        table, indices = args["self"], args["indices"]
        assert isinstance(table, Ref) and isinstance(indices, tuple)
        for dim, index in enumerate(indices):
            if index == Ref(name):
                yield graph.tensors[table.name].shape[dim]
    elif short == "aten.one_hot" and isinstance(args["num_classes"], int):
        yield args["num_classes"] if args["num_classes"] > 0 else 1
    elif short in _TABLES:
        argument, of, dim = _TABLES[short]
        table = args.get(of, args.get("self"))
        if args.get(argument) == Ref(name) and isinstance(table, Ref):
            rows = _size(graph, table.name, args.get("dim") if dim < 0 else dim)
            yield rows + form_of(op).weightless if op.target == EXPERTS_TARGET else rows


def _size(graph: Graph, table: str, dim: object) -> int:
    shape = graph.tensors[table].shape
    assert isinstance(dim, int)
    return shape[dim] if dim < len(shape) else shape[-1]


def drawn(
    shape: tuple[int, ...],
    dtype: str,
    device: torch.device,
    below: int,
    generator: torch.Generator,
    *,
    positive: bool = False,
) -> Tensor:
    """Random numbers on the device; whole ones are below `below`, or ones if it is 0."""
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point:
        make = torch.rand if positive else torch.randn
        return make(shape, generator=generator).to(kind).to(device)
    if kind is torch.bool or not below:
        return torch.ones(shape, dtype=kind, device=device)
    return torch.randint(below, shape, generator=generator, dtype=kind).to(device)


def parameter(
    graph: Graph, param: Param, device: torch.device, generator: torch.Generator
) -> Tensor:
    """A parameter, buffer or constant as a rank holds it."""
    tensor = graph.tensors[param.name]
    dtype: torch.dtype = getattr(torch, param.dtype)
    if tensor.value:
        return torch.tensor(tensor.value, dtype=dtype, device=device).view(param.global_shape)
    shape = param.local_shape
    if not dtype.is_floating_point:
        below = rows_below(graph, param.name)
        return drawn(shape, param.dtype, device, below, generator)
    if len(shape) < 2:  # of normalisations: scales and statistics
        values = torch.ones(shape, dtype=dtype, device=device)
    else:
        values = drawn(shape, param.dtype, device, 0, generator) / prod(shape[1:]) ** 0.5
    return nn.Parameter(values, param.requires_grad) if param.kind is Kind.PARAMETER else values
