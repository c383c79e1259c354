"""Where values of a run of ops lie, what converts them, what ops read, make and keep."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from meshwright.costmodel.block.reprice import (
    MoveStep,
    OpStep,
    PricedInput,
    SavedKey,
    SavedTensor,
    Target,
)
from meshwright.costmodel.block.site import StageSite
from meshwright.costmodel.ops.compute import OpTimer
from meshwright.costmodel.ops.local_values import LocalValues, Values, Where
from meshwright.costmodel.ops.op_classes import class_of, classify, op_name
from meshwright.ir.cluster.device import COMPUTE, OpClass
from meshwright.ir.dtypes import (
    how_cast,
    is_float,
    read_as,
    runtime_dtypes,
    storage_roots,
)
from meshwright.ir.graph.graph import DTYPE_BYTES, Block, Graph, Kind, Op, Tensor
from meshwright.ir.graph.inner_traffic import sends
from meshwright.ir.layout.conversions import Conversion
from meshwright.ir.layout.layout import R, Replicate, Shard, Strategy
from meshwright.ir.layout.paths import path
from meshwright.ir.ops import facts
from meshwright.ir.precision import Precision

Fed = tuple[tuple[bool, str], ...]


@dataclass(frozen=True)
class GraphFacts:
    """What the costs of all blocks of a graph share under one precision."""

    graph: Graph
    precision: Precision
    dtypes: Mapping[str, str]
    roots: Mapping[str, str]
    prelude_values: frozenset[str]
    kind: str
    """Of the devices that run it."""
    _fed: dict[str, Fed] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, graph: Graph, precision: Precision, kind: str) -> "GraphFacts":
        values = frozenset(out for op in graph.prelude_ops for out in op.outputs)
        dtypes = runtime_dtypes(graph, precision, kind)
        return cls(graph, precision, dtypes, storage_roots(graph, dtypes), values, kind)

    def fed(self, block: Block) -> Fed:
        """What blocks of one pattern may differ in: which inputs have gradients, as the first may
        read the batch where others read activations, and in which dtypes these run, as autocast
        may leave what the first reads narrow where a sum has made it wide for others."""
        if block.name not in self._fed:
            self._fed[block.name] = tuple([
                (self.graph.tensors[name].requires_grad, self.dtypes[name])
                for name in block.inputs
            ])  # fmt: skip
        return self._fed[block.name]

    def read_as(self, op: Op, name: str) -> str:
        """The dtype in which an op gets a value, which autocast may have cast for it."""
        narrow = self.precision.autocast
        return read_as(op, name, self.dtypes, narrow, self.kind) if narrow else self.dtypes[name]

    def is_narrow(self, op: Op) -> bool:
        """Whether autocast has the op computed in its own dtype."""
        if not self.precision.autocast:
            return False
        return self.casts_inside(op) or how_cast(op.target, self.kind) in ("narrow", "products")

    def casts_inside(self, op: Op) -> bool:
        """Whether the op itself casts what it reads, and keeps it as it is."""
        narrow = facts(op.target).autocast == "inside" and self.precision.autocast
        return bool(narrow) and self.dtypes[op.inputs[0]] != "float64"

    @cached_property
    def before_softmax(self) -> frozenset[str]:
        """Names of the elementwise ops between products and a softmax."""
        makers = {out: op for op in self.graph.ops for out in op.outputs if out}
        found: set[str] = set()
        open_ = [op for op in self.graph.ops if op_name(op.target) == "softmax"]
        while open_:
            maker = makers.get(open_.pop().inputs[0])
            if maker and classify(maker.target) in (OpClass.ELEMENTWISE, OpClass.COPY):
                found.add(maker.name)
                open_.append(maker)
        return frozenset(found)

    @cached_property
    def turned(self) -> frozenset[str]:
        """Results of recurrent layers that lie with the steps before the samples, and are read the
        other way round."""
        return frozenset(
            op.outputs[0] for op in self.graph.ops
            if (is_turned := facts(op.target).turned) and is_turned(op)
        )  # fmt: skip

    @cached_property
    def normed(self) -> frozenset[str]:
        """What norms make."""
        return frozenset(
            out for op in self.graph.ops if classify(op.target) is OpClass.NORMALIZATION
            for out in op.outputs if out
        )  # fmt: skip


Storage = tuple[str, Target]
"""A value that has its own memory, and its placement."""


@dataclass
class Trace(ABC):
    """Follows ops one after the other; what they do is kept as steps, which `Walk` prices."""

    facts: GraphFacts
    site: StageSite
    timer: OpTimer | None
    placed: dict[str, Where] = field(default_factory=dict)
    converted: set[tuple[str, Target]] = field(default_factory=set)
    """Values with the placements that they have been brought to."""
    storage: dict[tuple[str, Target], Storage] = field(default_factory=dict)
    """(value, placement) -> the memory it looks into, which may be another value's."""
    used: set[str] = field(default_factory=set)
    """Values that an op has read: each further reader adds its gradient to theirs."""
    script: list[MoveStep | OpStep] = field(default_factory=list)
    """All steps so far, in order."""
    narrowed: set[str] = field(default_factory=set)
    """Values that a narrow product has cast."""
    made: set[str] = field(default_factory=set)
    """Values that ops have made; others came from outside, where autograd has their leaves."""
    copied: set[tuple[str, str]] = field(default_factory=set)
    """Leaves that autocast has a copy of, and its dtype."""
    looked_at: dict[str, Storage] = field(default_factory=dict)
    """What has memory of its own though its op may give a view -> the memory that it would view."""
    local: LocalValues = field(init=False)

    def __post_init__(self) -> None:
        self.local = LocalValues(Values(self.facts.graph), self.site)

    @abstractmethod
    def _price(self, step: OpStep) -> None: ...

    @abstractmethod
    def _pay(self, step: MoveStep) -> None: ...

    def _tensor(self, name: str) -> Tensor:
        return self.facts.graph.tensors[name]

    def convert(self, name: str, target: Where) -> None:
        """Price what codegen inserts to have `name` placed as `target`, axis after axis, each
        placement on the way once."""
        now = dict(self.placed.get(name, {}))
        for axis, goal in path(self._tensor(name).shape, now, target, self.site.axes):
            source, now = now.get(axis, R), now | {axis: goal}
            key = (name, self._everywhere(now))
            if self.site.axes[axis].size > 1 and key not in self.converted:
                self.converted.add(key)
                self._move(name, axis, Conversion(source, goal), now)

    def _move(self, name: str, axis: str, conversion: Conversion, where: Where) -> None:
        """One conversion that ends with the value placed as `where`."""
        splits = isinstance(conversion.source, Shard) or isinstance(conversion.target, Shard)
        step = MoveStep(
            name, axis, conversion, self.local.number(name, {**where, axis: R}),
            self.local.number(name, {**where, axis: conversion.source}),
            self.local.number(name, where), splits, self._tensor(name).requires_grad,
        )  # fmt: skip
        self.script.append(step)
        self._pay(step)

    def op(self, op: Op, strategies: Mapping[str, Strategy]) -> None:
        inputs = [self._where(strategies, i, is_input=True) for i in range(len(op.inputs))]
        outputs = [self._where(strategies, i, is_input=False) for i in range(len(op.outputs))]
        for name, where in zip(op.inputs, inputs, strict=True):
            self.convert(name, where)
        for name, where in zip(op.outputs, outputs, strict=True):
            if name:
                self.placed[name] = where
                if self.facts.roots[name] != name:
                    looked_at = self.stored(op.inputs[0], inputs[0])
                    self.storage[name, self.normal(where)] = looked_at
                elif class_of(op) is OpClass.VIEW and op.inputs:
                    self.looked_at[name] = self.stored(op.inputs[0], inputs[0])
        step = self._step(op, strategies, inputs, outputs)
        self.made.update(filter(None, op.outputs))
        self.script.append(step)
        self._price(step)

    def _step(
        self,
        op: Op,
        strategies: Mapping[str, Strategy],
        inputs: Sequence[Where],
        outputs: Sequence[Where],
    ) -> OpStep:
        """All of an op that does not depend on the number of samples."""
        op_class = class_of(op)
        dtype = self._compute_dtype(op)
        causal = op_class is OpClass.ATTENTION and ("is_causal", True) in op.args
        operands = tuple(
            self._operand(op, name, where) for name, where in zip(op.inputs, inputs, strict=True)
        )
        made = [(n, w) for n, w in zip(op.outputs, outputs, strict=True) if n]
        return OpStep(
            op=op,
            strategies=strategies,
            op_class=op_class,
            dtype=self._product_dtype(op, op_class, dtype),
            places=(tuple(inputs), tuple(outputs)),
            inputs=operands,
            outputs=tuple(self._wide(name, where) for name, where in made),
            parts=tuple(self._parts(op, strategies)),
            busiest=self._busiest(op, strategies),
            is_causal=causal,
            channels_last=any(self._tensor(name).channels_last for name, _ in made),
            has_gradient=self._has_gradient(op),
            read_again=tuple(self._read_again(op, operands)),
            gathered=tuple(self._gathered(op, inputs)),
            backward=tuple(self._backward(op, inputs)),
            kept=tuple(self._kept(op, inputs)) if self._has_gradient(op) else (),
            comes_cast=self._comes_cast(op),
            sends=sends(op),
        )

    def _comes_cast(self, op: Op) -> bool:
        if not facts(op.target).scaled:
            return False
        value = self.facts.roots[op.inputs[0]]
        known = value in self.narrowed or value in self.facts.normed
        self.narrowed.add(value)
        return known

    def _wide(self, name: str, where: Where) -> tuple[int, int]:
        """A value and the bytes of its elements."""
        return self.local.number(name, where), DTYPE_BYTES[self.facts.dtypes[name]]

    def _gathered(self, op: Op, inputs: Sequence[Where]) -> Iterator[tuple[int, int]]:
        """Parameters that are stored in parts and made whole for the op, and nothing else."""
        for name, where in zip(op.inputs, inputs, strict=True):
            kind, stored = self._tensor(name).kind, self.placed.get(name, {})
            if kind is Kind.PARAMETER and self.normal(where) != self.normal(stored):
                yield self._wide(name, where)

    def _read_again(self, op: Op, operands: Sequence[PricedInput]) -> Iterator[int]:
        """Inputs whose gradients are added to those of earlier readers."""
        for index, (name, operand) in enumerate(zip(op.inputs, operands, strict=True)):
            if not operand.requires_grad or operand.is_param or not self._has_gradient(op):
                continue
            if name in self.used:
                yield index
            self.used.add(name)

    def _has_gradient(self, op: Op) -> bool:
        return any(n and self._tensor(n).requires_grad for n in op.outputs)

    def _where(self, strategies: Mapping[str, Strategy], index: int, *, is_input: bool) -> Where:
        return {
            axis: (strategy.inputs if is_input else strategy.outputs)[index]
            for axis, strategy in strategies.items()
        }

    def _parts(self, op: Op, strategies: Mapping[str, Strategy]) -> Iterator[tuple[int, int, int]]:
        """One factor of the op's work is split on each axis."""
        for axis, strategy in strategies.items():
            named = zip(
                (*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True
            )
            for name, placement in named:
                if name and isinstance(placement, Shard):
                    size = self.facts.graph.tensors[name].shape[placement.dim]
                    if size:
                        yield self.local.number(name, {axis: placement}), placement.dim, size
                        break

    def _busiest(self, op: Op, strategies: Mapping[str, Strategy]) -> float:
        """Over all axes that leave some ranks more to do than others, and of what is done at all; 0
        if all ranks do an equal part of all."""
        count = facts(op.target).busiest
        if count is None:
            return 0.0
        shape, done = self._tensor(op.inputs[0]).shape, facts(op.target).done
        split = self.site.split_of(strategies)
        each = [count(op, strategy, ranks, shape) for strategy, ranks in split]
        part = done(op) if done else 1.0
        return part * prod(one or 1.0 for one in each) if any(each) or part != 1.0 else 0.0

    def _operand(self, op: Op, name: str, where: Where) -> PricedInput:
        tensor, own = self._tensor(name), self.facts.dtypes[name]
        read = self.facts.read_as(op, name)
        is_cast = read != own and (name, read) not in self.copied
        is_leaf = self._is_leaf(name, where)
        if is_cast and is_leaf:
            self.copied.add((name, read))
        return PricedInput(
            self.local.number(name, where), DTYPE_BYTES[read], DTYPE_BYTES[own],
            is_cast or (self.facts.casts_inside(op) and is_float(own)),
            tensor.requires_grad, tensor.kind is Kind.PARAMETER, tensor.channels_last,
            DTYPE_BYTES[read if is_leaf else own],
        )  # fmt: skip

    def _is_leaf(self, name: str, where: Where) -> bool:
        """Whether an op reads a leaf of autograd, of which autocast keeps one copy for all that
        read it (`cached_cast` of torch's autocast_mode.cpp): a float32 parameter that is trained,
        or what came into the block, where it lies as it came."""
        if self.facts.dtypes[name] != "float32" or not self._tensor(name).requires_grad:
            return False
        return name not in self.made and (name, self._everywhere(where)) not in self.converted

    def _backward(self, op: Op, inputs: Sequence[Where]) -> Iterator[tuple[int, int]]:
        """What the op's backward reads besides gradients. What it saves may go by the name of
        another value in the same memory."""
        for saved in op.saved:
            name, target = self._where_saved(op, saved, inputs)
            yield self._wide(name, dict(zip(self.site.axes, target, strict=True)))

    def _compute_dtype(self, op: Op) -> str:
        if self.facts.is_narrow(op):
            return self.facts.precision.autocast
        floats = [self.facts.dtypes[n] for n in (*op.outputs, *op.inputs) if n]
        return next(filter(is_float, floats), "float32")

    def _product_dtype(self, op: Op, op_class: OpClass, dtype: str) -> str:
        """What an op of values of a dtype multiplies."""
        products = self.facts.precision.products
        if facts(op.target).scaled:
            return products
        rounds = products == "tf32" and dtype == "float32" and op_class in COMPUTE
        return products if rounds else dtype

    def _kept(self, op: Op, inputs: Sequence[Where]) -> Iterator[SavedTensor]:
        for name in op.saved:
            dtype = self._kept_dtype(op, name)
            storage, target = self._where_saved(op, name, inputs)
            is_copy = storage in op.inputs and (storage, dtype) in self.copied
            yield SavedTensor(
                name, self._saved_key(op, (storage, target), dtype, is_copy), (storage, target),
                self.local.number(storage, dict(zip(self.site.axes, target, strict=True))),
                DTYPE_BYTES[dtype],
            )  # fmt: skip

    def _kept_dtype(self, op: Op, name: str) -> str:
        """In which dtype an op keeps a value: as it reads it, or as it has cast it for products."""
        casts = self.site.run_as.keeps_narrow and facts(op.target).scaled
        if casts and self._tensor(name).kind is not Kind.PARAMETER:
            return self.facts.precision.products
        return self.facts.read_as(op, name)

    def _saved_key(
        self, op: Op, memory: Storage, dtype: str, is_copy: bool
    ) -> SavedKey | None:  # fmt: skip
        """Under autocast every op casts a value again for itself, but for leaves, of which there is
        one copy. Products of 8-bit floats that read one value share what is cast."""
        storage, target = memory
        if dtype == self.facts.dtypes[storage]:
            stays = storage in self.facts.prelude_values or self._is_state(storage, target)
            return None if stays else (storage, dtype, target)
        if is_copy or facts(op.target).scaled:
            return storage, dtype, target
        return f"{storage} for {op.name}", dtype, ()

    def stored(self, name: str, where: Where) -> Storage:
        """The memory that a value looks into where it is placed so; along an axis of one rank it
        lies as it does, whatever an op says."""
        placed = self.placed.get(name, where)
        lies = {axis: (placed if line.size == 1 else where).get(axis, R)
                for axis, line in self.site.axes.items()}  # fmt: skip
        key = name, self.normal(lies)
        return self.storage.get(key, key)

    def _where_saved(self, op: Op, name: str, inputs: Sequence[Where]) -> Storage:
        """The memory that is kept: that of an operand as the op gets it, or of a result."""
        roots = self.facts.roots
        for operand, where in zip(op.inputs, inputs, strict=True):
            if operand == name or roots[operand] == roots[name]:
                return self.stored(operand, where)
        for operand, where in zip(op.inputs, inputs, strict=True):
            # It was traced as a view of what lies so; what has been moved on the way lies anew.
            memory = self.stored(operand, where)
            while self._is_looked_at(memory) and roots[memory[0]] != roots[name]:
                memory = self.looked_at[memory[0]]
            if self._looks_at(memory[0], roots[name]):
                return memory
        return self.stored(name, self.placed.get(name, {}))

    def _is_looked_at(self, memory: Storage) -> bool:
        """Whether a value is a view of another where it lies so, and not what has been moved."""
        name, target = memory
        return name in self.looked_at and target == self.normal(self.placed[name])

    def _looks_at(self, name: str, root: str) -> bool:
        """Whether a value was traced as a view of another, however it lies."""
        while self.facts.roots[name] != root and name in self.looked_at:
            name, _ = self.looked_at[name]
        return self.facts.roots[name] == root

    def _is_state(self, name: str, target: Target) -> bool:
        """Whether it is there anyway: not if its parts have been gathered for the op."""
        kind = self._tensor(name).kind
        return kind is not Kind.ACTIVATION and target == self.normal(self.placed.get(name, {}))

    def _everywhere(self, where: Where) -> Target:
        return tuple(where.get(axis, R) for axis in self.site.axes)

    def normal(self, where: Where) -> Target:
        return tuple(
            R if isinstance(where.get(axis, R), Replicate) else where[axis]
            for axis in self.site.axes
        )
