"""What the forms of tensor parallelism send: an MLP h -> 4h -> h on 64 devices.

python -m benchmarks.tensor_volume [-o docs/results/tensor_volume.md]

Forms written by hand, and what the planner chooses on every mesh of 64 devices. Counted from their
layouts by the walk that the cost model prices, which tests compare with what generated code sends.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import torch

from benchmarks.printed import print_page
from meshwright.costmodel.block.block import summary, walk_block
from meshwright.costmodel.block.price_ops import GraphFacts, PricedMove, StageSite
from meshwright.costmodel.comm.comm import Level
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.cluster.device import Link
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Axis
from meshwright.ir.plan.plan import BlockLayout, ModelMesh
from meshwright.ir.precision import precision
from meshwright.ir.presets import device
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.testing import tensor_forms as forms
from meshwright.testing.tensor_forms import Form

DEVICES = 64
SHAPES = ((6144, 3072), (16384, 3072))
"""Tokens and width."""
SAMPLES = 8
PUBLISHED = {"1d": (74.3, 198), "2d": (55.7, 107), "2.5d": (62.8, 85), "3d": (24.8, 54)}
"""Form -> million elements per device, forward and backward, for each of the shapes.

By the papers' formulas (2D: SUMMA; 2.5D: arXiv:2105.14500; 3D: arXiv:2105.14450). SUMMA moves its
operands again for the backward; 1D and 3D keep what they gathered."""
SIZES = {"1d": (64,), "2d": (8, 8), "2.5d": (4, 4, 4), "3d": (4, 4, 4)}
MOVES_AGAIN = ("2d", "2.5d")
_MILLION = 1e6
_ELEMENT_BYTES = 4


def traced(tokens: int, width: int) -> Graph:
    """Three layers without biases on no memory; the middle one is looked at."""
    case = forms.case(batch=SAMPLES, tokens=tokens // SAMPLES, width=width, layers=3, bias=False)
    with torch.device("meta"):
        model = case.model()
        batch = torch.zeros(2, SAMPLES, tokens // SAMPLES, width)
    return trace(model, tuple(batch), None, global_batch_size=SAMPLES)


def cluster() -> Cluster:
    """All devices on one switch, so that every axis is as fast: time follows volume."""
    link = Link(name="switch", bandwidth_bytes_per_s=1e9, latency_s=0.0)
    found = device("v100-16")
    return Cluster(
        name="switch:64", device_types=(found,),
        nodes=(Node(devices=(found.name,) * DEVICES, link=link),),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Volume:
    """Elements that a device receives for one layer, forward and backward, of rings."""

    kept: float
    """Where what was gathered for the forward is kept for the backward, as our runtime does."""
    gathered: float
    """Of these, what the forward gathers."""

    @property
    def again(self) -> float:
        """Where it is not kept, but gathered again."""
        return self.kept + self.gathered


def volume(graph: Graph, block: Block, layout: BlockLayout) -> Volume:
    """Of one block under a layout."""
    sizes = {"dp": 1, **dict(layout.model)}
    axes = {name: Axis(size) for name, size in sizes.items()}
    axes["dp"] = Axis(1, (graph.batch_size,), graph.batch_size)
    machine = cluster()
    link = machine.nodes[0].link
    levels = {name: (Level(size, link),) if size > 1 else () for name, size in sizes.items()}
    site = StageSite(axes, dict.fromkeys(axes, 0), machine.device(0), levels)
    walk = walk_block(GraphFacts.of(graph, precision("fp32"), "cpu"), block, layout, site)
    kept = gathered = 0.0
    for entry in walk.trail:
        if isinstance(entry, PricedMove):
            forward = _received(entry.conversion.forward, entry.nbytes, entry.size)
            kept += forward
            if graph.tensors[entry.name].requires_grad:
                kept += _received(entry.conversion.backward, entry.nbytes, entry.size)
            if entry.conversion.forward is Primitive.ALL_GATHER:
                gathered += forward
    cost = summary(walk, block, layout)
    for nbytes, over in zip(cost.param_bytes, cost.summed_over, strict=True):
        kept += sum(_received(Primitive.ALL_REDUCE, nbytes, sizes[axis]) for axis in over)
    return Volume(kept, gathered)


def _received(primitive: Primitive, nbytes: int, ranks: int) -> float:
    """Elements that each rank receives for a value of so many bytes as if whole on the axis."""
    whole = nbytes / _ELEMENT_BYTES * (ranks - 1) / ranks
    match primitive:
        case Primitive.ALL_REDUCE:
            return 2 * whole
        case Primitive.ALL_GATHER | Primitive.REDUCE_SCATTER:
            return whole
        case Primitive.ALL_TO_ALL:
            return whole / ranks
    return 0.0


def form(name: str) -> Form:
    """A form of `testing.tensor_forms`, whose axes have two ranks there, on all devices."""
    small, sizes = forms.forms()[name], SIZES[name]
    inner = str(sizes[-1])

    def wider(texts: Mapping[str, str]) -> dict[str, str]:
        return {key: text.replace("outer=2", f"outer={inner}") for key, text in texts.items()}

    return replace(
        small,
        mesh=dict(zip(small.mesh, sizes, strict=True)),
        hidden=wider(small.hidden),
        border=wider(small.border),
        stored={key: wider(texts) for key, texts in small.stored.items()},
        outer={axis: sizes[-1] if n > 1 else n for axis, n in small.outer.items()},
    )


def by_hand(graph: Graph, name: str) -> Volume:
    """Of the middle layer in one of the four forms."""
    block = graph.blocks[1]
    layouts = forms.layouts(graph, form(name))
    return volume(graph, block, next(x for x in layouts if x.pattern == block.pattern))


def meshes() -> Iterator[ModelMesh]:
    """All of the devices on one, two or three axes."""
    powers = [2**i for i in range(1, 7)]
    for axes in (("tp",), ("tp_row", "tp_col"), ("tp_depth", "tp_row", "tp_col")):
        for sizes in product(powers, repeat=len(axes)):
            if prod(sizes) == DEVICES:
                yield tuple(zip(axes, sizes, strict=True))


def candidates(graph: Graph) -> Iterator[tuple[float, str, Volume]]:
    """(seconds, mesh, volume) of the middle layer as the planner lays it out, on every mesh; where
    no device stores more of it than in the four forms."""
    problem, block = make_problem(graph, cluster(), precision="fp32"), graph.blocks[1]
    whole = sum(graph.tensors[name].nbytes for name in block.params)
    for model in meshes():
        levels = problem.tables.model_levels(range(DEVICES), model)
        spot = BlockSpot(graph.batch_size, 1, model, problem.tables.device_names[0], (), levels)
        for variant in problem.variants(model):
            layouts = problem.layouts(model, variant)
            layout = next(x for x in layouts if x.pattern == block.pattern)
            cost = problem.tables.block(block, layout, spot)
            if sum(cost.param_bytes) * DEVICES <= whole:
                name = ", ".join(str(size) for _, size in model)
                taken_s = cost.forward_s + cost.backward_s
                yield taken_s, f"[{name}] {variant}".strip(), volume(graph, block, layout)


def chosen(graph: Graph) -> tuple[float, str, Volume]:
    """The fastest of them."""
    return min(candidates(graph), key=lambda found: found[:2])


def rows(tokens: int, width: int, at: int) -> Iterator[str]:
    """Lines of the table for one shape, `at` in `SHAPES`."""
    graph = traced(tokens, width)
    counted = {name: by_hand(graph, name) for name in SIZES}
    for name, found in counted.items():
        mesh = ", ".join(map(str, SIZES[name]))
        published = PUBLISHED[name][at]
        as_published = found.again if name in MOVES_AGAIN else found.kept
        yield (
            f"| {tokens} | {width} | {name} [{mesh}] | {published} | "
            f"{as_published / _MILLION:.1f} | {found.kept / _MILLION:.1f} |"
        )
    _, mesh, ours = chosen(graph)
    yield f"| {tokens} | {width} | planner: {mesh} | | | {ours.kept / _MILLION:.1f} |"


_HEAD = ("tokens", "width", "form", "published", "counted so", "as we run it")
_TEXT = """# Volume of tensor parallelism

2026-11-21, `python -m benchmarks.tensor_volume`, 2-core CPU machine. One layer h -> 4h -> h without
biases on 64 devices, forward and backward: million elements that a device receives, collectives
taken as rings, counted from layouts and the table of conversions.

"""
_NOTES = """
`published`: by the papers' formulas. SUMMA (2D and 2.5D) moves its operands again for the backward,
1D and 3D keep what they gathered: `counted so`. `as we run it`: all keep it. The planner's line is
the fastest of its layouts on every mesh of 64 devices by the cost model, where all links are equal,
that stores no more on a device than the forms do: a 64th. Its name is that of one of the planner's
ways to lay out a mesh.
"""


def report() -> str:
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    for at, (tokens, width) in enumerate(SHAPES):
        lines += rows(tokens, width, at)
    return _TEXT + "\n".join(lines) + "\n" + _NOTES


def main() -> None:
    print_page(__doc__, report)


if __name__ == "__main__":
    main()
