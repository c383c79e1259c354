"""Cuts the graph of a block where collectives can be waited for: phases, and what moves between.

A value's phase is the number of conversions behind it. What only parameters go into is made once,
ahead of all phases.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

from torch import Tensor, fx, nn

from meshwright.codegen.collectives.comm import AxisConversion, Comm
from meshwright.codegen.collectives.line import TRAVEL, Narrow, TradedRows
from meshwright.ir.layout.conversions import COMMUNICATES
from meshwright.ir.torch_private import LazyGraphModule

_SENDS = COMMUNICATES | {TRAVEL}


@dataclass(frozen=True, slots=True)
class PhaseValue:
    """A value of a phase, as an argument."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Moved:
    """A conversion between two phases, by the names of what goes in and what comes out; or rows on
    their way to the ranks of their experts, or home."""

    source: str
    made: str
    method: str
    axis: str
    where: tuple[Any, ...]
    more: Mapping[str, Any]

    @property
    def sends_forward(self) -> bool:
        return self.method in _SENDS

    @property
    def sends_backward(self) -> bool:
        return self.more.get("backward") in _SENDS

    def begin(self, comm: Comm, values: Mapping[str, Any]) -> Callable[[], Tensor]:
        """Starts to move its source, one of `values`; what it returns waits for that."""
        x = values[self.source].detach()
        if self.method == TRAVEL:
            return comm.begin_travel(x, self.axis, self._counts(values), narrow=self._is("rows"))
        return comm.begin_forward(self._conversion(comm), x)

    def begin_back(
        self, comm: Comm, values: Mapping[str, Any], gradient: Tensor
    ) -> Callable[[], Tensor]:
        """Starts to move the gradient of what came back."""
        if self.method == TRAVEL:
            back = self._counts(values).back()
            return comm.begin_travel(gradient, self.axis, back, narrow=self._is("gradients"))
        return comm.begin_backward(self._conversion(comm), gradient)

    def _conversion(self, comm: Comm) -> AxisConversion:
        return comm.move(self.method, self.axis, *self.where, **self.more)

    def _is(self, narrow: Narrow) -> bool:
        return self.more.get("narrow") == narrow

    def _counts(self, values: Mapping[str, Any]) -> TradedRows:
        (counts,) = self.where
        found: TradedRows = values[counts.name]
        return found


@dataclass(frozen=True, eq=False)
class Phase:
    """Code that waits for nothing, the conversions after it, and what can go on beside these."""

    code: fx.GraphModule
    """`code(comm, *reads)` gives `made`."""
    reads: tuple[str, ...]
    made: tuple[str, ...]
    moves: tuple[Moved, ...]
    nodes: tuple[fx.Node, ...]
    """Of the block's graph."""
    drops: tuple[str, ...] = ()
    """What phases have made that nothing reads once this one's moves are over."""
    beside: "Phase | None" = None
    """Code that nothing that is moved here depends on, without moves of its own."""


@dataclass(frozen=True, eq=False)
class Phases:
    """A block in phases; `phases[0]` is of what only parameters go into."""

    phases: tuple[Phase, ...]
    arguments: tuple[str, ...]
    """Names of the block's params and inputs."""
    results: tuple[str, ...]
    nodes: Mapping[str, fx.Node]
    """Of the block's graph, by name."""


def cut(module: fx.GraphModule, num_params: int) -> Phases:
    """The phases of a block; its first `num_params` arguments are parameters."""
    nodes = list(module.graph.nodes)
    arguments = [n for n in nodes if n.op == "placeholder"][1:]
    phase = _phases(nodes, set(arguments[:num_params]))
    moves = [n for n in nodes if _is_move(n) and phase[n]]
    last = 1 + max(phase.values())
    needed = _read_elsewhere(nodes, phase, set(moves))
    found = []
    for number in range(last):
        own = [n for n in nodes if phase[n] == number and _computes(n) and n not in moves]
        after = [n for n in moves if phase[n] == number + 1]
        ahead = _behind(after, set(own)) if after and number else set(own)
        first, rest = ([n for n in own if (n in ahead) == is_ahead] for is_ahead in (True, False))
        read = {n for x in rest for n in x.all_input_nodes}
        made = [n for n in first if n in needed or n in read]
        beside = _phase(rest, [n for n in rest if n in needed], ()) if rest else None
        found.append(replace(_phase(first, made, tuple(map(_moved, after))), beside=beside))
    results = tuple(n.name for n in nodes[-1].args[0])
    named = {n.name: n for n in nodes}
    return Phases(_with_drops(found, results), tuple(n.name for n in arguments), results, named)


def _with_drops(phases: Sequence[Phase], results: Sequence[str]) -> tuple[Phase, ...]:
    """What phases have made goes when it has been read, but for numbers of rows, by which gradients
    come back."""
    last: dict[str, int] = {}
    counts: set[str] = set()
    for number, phase in enumerate(phases[1:], 1):
        codes = [phase, *([phase.beside] if phase.beside else [])]
        made = [name for code in codes for name in code.made]
        made += [moved.made for moved in phase.moves]
        last |= dict.fromkeys(made, number)
        last |= {name: number for code in codes for name in code.reads if name in last}
        last |= {moved.source: number for moved in phase.moves if moved.source in last}
        counts |= {x.name for m in phase.moves for x in m.where if isinstance(x, PhaseValue)}
    kept = counts | set(results)
    return tuple(
        replace(phase, drops=tuple(n for n, at in last.items() if at == number and n not in kept))
        for number, phase in enumerate(phases)
    )


def _behind(moves: Sequence[fx.Node], own: set[fx.Node]) -> set[fx.Node]:
    """Those of a phase's nodes that its moves depend on."""
    found: set[fx.Node] = set()
    stack = [read for move in moves for read in move.all_input_nodes]
    while stack:
        node = stack.pop()
        if node in own and node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found | _parts(found, own)


def _parts(made: set[fx.Node], own: set[fx.Node]) -> set[fx.Node]:
    """What takes one of several results of such nodes. It goes with them: what crosses from one
    graph of autograd to another is tensors, and an op is differentiated once, for all it makes."""
    found: set[fx.Node] = set()
    stack = list(made)
    while stack:
        parts = {x for x in stack.pop().users if x.target is getitem and x in own} - found
        found |= parts
        stack += parts
    return found


def _computes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output")


def _is_move(node: fx.Node) -> bool:
    moves = {node.target, node.kwargs.get("backward")}
    return node.op == "call_method" and not moves.isdisjoint(_SENDS)


def _phases(nodes: Sequence[fx.Node], params: set[fx.Node]) -> dict[fx.Node, int]:
    found: dict[fx.Node, int] = {}
    alone = set(params)
    for node in nodes:
        read = [n for n in node.all_input_nodes if n.name != "comm"]
        if read and _computes(node) and alone.issuperset(read):
            alone.add(node)
            found[node] = 0
        else:
            before = max((found[n] for n in read if n not in alone), default=1)
            found[node] = before + _is_move(node)
    return found


def _read_elsewhere(
    nodes: Sequence[fx.Node], phase: Mapping[fx.Node, int], moves: set[fx.Node]
) -> set[fx.Node]:
    """What is read in another phase, moved, or given out."""
    return {
        read
        for node in nodes
        for read in node.all_input_nodes
        if not _computes(node) or node in moves or phase[node] != phase[read]
    }


def _phase(own: Sequence[fx.Node], made: Sequence[fx.Node], moves: tuple[Moved, ...]) -> Phase:
    graph = fx.Graph()
    comm = graph.placeholder("comm")
    inside = set(own)
    reads = dict.fromkeys(n for x in own for n in x.all_input_nodes if n not in inside)
    copies = {n: comm if n.name == "comm" else graph.placeholder(n.name) for n in reads}
    for node in own:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in made))
    code: fx.GraphModule = LazyGraphModule(nn.Module(), graph)
    names = tuple(n.name for n in reads if n.name != "comm")
    return Phase(code, names, tuple(n.name for n in made), moves, tuple(own))


def _moved(node: fx.Node) -> Moved:
    _, source, axis, *where = node.args
    assert isinstance(source, fx.Node)
    given = tuple(PhaseValue(x.name) if isinstance(x, fx.Node) else x for x in where)
    return Moved(source.name, node.name, str(node.target), str(axis), given, node.kwargs)
