"""Whether a block can run on the two halves of a micro-batch, and its code for that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import fx

from meshwright.codegen.lower.stage_context import Where
from meshwright.codegen.passes.halves import Halves
from meshwright.codegen.passes.segments import Phases, cut
from meshwright.codegen.passes.travelling import step_by_step
from meshwright.ir.graph.graph import Block
from meshwright.ir.layout.layout import Axis, Layout
from meshwright.ir.layout.samples import halved_dim
from meshwright.ir.plan.sampled import sampled_axes
from meshwright.ir.trace.halving import has_apart


def in_halves(
    at: Where,
    block: Block,
    known: Mapping[str, Layout],
    outputs: Sequence[Layout],
    module: Callable[[Where], fx.GraphModule],
) -> Halves | None:
    """The block on halves that differ by one sample of a rank at most; on all samples together
    where these depend on each other, or there is one, and tokens travel; None where nothing could
    be beside a collective.

    `module`: its code where a rank has other samples.
    """
    if halves := _cut_in_two(at, block, known, outputs, module):
        return halves
    together = module(at)
    return _together(at, block, outputs, together) if step_by_step(together) else None


def in_phases(
    at: Where, block: Block, outputs: Sequence[Layout], module: Callable[[Where], fx.GraphModule]
) -> Halves | None:
    """The block on all its samples, cut where it waits for a collective: something of another
    micro-batch can be beside that. None where it waits for none."""
    together = module(at)
    step_by_step(together)
    return _together(at, block, outputs, together)


def _together(
    at: Where, block: Block, outputs: Sequence[Layout], module: fx.GraphModule
) -> Halves | None:
    found = cut(module, len(block.params))
    shares = at.axes["dp"].shares
    count = shares[at.coordinates["dp"]] if shares else 0
    if not _is_worth(found):
        return None
    none, joins = (None,) * len(block.inputs), (0,) * len(outputs)
    return Halves((found,), (count,), len(block.params), none, joins)


def _cut_in_two(
    at: Where,
    block: Block,
    known: Mapping[str, Layout],
    outputs: Sequence[Layout],
    module: Callable[[Where], fx.GraphModule],
) -> Halves | None:
    layout = at.layout(block.pattern)
    own = sampled_axes(layout) if layout else ()
    ranks = prod([at.axes[axis].size for axis in own])
    shares = at.axes["dp"].shares
    count = shares[at.coordinates["dp"]] // ranks if shares else 0
    splits = [halved_dim(known[name], own) for name in block.inputs]
    joins = [halved_dim(layout, own) for layout in outputs]
    if count < 2 or -1 in splits or any(dim in (-1, None) for dim in joins):
        return None
    if not has_apart(at.graph, block):
        return None
    samples = count - count // 2, count // 2
    halves = [_with_samples(at, n * ranks) for n in samples]
    modules = [module(half) for half in halves]
    if own and not _is_apart(at, block, own, halves[0], modules[0], module):
        return None
    for each in modules:
        step_by_step(each)
    cuts = [cut(each, len(block.params)) for each in modules]
    if not _is_worth(cuts[0]) or not _alike(*cuts):
        return None
    return Halves(
        (cuts[0], cuts[1]), samples, len(block.params), tuple(splits),
        tuple(dim for dim in joins if dim is not None),
    )  # fmt: skip


def _is_apart(
    at: Where,
    block: Block,
    own: Sequence[str],
    half: Where,
    made: fx.GraphModule,
    module: Callable[[Where], fx.GraphModule],
) -> bool:
    """Whether a rank with samples of its own may take half of them: its code is that of any rank
    along these axes, so that nothing counts samples, and nothing but tokens is moved there. (The
    halves of ranks are not the runs of samples that they would have of half a micro-batch.)"""
    params = set(list(made.graph.nodes)[1 : 1 + len(block.params)])
    moves = [n for n in made.graph.nodes if n.op == "call_method"]
    if any(n.args[2] in own and n.args[1] not in params for n in moves):
        return False
    elsewhere = {axis: (at.coordinates[axis] + 1) % at.axes[axis].size for axis in own}
    other = module(replace(half, coordinates={**at.coordinates, **elsewhere}))
    return str(made.graph) == str(other.graph)


def _with_samples(at: Where, samples: int) -> Where:
    line = at.axes["dp"]
    shares = tuple(samples if i == at.coordinates["dp"] else n for i, n in enumerate(line.shares))
    return replace(at, axes={**at.axes, "dp": Axis(line.size, shares, line.whole)})


def _is_worth(found: Phases) -> bool:
    """Whether phases after the first wait for a collective of a model axis, and none for `dp`."""
    moves = [moved for phase in found.phases for moved in phase.moves]
    return bool(moves) and all(moved.axis != "dp" for moved in moves)


def _alike(first: Phases, second: Phases) -> bool:
    """Whether what parameters alone go into is the same in both halves."""
    texts = [str(found.phases[0].code.graph) for found in (first, second)]
    return texts[0] == texts[1] and len(first.phases) == len(second.phases)
