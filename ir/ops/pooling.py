"""Pooling, and windows that slide over space: samples, channels and space may be split.

Where space is split, the ranks exchange what windows read beyond their parts.
"""

from dataclasses import replace

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import OpFacts, named
from meshwright.ir.graph.op_forms import only_axis, run_sizes, splitting
from meshwright.ir.graph.op_site import Form, In, OpSite, Value
from meshwright.ir.graph.rules import Rule, input_shapes, letters, make_rule, output_shapes
from meshwright.ir.graph.windows import Span, Window, sent, spans, windows
from meshwright.ir.layout.layout import Shard, Strategy, balanced
from meshwright.ir.layout.op_messages import SHIFT, Inner, Operands


def _pool(op: Op, graph: Graph) -> Rule:
    """All outputs (values, indices) keep samples and channels."""
    x, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    lead = len(x) - (1 if "1d" in op.target else 3 if "3d" in op.target else 2)
    dims = letters("d", lead)
    inside = (*dims, *letters("x", len(x) - lead))
    out = (*dims, *letters("y", len(target) - lead))
    whole = {f for d in (*inside[lead:], *out[lead:]) for f in d}
    linear = [{0}] if "avg" in op.target else []
    halos = halos_of(op, graph)
    return make_rule(
        op, graph, [inside], [out] * len(op.outputs), whole=whole, linear=linear, plain=halos,
        together=halos,
    )  # fmt: skip


def halos_of(op: Op, graph: Graph) -> dict[str, tuple[str, ...]]:
    """Dims of space that may be split, with those of the output."""
    found = windows(op, input_shapes(op, graph), output_shapes(op, graph)[0])
    return {f"halo{i}": (f"x{i}", f"y{i}") for i, window in enumerate(found) if window}


def with_borders(site: OpSite, form: Form) -> Form:
    shapes = [site.input(i).shape for i in range(len(site.op.inputs))]
    output = site.tensors[site.op.outputs[0]].shape
    found = windows(site.op, shapes, output)
    lead = len(shapes[0]) - len(found)
    dims = range(lead, len(shapes[0]))
    split = {dim: axes for dim in dims if (axes := splitting(site, 0, dim))}
    if not split:
        return form
    halos, paddings = [], [0 if w is None else w.padding for w in found]
    for dim, axes in split.items():
        window, axis = found[dim - lead], only_axis(site, dim, axes)
        if window is None:
            raise PlanError(f"{site.op.key}: dim {dim} cannot be split: averages at its end differ")
        halos.append(_halo(site, axis, dim, window))
        paddings[dim - lead] = 0
    return _with_halos(form, tuple(halos), tuple(paddings))


def _halo(site: OpSite, axis: str, dim: int, window: Window) -> tuple[Value, ...]:
    """Axis, dim, what each rank holds, what it reads."""
    holds, makes = site.input_layout(0)[axis], site.output_layout(0)[axis]
    if not isinstance(holds, Shard) or makes != Shard(dim, 1, getattr(makes, "inner", 1)):
        raise PlanError(f"{site.op.key} on {axis}: {holds} gives S({dim}), not {makes}")
    size, made = site.input(0).shape[dim], site.tensors[site.op.outputs[0]].shape[dim]
    sizes = run_sizes(site, axis, size, holds)
    needed = tuple(window.reads(*span) for span in spans(run_sizes(site, axis, made, makes)))
    return (axis, dim, sizes, needed)


def _with_halos(form: Form, halos: tuple[Value, ...], paddings: tuple[int, ...]) -> Form:
    target, name = form.target, form.args[0][0]
    if form.arg("padding") is not None:
        form = form.having(padding=paddings)
    extra: dict[str, Value] = {"target": target.replace(".padding", ".default"), "name": name}
    extra |= {"halos": halos, "fill": -float("inf") if "max_pool" in target else 0.0}
    assert isinstance(form.arg(name), In)
    return replace(form, args=(*extra.items(), *form.args), target="sharded.windowed")


def _messages(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> tuple[Inner, ...]:
    """Rows at the borders of the parts go to the neighbours, their gradients come back."""
    image, placed = inputs[0], strategy.inputs[0]
    needed = _reads(op, placed.dim, ranks, inputs, outputs) if isinstance(placed, Shard) else ()
    if not needed or not isinstance(placed, Shard):
        return ()
    held = spans(balanced(image.shape[placed.dim], ranks))
    rows = sent(held, needed), sent(needed, held)
    row = image.nbytes // image.shape[placed.dim]
    return tuple(Inner(SHIFT, row * n, 1, b) for n, b in zip(rows, (False, True), strict=True) if n)


def _copies(
    op: Op, strategy: Strategy, ranks: int, inputs: Operands, outputs: Operands
) -> dict[int, int]:
    placed = strategy.inputs[0]
    if not isinstance(placed, Shard):
        return {}
    needed = _reads(op, placed.dim, ranks, inputs, outputs)
    longest = max(stop - start for start, stop in needed)
    return {0: inputs[0].nbytes // inputs[0].shape[placed.dim] * longest}


def _reads(op: Op, dim: int, ranks: int, inputs: Operands, outputs: Operands) -> tuple[Span, ...]:
    """What each rank reads of a dim of the input; nothing if no windows slide over it."""
    found = windows(op, [i.shape for i in inputs], outputs[0].shape)
    lead = len(inputs[0].shape) - len(found)
    window = found[dim - lead] if dim >= lead else None
    if window is None:
        return ()
    return tuple(window.reads(*s) for s in spans(balanced(outputs[0].shape[dim], ranks)))


SLIDING = OpFacts(form=with_borders, messages=_messages, copies=_copies)
"""Of windows that reach over the border of a rank's part."""
_POOL = OpFacts(rule=_pool)
_REDUCED = replace(_POOL, op_class=OpClass.REDUCTION)
FACTS = {
    **named(
        "max_pool1d max_pool2d avg_pool1d avg_pool2d",
        replace(
            SLIDING,
            rule=_pool,
            op_class=OpClass.REDUCTION,
        ),
    ),
    **named("max_pool3d avg_pool3d", replace(SLIDING, rule=_pool)),
    **named("max_pool2d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d", _REDUCED),
    **named(
        "adaptive_avg_pool3d adaptive_max_pool2d _adaptive_avg_pool2d upsample_nearest2d "
        "upsample_bilinear2d",
        _POOL,
    ),
}
