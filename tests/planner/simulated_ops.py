"""Runs one op under one strategy on simulated ranks, and compares it with the whole op."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.local import form_of
from meshwright.ir.graph.graph import Graph, Kind, Op
from meshwright.ir.graph.op_site import OpSite
from meshwright.ir.layout.conversions import dual
from meshwright.ir.layout.layout import Axis, Partial, Placement, Replicate, Shard, Strategy
from meshwright.testing.simulated import evaluate, simulate
from meshwright.testing.whole_values import part

Values = dict[str, Tensor]


def run_whole(graph: Graph, model: nn.Module, inputs: Mapping[str, Tensor]) -> Values:
    """Every value of the graph, computed op by op in one process."""
    values: Values = {}
    for tensor in graph.tensors.values():
        if tensor.kind in (Kind.PARAMETER, Kind.BUFFER):
            values[tensor.name] = _stored(model, tensor.fqn)
        elif tensor.kind is Kind.CONSTANT:
            values[tensor.name] = _constant(model, graph, tensor.name)
    values |= {n: inputs[key] for n, key in zip(graph.inputs, graph.input_names, strict=True)}
    for op in graph.ops:
        results = whole_op(op, graph, [values[name].clone() for name in op.inputs])
        values |= {n: x.detach() for n, x in zip(op.outputs, results, strict=True) if n}
    return values


def _stored(model: nn.Module, fqn: str) -> Tensor:
    path, _, last = fqn.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), last)
    return found.detach()


def _constant(model: nn.Module, graph: Graph, name: str) -> Tensor:
    tensor = graph.tensors[name]
    if tensor.fqn:
        return _stored(model, tensor.fqn)
    return torch.tensor(tensor.value, dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)


def whole_op(op: Op, graph: Graph, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The op on one rank."""
    comm = Comm({}, {"dp": 1, "tp": 1}, {"dp": 0, "tp": 0})
    site = OpSite(op, graph.tensors, {}, {"dp": Axis(1), "tp": Axis(1)}, comm.coordinates)
    return evaluate(form_of(site), comm, inputs)


@dataclass(frozen=True)
class Whole:
    """An op's inputs, outputs, a gradient for each output, and the gradients that follow."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    given: tuple[Tensor | None, ...]
    grads: tuple[Tensor | None, ...]


def whole_of(op: Op, graph: Graph, values: Values) -> Whole:
    """Forward and backward of the whole op, with random gradients of its outputs."""
    inputs = [values[name].clone() for name in op.inputs]
    leaves = _leaves(op, graph, inputs)
    # Ops that change a buffer in place get their own copy.
    outputs = whole_op(op, graph, leaves)
    generator = torch.Generator().manual_seed(7)
    given = tuple(_like(x, generator) if x.requires_grad else None for x in outputs)
    _backward(outputs, given)
    grads = tuple(x.grad for x in leaves)
    return Whole(tuple(inputs), tuple(x.detach() for x in outputs), given, grads)


def _leaves(op: Op, graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [
        x.detach().clone().requires_grad_(graph.tensors[n].requires_grad)
        for n, x in zip(op.inputs, inputs, strict=True)
    ]


def _like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype, generator=generator)


def _backward(outputs: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
    pairs = [(x, g) for x, g in zip(outputs, given, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])


def check_strategy(
    op: Op, graph: Graph, whole: Whole, strategy: Strategy, axis_name: str, axis: Axis
) -> None:
    """Raises unless the ranks together compute what the whole op computes, both ways."""
    split_in = [_spread(x, p, axis) for x, p in zip(whole.inputs, strategy.inputs, strict=True)]
    split_grads = [
        None if g is None else _spread(g, dual(p), axis)
        for g, p in zip(whole.given, strategy.outputs, strict=True)
    ]

    def body(comm: Comm) -> tuple[list[Tensor], list[Tensor | None]]:
        rank = comm.coordinates[axis_name]
        comm.sample_offset = sum(axis.shares[:rank])
        axes = {"dp": Axis(1), "tp": Axis(1)} | {axis_name: axis}
        site = OpSite(op, graph.tensors, {axis_name: strategy}, axes, comm.coordinates)
        leaves = _leaves(op, graph, [parts[rank] for parts in split_in])
        form = form_of(site)
        outputs = evaluate(form, comm, leaves)
        if form.whole:
            outputs = tuple(
                part(x, p, axis, rank) for x, p in zip(outputs, strategy.outputs, strict=True)
            )
        mine = [None if parts is None else parts[rank] for parts in split_grads]
        _backward(outputs, mine)
        return [x.detach() for x in outputs], [x.grad for x in leaves]

    results = simulate({"dp": 1, "tp": 1} | {axis_name: axis.size}, body)
    single = any(x.dtype is torch.float32 for x in (*whole.inputs, *whole.outputs))
    near = 1e-5 if single else 1e-9
    for i, placement in enumerate(strategy.outputs):
        if op.outputs[i] in graph.users or op.outputs[i] == graph.loss:
            _compare([made[i] for made, _ in results], whole.outputs[i], placement, axis, near)
    for i, placement in enumerate(strategy.inputs):
        expected = whole.grads[i]
        if expected is not None:
            parts = [
                torch.zeros_like(split_in[i][rank]) if (grad := grads[i]) is None else grad
                for rank, (_, grads) in enumerate(results)
            ]
            _compare(parts, expected, dual(placement), axis, near)


def _spread(whole: Tensor, placement: Placement, axis: Axis) -> list[Tensor]:
    """What each rank holds: its part, a copy, or a random summand."""
    match placement:
        case Shard():
            return [part(whole, placement, axis, rank).clone() for rank in range(axis.size)]
        case Replicate():
            return [whole.clone() for _ in range(axis.size)]
    generator = torch.Generator().manual_seed(3)
    if whole.is_floating_point():
        summands = [_like(whole, generator) for _ in range(axis.size - 1)]
    else:
        summands = [torch.ones_like(whole) for _ in range(axis.size - 1)]
    return [*summands, whole - sum(summands, torch.zeros_like(whole))]


def _compare(
    parts: Sequence[Tensor], whole: Tensor, placement: Placement, axis: Axis, near: float
) -> None:
    if isinstance(placement, Partial):
        total = sum(parts[1:], parts[0])
        torch.testing.assert_close(total, whole, rtol=near, atol=near)
        return
    for rank, mine in enumerate(parts):
        expected = part(whole, placement, axis, rank)
        torch.testing.assert_close(mine, expected, rtol=near, atol=near)
