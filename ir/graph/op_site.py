"""One op where it runs: its strategy on each axis and the local shapes that follow from it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Arg, Op, Ref, Tensor
from meshwright.ir.layout.layout import (
    Axis,
    Layout,
    Partial,
    Placement,
    R,
    Shard,
    Strategy,
    local_shape,
)
from meshwright.ir.layout.nesting import LocalSplit, local_split


@dataclass(frozen=True, slots=True)
class In:
    """Stands for the op's tensor input number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class RankDevice:
    """Stands for the device of the rank."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype by name."""

    name: str


Value = In | RankDevice | Dtype | int | float | complex | bool | str | None | tuple["Value", ...]
"""An argument of a form."""


@dataclass(frozen=True, slots=True)
class Form:
    """A call: target, arguments by name, and what is done to its result."""

    target: str
    args: tuple[tuple[str, Value], ...]
    divisor: int = 1
    """The result is divided by it: the global count of a mean."""
    whole: bool = False
    """The op makes the whole value on every rank; its part is sliced off afterwards."""
    by_sample: bool = False
    """What is made whole is so on model axes only: it has just the samples of the rank."""
    guarded: tuple[int, ...] = ()
    """Inputs that are buffers and change in place: not when a block is recomputed."""
    channels_last: tuple[int, ...] = ()
    """Inputs that are images and are brought to this layout, wherever they come from."""

    def arg(self, name: str) -> Value:
        """An argument; None if the form does not have it."""
        return dict(self.args).get(name)

    def having(self, **changes: Value) -> "Form":
        """The form with some arguments changed or added."""
        return replace(self, args=tuple({**dict(self.args), **changes}.items()))


@dataclass(frozen=True)
class OpSite:
    """An op, its strategies, and the rank's place in the mesh."""

    op: Op
    tensors: Mapping[str, Tensor]
    strategies: Mapping[str, Strategy]
    """Axis -> strategy; an axis that is absent is all Replicate."""
    axes: Mapping[str, Axis]
    coordinates: Mapping[str, int]

    def input(self, index: int) -> Tensor:
        return self.tensors[self.op.inputs[index]]

    def input_layout(self, index: int) -> Layout:
        """Placement of an input on every axis, as the op wants it."""
        return {axis: self._placement(axis, index, False) for axis in self.axes}

    def output_layout(self, index: int) -> Layout:
        """Placement of an output on every axis, as the op makes it."""
        return {axis: self._placement(axis, index, True) for axis in self.axes}

    def _placement(self, axis: str, index: int, output: bool) -> Placement:
        strategy = self.strategies.get(axis)
        if strategy is None:
            return R
        placements = strategy.outputs if output else strategy.inputs
        names = self.op.outputs if output else self.op.inputs
        if output and len(placements) != len(names):
            index = sum(1 for name in names[:index] if name)
        if index >= len(placements):
            raise PlanError(
                f"strategy {strategy} of {self.op.key} on {axis}: {self.op.target} has "
                f"{len(self.op.inputs)} tensor inputs and {len(self.op.outputs)} outputs"
            )
        return placements[index]

    def local_input(self, index: int) -> tuple[int, ...]:
        """Local shape of an input."""
        return self._local(self.op.inputs[index], self.input_layout(index))

    def local_output(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of an output."""
        return self._local(self.op.outputs[index], self.output_layout(index))

    def _local(self, name: str, layout: Layout) -> tuple[int, ...]:
        shape = self.tensors[name].shape
        return local_shape(shape, layout, self.axes, self.coordinates)

    def input_shards(self, index: int) -> Iterator[tuple[str, Shard]]:
        """The axes that split an input, and how."""
        for axis, placement in self.input_layout(index).items():
            if isinstance(placement, Shard):
                yield axis, placement

    def is_split(self, index: int, dim: int) -> bool:
        """Whether any axis splits this dim of an input."""
        dim %= len(self.input(index).shape)
        return any(shard.dim == dim for _, shard in self.input_shards(index))

    def sums(self) -> bool:
        """Whether the first output is a summand on some axis where an input is split."""
        layout, inputs = self.output_layout(0), range(len(self.op.inputs))
        split = {axis for i in inputs for axis, _ in self.input_shards(i)}
        return any(isinstance(layout[axis], Partial) for axis in split)

    def is_whole(self) -> bool:
        """Whether this rank holds all of every input: nothing is really split."""
        return all(self.local_input(i) == self.input(i).shape for i in range(len(self.op.inputs)))

    def split(self, axis: str, shape: tuple[int, ...], layout: Layout) -> LocalSplit:
        """How `axis` splits its dim of a value of global `shape`, the other axes done before."""
        shard = layout[axis]
        assert isinstance(shard, Shard), shard
        size = shape[shard.dim]
        return local_split(size, axis, shard, layout, self.axes, self.coordinates)

    def arguments(self) -> dict[str, Value]:
        """The op's arguments with tensors as In, in order."""
        counter = iter(range(len(self.op.inputs)))
        return {name: _value(name, arg, counter) for name, arg in self.op.args}


def _value(name: str, arg: Arg, counter: Iterator[int]) -> Value:
    match arg:
        case Ref():
            return In(next(counter))
        case tuple():
            return tuple(_value(name, item, counter) for item in arg)
        case str() if name.endswith("dtype"):
            return Dtype(arg)
    return arg
