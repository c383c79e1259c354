"""Reads emitted code for tensors that it would make on the host."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from meshwright.codegen.lower.program import StageProgram
from meshwright.ir.torch_private import schema_arguments


def host_tensors(programs: Sequence[StageProgram]) -> tuple[str, ...]:
    """Returns, for a rank's programs, each place of a block that makes a tensor where the rank's
    device is not: one that names a device itself, names none and reads no tensor, or is a constant
    that lies on the host."""
    return tuple(
        dict.fromkeys(
            f"{call.code.pattern}: {said}"
            for program in programs
            for call in (program.totals, program.prelude, *program.calls)
            if call is not None
            for said in _of_module(call.code.module)
        )
    )


def _of_module(module: fx.GraphModule) -> Iterator[str]:
    for node in module.graph.nodes:
        if node.op == "get_attr":
            held = module
            for part in str(node.target).split("."):
                held = getattr(held, part)
            if isinstance(held, Tensor) and held.device.type == "cpu":
                yield f"{node.target} is a constant of the host"
        elif isinstance(node.target, torch._ops.OpOverload) and (said := _of_operator(node)):
            yield f"{node.target} {said}"


def _of_operator(node: fx.Node) -> str:
    arguments = schema_arguments(node.target)
    names = [argument.name for argument in arguments]
    if "device" not in names:
        return ""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    device = given.get("device")
    if isinstance(device, torch.device | str):
        return f"names {device}"
    reads = [n for n, value in given.items() if isinstance(value, fx.Node | list | tuple)
             and n != "device" and _has_node(value)]  # fmt: skip
    return "" if device is not None or reads else "names no device and reads no tensor"


def _has_node(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_node, value))
    return isinstance(value, fx.Node)
