"""Parameters and buffers of the user's module that the training step never reads.

No stage holds them. They go into exports and checkpoints as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.nesting import whole_runs
from meshwright.runtime.checkpoint.boxes import Boxed
from meshwright.runtime.checkpoint.shard_boxes import pieces
from meshwright.runtime.job.weights import model_tensors


@dataclass(eq=False)
class Unread:
    """By module path. Tied ones are there under each of their paths."""

    values: dict[str, Tensor]
    """The user's own tensors, or what a checkpoint had."""
    empty: dict[str, Tensor] = field(default_factory=dict)
    """Those without values: on the meta device."""

    @classmethod
    def of(cls, model: nn.Module, graph: Graph, held_names: Iterable[str]) -> "Unread":
        """`held_names`: what stages hold, by graph tensor name."""
        found = model_tensors(model)
        paths = [graph.tensors[name].fqn for name in held_names]
        held = {id(found[path]) for path in paths if path in found}
        others = {n: x.detach() for n, x in found.items() if id(x) not in held}
        return cls(
            {name: x for name, x in others.items() if not x.is_meta},
            {name: x for name, x in others.items() if x.is_meta},
        )

    def absent(self, names: Iterable[str]) -> list[str]:
        """Those of the paths that have no values."""
        return [name for name in names if name in self.empty]

    def saved(self, names: Iterable[str], writes: bool) -> dict[str, Boxed]:
        """What a checkpoint gets of the paths, by its name there."""
        values = self.values
        return {f"model/{n}": _boxed(values[n], writes) for n in names if n in values}

    def room(self, stored: Mapping[str, object]) -> dict[str, Tensor]:
        """Tensors to be filled, for what a checkpoint has."""
        both = self.values | self.empty
        return {n: _like(x) for n, x in both.items() if f"model/{n}" in stored}

    def fill(self, loaded: Mapping[str, Tensor]) -> None:
        """Takes over what a checkpoint had."""
        self.values |= loaded
        self.empty = {n: x for n, x in self.empty.items() if n not in loaded}


def boxed(values: Mapping[str, Tensor]) -> dict[str, Boxed]:
    """Whole tensors by their name in a checkpoint, to be filled from it."""
    return {f"model/{name}": _boxed(x, False) for name, x in values.items()}


def _boxed(x: Tensor, writes: bool) -> Boxed:
    shape = tuple(x.shape)
    return Boxed(shape, tuple((piece, x) for piece in pieces(whole_runs(shape))), writes)


def _like(x: Tensor) -> Tensor:
    device = "cpu" if x.is_meta else x.device
    return x.new_empty(x.shape, device=device)
