"""Cuts a block into regions for torch.compile: what stands between calls that know the mesh.

A region has operators of torch and of ours only, so it is one graph without a break. Calls on
`comm`, and what they return besides tensors, stay as they are between the regions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import getitem, truediv
from typing import Any

import torch
from torch import Tensor, fx, nn

from meshwright.codegen.lower.program import BlockCode
from meshwright.codegen.passes.halves import Halves
from meshwright.codegen.passes.segments import Phase, Phases
from meshwright.ir.torch_modes import is_watched
from meshwright.ir.torch_private import OpOverload

BACKEND = "inductor"
_LEAST_OPS = 2
"""One operator alone gains nothing."""
_VIEWS = frozenset(
    "view reshape transpose permute t unsqueeze squeeze expand slice select split alias detach "
    "getitem unbind chunk narrow".split()
)
_UNKNOWN = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
"""Of operators whose results have shapes that only a run tells."""


class Region(nn.Module):
    """A part of a block, compiled when it first runs: once with a graph and once without, for the
    shapes of a micro-batch. Torch raises where it would have to compile without end. Where tensors
    are counted, or fake, operators run one by one."""

    def __init__(self, code: fx.GraphModule) -> None:
        super().__init__()
        self.code = code
        self._run: list[Callable[..., Any]] = []

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        if is_watched():
            plain: Tensor | tuple[Tensor, ...] = self.code(*tensors)
            return plain
        if not self._run:
            made = torch.compile(self.code, backend=BACKEND, fullgraph=True, dynamic=False)
            self._run.append(made)
        found: Tensor | tuple[Tensor, ...] = self._run[0](*tensors)
        return found


def compiled(code: BlockCode) -> BlockCode:
    """The block with regions in place of runs of operators; blocks that share code share them."""
    if code.halves is not None:
        return replace(code, halves=_halves(code.halves))
    return replace(code, module=in_regions(code.module, "part"))


def _halves(halves: Halves) -> Halves:
    cuts = (_cut(cut, number) for number, cut in enumerate(halves.cuts, 1))
    return replace(halves, cuts=tuple(cuts))


def _cut(cut: Phases, half: int) -> Phases:
    phases = (_phase(phase, f"half{half}_{number}") for number, phase in enumerate(cut.phases))
    return replace(cut, phases=tuple(phases))


def _phase(phase: Phase, name: str) -> Phase:
    beside = phase.beside and _phase(phase.beside, f"{name}_beside")
    return replace(phase, code=in_regions(phase.code, f"{name}_part"), beside=beside)


def in_regions(module: fx.GraphModule, name: str) -> fx.GraphModule:
    """The module with each region as a submodule, `name` with a number."""
    nodes = list(module.graph.nodes)
    root, graph = nn.Module(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op == "placeholder":
            copies[node] = graph.node_copy(node)
    count = 0
    for run in _runs(nodes):
        if sum(map(_works, run)) < _LEAST_OPS:
            for node in run:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        count += 1
        _put(graph, root, f"{name}{count}", run, copies)
    graph.node_copy(nodes[-1], copies.__getitem__)
    graph.lint()
    return fx.GraphModule(root, graph)


def _runs(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Regions and, one by one, what lies between. A call that reads nothing of the region before it
    goes ahead of it, unless something is changed in place."""
    fixed = any(_in_place(node) for node in nodes)
    region: list[fx.Node] = []
    plain: set[fx.Node] = set()
    """What other than tensors calls have returned."""
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _is_plain(node):
            plain.add(node)
        if _compiles(node) and plain.isdisjoint((node, *node.all_input_nodes)):
            region.append(node)
            continue
        if region and (fixed or not set(region).isdisjoint(node.all_input_nodes)):
            yield region
            region = []
        yield [node]
    if region:
        yield region


def _is_plain(node: fx.Node) -> bool:
    """Whether it is a device, or one of several results of a call on `comm`."""
    if node.target is getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return not isinstance(source.target, OpOverload)
    return node.target is getattr


def _compiles(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return _UNKNOWN.isdisjoint(node.target.tags)
    return node.target in (getitem, truediv)


def _works(node: fx.Node) -> bool:
    """Whether it computes, on tensors that come from elsewhere or not."""
    if not isinstance(node.target, OpOverload):
        return node.target is truediv
    return node.target.overloadpacket.__name__ not in _VIEWS


def _in_place(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _put(
    graph: fx.Graph,
    root: nn.Module,
    name: str,
    run: Sequence[fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> None:
    """Adds a region, and what others read of it."""
    inside = set(run)
    reads = list(dict.fromkeys(n for x in run for n in x.all_input_nodes if n not in inside))
    made = [n for n in run if not inside.issuperset(n.users)]
    part = fx.Graph()
    own = {n: part.placeholder(n.name) for n in reads}
    for node in run:
        own[node] = part.node_copy(node, own.__getitem__)
    results = tuple(own[n] for n in made)
    part.output(results if len(results) > 1 else results[0])
    root.add_module(name, Region(fx.GraphModule(nn.Module(), part)))
    whole = graph.call_module(name, tuple(copies[n] for n in reads))
    for i, node in enumerate(made):
        copies[node] = graph.call_function(getitem, (whole, i)) if len(made) > 1 else whole
