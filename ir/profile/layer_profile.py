"""Per-layer profiles as text: the format of PipeDream's profiler, which DAPPLE's files share.

    node5 -- layer_0 -- forward_compute_time=2.69, backward_compute_time=4.47,
             activation_size=4325376, parameter_size=50384896        (one line; ms and bytes)
        node5 -- node6                                               (an edge)

`activation_size=[a; b]` lists several tensors that leave a layer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import isfinite
from pathlib import Path

from meshwright.ir.errors import PlanError
from meshwright.ir.text.canonical import read_text

_NODE = re.compile(r"\s*(node\d+) -- (.*) -- (\S+=.*)")
_EDGE = re.compile(r"\s*(node\d+)\s+--\s+(node\d+)\s*")
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_PROFILED = re.compile(r"-pbs-(\d+)$")


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One measured layer; times and activations are of one profiled micro-batch."""

    name: str
    """`node5`; unique."""
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: tuple[int, ...]
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class Emitted:
    """A tensor that leaves a layer, and the positions of the layers that read it."""

    nbytes: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class LayerProfile:
    """A graph of measured layers in an order in which they can run."""

    name: str
    layers: tuple[MeasuredLayer, ...]
    edges: tuple[tuple[int, int], ...]
    """(from, to) as positions in `layers`; the edges of one layer in the order of the file."""
    micro_batch: int
    """Samples that the layers were measured with."""

    @property
    def sample_s(self) -> float:
        """Forward and backward of one sample through all layers, one after the other."""
        return sum(x.forward_s + x.backward_s for x in self.layers) / self.micro_batch

    @cached_property
    def emitted(self) -> tuple[tuple[Emitted, ...], ...]:
        """Per layer, the tensors that leave it."""
        readers: list[list[int]] = [[] for _ in self.layers]
        for source, target in self.edges:
            readers[source].append(target)
        return tuple(map(_emitted, self.layers, readers))

    @cached_property
    def reached(self) -> tuple[bool, ...]:
        """Per layer, whether its output depends on a parameter. What does not (inputs, masks) each
        stage has from the batch: it is not sent between stages."""
        found = [layer.parameter_bytes > 0 for layer in self.layers]
        for source, target in sorted(self.edges):
            found[target] |= found[source]
        return tuple(found)

    def cut_bytes(self, position: int) -> int:
        """Bytes that `layers[:position]` send to the rest, of one profiled micro-batch."""
        return sum(
            tensor.nbytes
            for layer, reached in zip(self.emitted[:position], self.reached, strict=False)
            for tensor in layer
            if reached and max(tensor.readers, default=0) >= position
        )


def _emitted(layer: MeasuredLayer, readers: Sequence[int]) -> tuple[Emitted, ...]:
    """Which reader takes what is not in the file.

    As many tensors as readers: one for each, in order, and equal sizes are the same tensor (a cell
    of AmoebaNet lists its output once for each of the next two cells). Otherwise every reader may
    take every tensor.
    """
    if len(readers) != len(layer.activation_bytes):
        return tuple(Emitted(n, tuple(readers)) for n in layer.activation_bytes)
    by_size: dict[int, list[int]] = {}
    for nbytes, reader in zip(layer.activation_bytes, readers, strict=True):
        by_size.setdefault(nbytes, []).append(reader)
    return tuple(Emitted(n, tuple(found)) for n, found in by_size.items())


def read_layer_profile(path: str | Path, micro_batch: int | None = None) -> LayerProfile:
    """The profile in a file; the micro-batch is that of its name (`bert-48-pbs-2`) if not given."""
    path = Path(path)
    profiled = _PROFILED.search(path.stem)
    if micro_batch is None and profiled:
        micro_batch = int(profiled[1])
    if micro_batch is None or micro_batch < 1:
        raise PlanError(
            f"{path.name}: the micro-batch that it was measured with is {micro_batch}; give one of "
            "1 or more, or a file name that ends in -pbs-N"
        )
    return parse_layer_profile(read_text(path), path.stem, micro_batch)


def parse_layer_profile(text: str, name: str, micro_batch: int) -> LayerProfile:
    """The profile that a text describes; PlanError names the line that is wrong."""
    layers: dict[str, MeasuredLayer] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"layer profile {name}, line {number}: "
        if edge := _EDGE.fullmatch(line):
            if (edge[1], edge[2]) in edges:
                raise PlanError(f"{where}edge {edge[1]} -- {edge[2]} appears twice")
            edges[edge[1], edge[2]] = number
        elif node := _NODE.fullmatch(line):
            if node[1] in layers:
                raise PlanError(f"{where}{node[1]} appears twice; names must be unique")
            layers[node[1]] = _layer(node[1], node[2], node[3], where)
        elif line.strip():
            raise PlanError(
                f"{where}{line.strip()[:60]!r} is neither a layer (nodeN -- description -- "
                f"{'=, '.join(_FIELDS)}=) nor an edge (nodeA -- nodeB)"
            )
    if not layers:
        raise PlanError(f"layer profile {name} has no layers; it needs at least one")
    for pair, number in edges.items():
        for end in pair:
            if end not in layers:
                raise PlanError(f"layer profile {name}, line {number}: there is no layer {end}")
    return _ordered(name, layers, list(edges), micro_batch)


def _layer(node: str, description: str, fields: str, where: str) -> MeasuredLayer:
    values = dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,\s]*)", fields))
    if tuple(values) != _FIELDS:
        raise PlanError(f"{where}{node} has the fields {[*values]}; it needs {', '.join(_FIELDS)}")
    sizes = values["activation_size"].strip("[]").split(";")
    return MeasuredLayer(
        name=node,
        description=description.strip(),
        forward_s=_number(values["forward_compute_time"], where) * 1e-3,
        backward_s=_number(values["backward_compute_time"], where) * 1e-3,
        activation_bytes=tuple(round(_number(size, where)) for size in sizes),
        parameter_bytes=round(_number(values["parameter_size"], where)),
    )


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0:
        raise PlanError(f"{where}{text.strip()!r} is not a number of 0 or more")
    return value


def _ordered(
    name: str, layers: Mapping[str, MeasuredLayer], edges: list[tuple[str, str]], micro_batch: int
) -> LayerProfile:
    """The layers in the topological order that takes the lowest node number first."""
    waits = dict.fromkeys(layers, 0)
    after: dict[str, list[str]] = {node: [] for node in layers}
    for source, target in edges:
        waits[target] += 1
        after[source].append(target)
    ready = [(int(node[4:]), node) for node, count in waits.items() if not count]
    heapify(ready)
    order: list[str] = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for target in after[node]:
            waits[target] -= 1
            if not waits[target]:
                heappush(ready, (int(target[4:]), target))
    if len(order) < len(layers):
        stuck = sorted(layers.keys() - set(order), key=lambda node: int(node[4:]))
        raise PlanError(f"layer profile {name}: the edges go in a circle through {stuck[0]}")
    place = {node: i for i, node in enumerate(order)}
    return LayerProfile(
        name=name,
        layers=tuple(layers[node] for node in order),
        edges=tuple((place[source], place[target]) for source, target in edges),
        micro_batch=micro_batch,
    )
