"""Decisions about inputs: which of their dims hold the batch.

One decision per dim of each input that is as long as the batch or a multiple; 1 makes it a batch
dim, of which an input has one at most. Splits go from inputs to outputs of ops as rules allow; an
op whose inputs are split differently, or that needs split parameters, is not shared. The reward
comes with the last decision: the share of flops and bytes that replicas share, minus one.
"""

from dataclasses import dataclass
from math import log2

import numpy as np

from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.layout.layout import Shard
from meshwright.planner.inside.data_layout import is_state
from meshwright.planner.inside.factors import AxisKind, allowed, shard_of, split_of
from meshwright.planner.inside.segments import aliases, segments
from meshwright.planner.searchers.dqn.decisions import WORST, Offered, Pruning, nothing


@dataclass(frozen=True, slots=True)
class InputDim:
    """One that may hold the batch."""

    name: str
    dim: int


class BatchDims:
    """Of one graph; see the module."""

    context_names: tuple[str, ...] = (
        "dims decided, share", "batch dims, share", "work that replicas share so far",
        "log2 batch / 12",
    )  # fmt: skip
    option_names: tuple[str, ...] = (
        "is a batch dim", "number of the dim / 4", "dims of the input / 4",
        "work that replicas share if it alone is one", "log2 of its length over the batch, / 8",
    )  # fmt: skip
    context_size, option_size, most_options = len(context_names), len(option_names), 2

    def __init__(self, graph: Graph, pruning: Pruning) -> None:
        self.graph, self.pruning = graph, pruning
        self.segments, self.alias = segments(graph), aliases(graph)
        self.ops = [op for segment in self.segments for op in segment.ops]
        self.rules = {name: rule for s in self.segments for name, rule in s.rules.items()}
        self.axis = AxisKind(1, graph.batch_size)
        self.dims = tuple(
            InputDim(name, dim)
            for name in graph.inputs
            for dim, size in enumerate(graph.tensors[name].shape)
            if graph.batch_size > 1 and size % graph.batch_size == 0
        )
        self.shares: dict[frozenset[InputDim], float] = {}
        self.bits: list[int] = []

    def restart(self) -> None:
        self.bits = []

    def offered(self) -> Offered:
        at = len(self.bits)
        if at == len(self.dims):
            return nothing(self)
        context = [at / len(self.dims), sum(self.bits) / len(self.dims), self.share(self.taken),
                   log2(self.graph.batch_size) / 12]  # fmt: skip
        legal = [True, not self.pruning.linkage or not self._is_taken(at)]
        options = [self._features(at, option) for option in range(2)]
        return Offered(
            np.array(context, np.float32), np.array(options, np.float32), np.array(legal, np.bool_)
        )

    def take(self, option: int) -> tuple[float, bool]:
        if option and self._is_taken(len(self.bits)):
            return WORST, True
        self.bits.append(option)
        if len(self.bits) < len(self.dims):
            return 0.0, False
        return self.share(self.taken) - 1.0, True

    @property
    def taken(self) -> frozenset[InputDim]:
        """Batch dims so far."""
        return frozenset(d for d, bit in zip(self.dims, self.bits, strict=False) if bit)

    def _is_taken(self, at: int) -> bool:
        return any(dim.name == self.dims[at].name for dim in self.taken)

    def _features(self, at: int, option: int) -> list[float]:
        own = self.dims[at]
        tensor = self.graph.tensors[own.name]
        alone = self.share(frozenset({own})) if option else 0.0
        return [float(option), own.dim / 4, len(tensor.shape) / 4, alone,
                log2(tensor.shape[own.dim] / self.graph.batch_size + 1) / 8]  # fmt: skip

    def share(self, taken: frozenset[InputDim]) -> float:
        """Of the step's flops and bytes, what replicas share if these dims hold the batch."""
        if taken not in self.shares:
            self.shares[taken] = self._share(taken)
        return self.shares[taken]

    def _share(self, taken: frozenset[InputDim]) -> float:
        placed = {self.alias(item.name): Shard(item.dim) for item in taken}
        whole = sum(map(self._work, self.ops))
        return sum(self._work(op) for op in self.ops if self._passes(op, placed)) / max(whole, 1.0)

    def _passes(self, op: Op, placed: dict[str, Shard]) -> bool:
        """Whether an op may be split as its inputs are; what it makes is then placed, too."""
        rule = self.rules[op.name]
        if rule is None:
            return False
        sides = [(self.alias(n), dims) for n, dims in zip(op.inputs, rule.inputs, strict=True)]
        found = {split_of(rule, d, placed[n], self.axis) for n, d in sides if n in placed}
        split = found.pop() if len(found) == 1 else None
        if split is None or not allowed(op, rule, split, self.axis, {}):
            return False
        if any(
            is_state(self.graph, name) and shard_of(rule, dims, split, self.axis)
            for name, dims in zip(op.inputs, rule.inputs, strict=True)
        ):
            return False  # replicas have whole parameters
        for name, dims in zip(op.outputs, rule.outputs, strict=True):
            shard = shard_of(rule, dims, split, self.axis)
            if name and shard:
                placed.setdefault(self.alias(name), shard)
        return True

    def _work(self, op: Op) -> float:
        return op.flops + sum(self.graph.tensors[name].nbytes for name in op.outputs if name)
