"""A parameter as one rank of a stage has it before data parallelism splits it."""

from dataclasses import dataclass

from meshwright.ir.graph.graph import Kind
from meshwright.ir.layout.nesting import Runs


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter, buffer or constant that a stage reads; whole on `dp` always."""

    name: str
    """Its name in `Graph.tensors`, and in `Call.params`."""
    fqn: str
    kind: Kind
    global_shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    split_on: tuple[str, ...]
    """Model axes whose ranks hold different parts of it; along others they hold copies."""
    runs: tuple[Runs, ...]
    """Which elements of each dim this rank has."""
    sum_over: tuple[str, ...]
    """Model axes on which its gradients are summands: sum them over these once per step."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, length in runs) for runs in self.runs)
