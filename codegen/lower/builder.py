"""Builds the fx graph of one block: ops on local tensors, a conversion where placements differ."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import getitem, truediv
from types import MappingProxyType
from typing import cast

import torch
from torch import fx, nn
from torch.fx.node import Argument

from meshwright.codegen.lower import joint
from meshwright.codegen.lower.local import bind, form_of
from meshwright.codegen.sharded.sharded import update
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import DTYPE_BYTES, Graph, Kind, Op
from meshwright.ir.graph.images import last_format
from meshwright.ir.graph.op_site import Form, In, OpSite, RankDevice
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.tables import LOOKUPS
from meshwright.ir.layout.conversions import COMMUNICATES, Conversion, Primitive
from meshwright.ir.layout.layout import (
    Axis,
    Layout,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    Strategy,
    local_shape,
)
from meshwright.ir.layout.nesting import LocalSplit, local_split
from meshwright.ir.layout.paths import path
from meshwright.ir.ops.gather import of_rows_here
from meshwright.ir.placed.spots import KernelSpot
from meshwright.ir.plan.keeping import operands_key
from meshwright.ir.torch_private import LazyGraphModule, makes_view, returns_list
from meshwright.ir.trace.changing import written

Placed = tuple[Placement, ...]
"""One placement per axis, in the order of the builder's axes."""

_WHOLE_BATCH = frozenset(
    {Primitive.ALL_REDUCE, Primitive.ALL_GATHER, Primitive.REDUCE_SCATTER, Primitive.ALL_TO_ALL}
)


class Builder:
    """The state of one fx graph that is being built."""

    def __init__(
        self,
        graph: Graph,
        axes: Mapping[str, Axis],
        coordinates: Mapping[str, int],
        label: Callable[[str], str],
        some_rows: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`some_rows`: tables of which blocks have some rows only, with their paths."""
        self.graph = graph
        self.axes = dict(axes)
        self.coordinates = {axis: coordinates[axis] for axis in axes}
        self.label = label
        """Tensor name -> what a reader calls it."""
        self._some_rows = some_rows
        self.fx = fx.Graph()
        self.comm = self.fx.placeholder("comm")
        self.device: fx.Node | None = None
        self.made: dict[str, Placed] = {}
        """Tensor -> the placement that it came with."""
        self.nodes: dict[tuple[str, Placed], fx.Node] = {}

    def placed(self, layout: Layout) -> Placed:
        return tuple(layout.get(axis, R) for axis in self.axes)

    def add_placeholder(self, name: str, layout: Layout, called: str = "") -> None:
        """A param or an input of the block."""
        self.made_as(name, self.fx.placeholder(_identifier(called or name)), layout)

    def made_as(self, name: str, node: fx.Node, layout: Layout) -> None:
        """The value comes from the node, placed so."""
        self.made[name] = self.placed(layout)
        self.nodes[name, self.made[name]] = node

    def enter(self, name: str, layout: Layout) -> None:
        """An input as the block's layout declares it, if it comes otherwise."""
        self.made_as(name, self.need(name, layout), layout)

    def need(self, name: str, layout: Layout) -> fx.Node:
        """The value in the placement wanted, converted on one axis after the other."""
        now, shape = self.made[name], self.graph.tensors[name].shape
        for axis, placement in path(shape, self._layout(now), layout, self.axes):
            then = self.placed(self._layout(now) | {axis: placement})
            if (name, then) not in self.nodes:
                self.nodes[name, then] = self._convert(name, now, then, axis)
            now = then
        return self.nodes[name, now]

    def _layout(self, placed: Placed) -> Layout:
        return dict(zip(self.axes, placed, strict=True))

    def _convert(self, name: str, now: Placed, then: Placed, axis: str) -> fx.Node:
        value, at = self.nodes[name, now], list(self.axes).index(axis)
        conversion = Conversion(now[at], then[at])
        tensor, partly = self.graph.tensors[name], _partly(self.axes[axis])
        forward, backward = conversion.forward, conversion.backward
        if self._is_free(conversion, axis, tensor.requires_grad):
            return value
        moves = {forward, backward} if tensor.requires_grad else {forward}
        if partly and moves & _WHOLE_BATCH:
            raise PlanError(
                f"{self.label(name)}: {conversion.source} -> {conversion.target} over {axis} needs "
                f"the whole batch at once; use num_microbatches=1"
            )
        gradient = str(backward) if tensor.requires_grad else "none"
        args, kwargs = self._shards(tensor.shape, conversion, axis, self._layout(now))
        node = self.fx.create_node(
            "call_method", str(forward), (self.comm, value, axis, *args), kwargs,
            f"{value.name}_{_suffix(conversion)}",
        )  # fmt: skip
        if gradient != "none":
            node.kwargs = {**node.kwargs, "backward": gradient}
        if tensor.channels_last and tensor.kind in (Kind.ACTIVATION, Kind.INPUT):
            # Else each convolution that reads it would make, and keep, a copy in that layout.
            node.kwargs = {**node.kwargs, "channels_last": True}
        before, after = self._bytes(name, now), self._bytes(name, then)
        node.meta["comment"] = _comment(self.label(name), axis, forward, gradient, before, after)
        return node

    def _is_free(self, conversion: Conversion, axis: str, requires_grad: bool) -> bool:
        moves = {conversion.forward} | ({conversion.backward} if requires_grad else set())
        if self.axes[axis].size == 1 and not _partly(self.axes[axis]):
            return True
        return moves == {Primitive.IDENTITY}

    def _shards(
        self, shape: tuple[int, ...], conversion: Conversion, axis: str, layout: Layout
    ) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        found = [
            (p.dim, local_split(shape[p.dim], axis, p, layout, self.axes, self.coordinates))
            for p in (conversion.source, conversion.target)
            if isinstance(p, Shard)
        ]
        if not found:
            return (), {}
        (dim, own), others = found[0], found[1:]
        kwargs = _sections(own)
        if others:
            to_dim, to = others[0]
            kwargs |= {f"to_{word}": value for word, value in _sections(to).items()}
            return (dim, own.sizes, to_dim, to.sizes), kwargs
        if _partly(self.axes[axis]):
            per_sample = own.section // self.axes[axis].whole
            kwargs |= {"whole": own.section, "per_sample": per_sample}
        return (dim, own.sizes), kwargs

    def _bytes(self, name: str, placed: Placed) -> int:
        tensor, count = self.graph.tensors[name], 1
        local = local_shape(tensor.shape, self._layout(placed), self.axes, self.coordinates)
        for size in local:
            count *= size
        return count * DTYPE_BYTES[tensor.dtype]

    def add_op(self, op: Op, strategies: Mapping[str, Strategy]) -> None:
        """One op in its local form, with the conversions its inputs need."""
        site = OpSite(op, self.graph.tensors, strategies, self.axes, self.coordinates)
        before = len(self.fx.nodes)
        inputs = [self.need(name, site.input_layout(i)) for i, name in enumerate(op.inputs)]
        self._mark(before, operands_key(op.key))
        before = len(self.fx.nodes)
        self._add(op, site, inputs)
        self._mark(before, op.key)

    def _mark(self, before: int, key: str) -> None:
        """Says whose the nodes are that have been added since there were so many."""
        for node in islice(reversed(self.fx.nodes), len(self.fx.nodes) - before):
            node.meta["key"] = key

    def _add(self, op: Op, site: OpSite, inputs: list[fx.Node]) -> None:
        form = form_of(site)
        if op.inputs and op.inputs[0] in self._some_rows and op.target.startswith(LOOKUPS):
            form = of_rows_here(form, self._some_rows[op.inputs[0]])
        for i in form.guarded:
            inputs[i] = self.fx.call_function(update, (self.comm, inputs[i]))
        node = self._call(site, form, inputs, op.outputs[0] if op.outputs else op.name)
        for name in written(op):
            self._forget(name, self.placed(site.input_layout(op.inputs.index(name))))
        if len(op.outputs) == 1 and not returns_list(operator(op.target)):
            self._output(site, 0, node, form)
        else:
            self.outputs(site, node, form)

    def outputs(self, site: OpSite, node: fx.Node, form: Form | None = None) -> None:
        """What others read of a call's several results."""
        for i, name in enumerate(site.op.outputs):
            if name in self.graph.users or name == self.graph.loss:
                self._output(site, i, self.fx.call_function(getitem, (node, i)), form)

    def call(self, site: OpSite, inputs: Sequence[fx.Node], name: str) -> fx.Node:
        """An op in its local form, of these values in place of its operands."""
        return self._call(site, form_of(site), inputs, name)

    def _forget(self, name: str, kept: Placed) -> None:
        """After a change in place, conversions of the old value are stale."""
        for key in [key for key in self.nodes if key[0] == name and key[1] != kept]:
            del self.nodes[key]

    def _output(self, site: OpSite, index: int, node: fx.Node, form: Form | None) -> None:
        layout = site.output_layout(index)
        if form and form.divisor != 1:
            node = self.fx.call_function(truediv, (node, form.divisor))
        if form and form.whole:
            # Made whole: placed R now, sliced when someone needs it split.
            kept = "dp" if form.by_sample else ""
            layout = {
                axis: R if isinstance(p, Shard) and axis != kept else p
                for axis, p in layout.items()
            }
        self.made_as(site.op.outputs[index], node, layout)

    def _call(self, site: OpSite, form: Form, inputs: Sequence[fx.Node], name: str) -> fx.Node:
        inputs = list(inputs)
        for i in form.channels_last:
            inputs[i] = self._channels_last(inputs[i], len(site.input(i).shape))

        def resolve(arg: In | RankDevice) -> fx.Node:
            return inputs[arg.index] if isinstance(arg, In) else self._device()

        target, args, kwargs = bind(form, resolve)
        if form.target.startswith("sharded."):
            args = (self.comm, *args)
        positional, named = cast(tuple[Argument, ...], args), cast(dict[str, Argument], kwargs)
        return self.fx.create_node("call_function", target, positional, named, _identifier(name))

    def _channels_last(self, x: fx.Node, dims: int) -> fx.Node:
        """Images in that layout; nothing is done at run time where they lie so."""
        return self.fx.create_node(
            "call_function", torch.ops.aten.contiguous.default, (x,),
            {"memory_format": last_format(dims)}, f"{x.name}_last",
        )  # fmt: skip

    def _device(self) -> fx.Node:
        if self.device is None:
            self.device = self.fx.create_node(
                "call_function", getattr, (self.comm, "device"), name="device"
            )
        return self.device

    def named(self, name: str) -> str:
        """A tensor's name as a node can have it."""
        return _identifier(name)

    def add_joint(
        self, kernel: str, spot: KernelSpot, strategies: Callable[[Op], Mapping[str, Strategy]]
    ) -> None:
        """A call of a kernel that takes over an op with the collective beside it."""
        before = len(self.fx.nodes)
        joint.add(self, kernel, spot, strategies)
        self._mark(before, spot.op.key)

    def finish(
        self, outputs: Sequence[tuple[str, Layout]], *, apart: bool = False
    ) -> fx.GraphModule:
        """The module that returns these values in these placements; `apart` from parameters, whose
        memory is not there once the block is over."""
        nodes = [
            self.fx.call_function(torch.ops.aten.clone.default, (node,))
            if apart and self._is_parameter(name)
            else node
            for name, layout in outputs
            for node in (self.need(name, layout),)
        ]
        self.fx.output(tuple(nodes))
        self.fx.lint()
        made: fx.GraphModule = LazyGraphModule(nn.Module(), self.fx)
        return made

    def _is_parameter(self, name: str) -> bool:
        """Whether it is a parameter, or a view of one."""
        while (op := self.graph.producer.get(name)) and op.inputs:
            if not makes_view(operator(op.target)):
                return False
            name = op.inputs[0]
        return self.graph.tensors[name].kind is Kind.PARAMETER


def _sections(own: LocalSplit) -> dict[str, Argument]:
    """What a call is told of a split into several sections."""
    found: dict[str, Argument] = {"outer": own.outer} if own.outer > 1 else {}
    return found | ({"zigzag": True} if own.zigzag else {})


def _partly(axis: Axis) -> bool:
    """Whether the ranks together hold only a micro-batch of the global batch."""
    return bool(axis.shares) and sum(axis.shares) != axis.whole


def _identifier(name: str) -> str:
    found = re.sub(r"\W", "_", name)
    return f"_{found}" if found[:1].isdigit() else found


def _suffix(conversion: Conversion) -> str:
    """Names what comes out: `whole`, `part`, `summand`."""
    match conversion.target:
        case Shard():
            return "part"
        case Partial():
            return "summand"
    return "whole" if not isinstance(conversion.source, Replicate) else "copy"


def _size_text(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def _comment(
    label: str, axis: str, forward: Primitive, backward: str, before: int, after: int
) -> str:
    """What moves: bytes are those of the local tensor that goes in."""

    def moved(name: str, nbytes: int) -> str:
        return f"{name} {_size_text(nbytes)}" if name in COMMUNICATES else name

    return (
        f"{label} over {axis}: forward {moved(forward, before)}; backward {moved(backward, after)}"
    )
