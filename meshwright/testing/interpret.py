"""Runs a Graph op by op on real tensors: what a trace must compute, and nothing else."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.ir.graph.graph import Graph, Kind, Op, Tensor
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.saved import call_target
from meshwright.ir.trace.loss_module import flatten_batch


def values_of(graph: Graph, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """The tensors that the graph starts from."""
    state: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    state |= dict(model.named_buffers(remove_duplicate=False))
    inputs = flatten_batch(batch)
    values = {n: inputs[key] for n, key in zip(graph.inputs, graph.input_names, strict=True)}
    for name, tensor in graph.tensors.items():
        if tensor.kind in (Kind.PARAMETER, Kind.BUFFER):
            values[name] = state[tensor.fqn]
        elif tensor.kind is Kind.CONSTANT:
            values[name] = constant(tensor)
    return values


def constant(tensor: Tensor) -> torch.Tensor:
    return torch.tensor(tensor.value, dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)


def run_op(op: Op, values: Mapping[str, torch.Tensor]) -> list[Any]:
    return call_target(operator(op.target), dict(op.args), values)


def interpret(graph: Graph, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Every value of the step."""
    values = values_of(graph, model, batch)
    for op in graph.ops:
        for name, result in zip(op.outputs, run_op(op, values), strict=True):
            if name:
                values[name] = result
    return values
