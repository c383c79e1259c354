"""Ops that only rearrange: a factor of the input is a factor of the output somewhere else."""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import NO_FLOPS, OpFacts, named
from meshwright.ir.graph.op_forms import sized_as, split_dim, with_size
from meshwright.ir.graph.op_site import Form, In, OpSite, Value
from meshwright.ir.graph.rules import (
    Rule,
    dim_of,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
)


def _permuted(op: Op, graph: Graph, order: Sequence[int]) -> Rule:
    dims = letters("d", len(order))
    return make_rule(op, graph, [dims], [tuple(dims[i] for i in order)], linear=[{0}])


def _permute(op: Op, graph: Graph) -> Rule:
    order = given(op, "dims")
    assert isinstance(order, tuple)
    return _permuted(op, graph, [int(str(i)) % len(order) for i in order])


def _swap(op: Op, graph: Graph) -> Rule:
    """transpose, swapaxes, t, mT: two dims change places."""
    rank = len(input_shapes(op, graph)[0])
    order = list(range(rank))
    if rank >= 2:
        first = dim_of(op, rank, "dim0", dim_of(op, rank, "axis0", -2))
        second = dim_of(op, rank, "dim1", dim_of(op, rank, "axis1", -1))
        order[first], order[second] = order[second], order[first]
    return _permuted(op, graph, order)


def _expand(op: Op, graph: Graph) -> Rule:
    """Dims of size 1 become a factor that only the output has."""
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    out = letters("d", len(target))
    own = out[len(out) - len(source) :]
    rest = [letters(f"r{i}_", len(s)) for i, s in enumerate(input_shapes(op, graph)[1:])]
    unread = [f for dims in rest for d in dims for f in d]
    return make_rule(op, graph, [own, *rest], [out], joined=unread, linear=[{0}])


def _broadcast(op: Op, graph: Graph) -> Rule:
    """Every input expanded to the shape of all."""
    dims = letters("d", len(output_shapes(op, graph)[0]))
    inputs = [dims[len(dims) - len(s) :] for s in input_shapes(op, graph)]
    outputs = [dims] * len(op.outputs)
    return make_rule(op, graph, inputs, outputs, linear=[set(range(len(inputs)))])


def _repeat(op: Op, graph: Graph) -> Rule:
    """A copy after the other: the size is the minor factor; the number of copies stays whole."""
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    lead = len(target) - len(source)
    padded = (1,) * lead + source
    copies = {f"c{i}": t // s for i, (s, t) in enumerate(zip(padded, target, strict=True))}
    sizes = copies | {f"d{i}": s for i, s in enumerate(padded)}
    out = tuple(
        (f"c{i}",) * (copies[f"c{i}"] > 1) + (f"d{i}",) * (s > 1) for i, s in enumerate(padded)
    )
    inside = letters("d", len(target))[lead:]
    return make_rule(op, graph, [inside], [out], sizes=sizes, whole=copies, linear=[{0}])


def _repeat_interleave(op: Op, graph: Graph) -> Rule | None:
    """Each element several times: the copies are the minor factor."""
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    if op.target != "aten.repeat_interleave.self_int" or given(op, "dim") is None:
        return None
    at = dim_of(op, len(source))
    dims = letters("d", len(source))
    sizes = {"c": target[at] // source[at], f"d{at}": source[at]}
    both = (f"d{at}",) * (source[at] > 1) + ("c",) * (sizes["c"] > 1)
    out = (*dims[:at], both, *dims[at + 1 :])
    return make_rule(op, graph, [dims], [out], sizes=sizes, whole=["c"], linear=[{0}])


def _same_but(op: Op, graph: Graph, dims: set[int]) -> Rule:
    """Input and outputs agree in all dims but these, which stay whole."""
    rank = len(input_shapes(op, graph)[0])
    inside = tuple((f"w{i}",) if i in dims else (f"d{i}",) for i in range(rank))
    outs = [
        tuple((f"o{k}_{i}",) if i in dims else (f"d{i}",) for i in range(rank))
        for k in range(len(op.outputs))
    ]
    whole = {f for side in (inside, *outs) for d in side for f in d if f[0] in "wo"}
    return make_rule(op, graph, [inside], outs, whole=whole, linear=[{0}])


def _slice(op: Op, graph: Graph) -> Rule:
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    return _same_but(op, graph, {i for i, n in enumerate(source) if n != target[i]})


def _select(op: Op, graph: Graph) -> Rule:
    rank = len(input_shapes(op, graph)[0])
    at = dim_of(op, rank)
    dims = letters("d", rank)
    outs = [(*dims[:at], *dims[at + 1 :])] * len(op.outputs)
    return make_rule(op, graph, [dims], outs, whole=dims[at], linear=[{0}])


def _split(op: Op, graph: Graph) -> Rule:
    """Equal parts are a major factor of their number; unequal ones keep the dim whole."""
    source = input_shapes(op, graph)[0]
    at = dim_of(op, len(source))
    parts = [shape[at] for shape in output_shapes(op, graph)]
    if len(set(parts)) > 1:
        return _same_but(op, graph, {at})
    dims = letters("d", len(source))
    inside = (
        *dims[:at],
        ("parts",) * (len(parts) > 1) + (f"d{at}",) * (parts[0] > 1),
        *dims[at + 1 :],
    )
    sizes = {"parts": len(parts), f"d{at}": parts[0]}
    outs = [dims] * len(parts)
    return make_rule(op, graph, [inside], outs, sizes=sizes, whole=["parts"], linear=[{0}])


def _cat(op: Op, graph: Graph) -> Rule | None:
    """The reverse of a split."""
    shapes = input_shapes(op, graph)
    target = output_shapes(op, graph)[0]
    if any(len(shape) != len(target) for shape in shapes):
        return None
    at = dim_of(op, len(target))
    parts = [shape[at] for shape in shapes]
    dims = letters("d", len(target))
    every = [set(range(len(shapes)))]
    if len(set(parts)) == 1:
        out = (
            *dims[:at],
            ("parts",) * (len(parts) > 1) + (f"d{at}",) * (parts[0] > 1),
            *dims[at + 1 :],
        )
        sizes = {"parts": len(parts), f"d{at}": parts[0]}
        inputs = [dims] * len(parts)
        return make_rule(op, graph, inputs, [out], sizes=sizes, whole=["parts"], linear=every)
    inputs = [(*dims[:at], (f"w{i}",), *dims[at + 1 :]) for i in range(len(parts))]
    whole = {f"d{at}", *(f"w{i}" for i in range(len(parts)))}
    return make_rule(op, graph, inputs, [dims], whole=whole, linear=every)


def _stack(op: Op, graph: Graph) -> Rule:
    target = output_shapes(op, graph)[0]
    at = dim_of(op, len(target))
    out = letters("d", len(target))
    inside = (*out[:at], *out[at + 1 :])
    inputs = [inside] * len(op.inputs)
    return make_rule(op, graph, inputs, [out], whole=out[at], linear=[set(range(len(inputs)))])


def _scatter_part(op: Op, graph: Graph) -> Rule:
    """slice_scatter, select_scatter: a part along one dim is replaced; the others agree."""
    target, part = input_shapes(op, graph)
    at = dim_of(op, len(target))
    dims = letters("d", len(target))
    inside = (*dims[:at], ("w",), *dims[at + 1 :]) if len(part) == len(target) else None
    if inside and part[at] == target[at]:
        inside = dims
    inputs = [dims, inside or (*dims[:at], *dims[at + 1 :])]
    return make_rule(op, graph, inputs, [dims], whole={"w", f"d{at}"}, linear=[{0, 1}])


def _pad(op: Op, graph: Graph) -> Rule:
    """Padding with zeros is linear; with anything else it is not."""
    source, target = input_shapes(op, graph)[0], output_shapes(op, graph)[0]
    amounts = given(op, "pad", given(op, "padding"))
    assert isinstance(amounts, tuple)
    touched = {len(source) - 1 - i // 2 for i, n in enumerate(amounts) if n != 0}
    found = _same_but(op, graph, touched | {i for i, n in enumerate(source) if n != target[i]})
    zeros = not given(op, "value", 0) and given(op, "mode", "constant") == "constant"
    return found if zeros else make_rule(
        op, graph, found.inputs, found.outputs, whole=set(found.sizes) - found.split
    )  # fmt: skip


def _moved(op: Op, graph: Graph) -> Rule | None:
    """roll, flip, tril, triu: the dims they work along stay whole."""
    rank = len(input_shapes(op, graph)[0])
    dims = given(op, "dims", (-2, -1))
    if not isinstance(dims, tuple) or not dims:
        return None
    touched = {int(str(d)) % rank for d in dims}
    return _same_but(op, graph, touched)


def _pairs(op: Op, graph: Graph) -> Rule:
    """view_as_complex and view_as_real: the pair of reals is one more dim at the end."""
    ranks = [len(s) for s in (*input_shapes(op, graph), *output_shapes(op, graph))]
    dims = letters("d", max(ranks))
    return make_rule(
        op, graph, [dims[: ranks[0]]], [dims[: ranks[1]]], whole=dims[-1], linear=[{0}]
    )


def _parts(site: OpSite, form: Form) -> Form:
    dim = split_dim(site)
    if dim is None:
        return form
    sizes = tuple(site.local_output(i)[dim] for i in range(len(site.op.outputs)))
    args: tuple[tuple[str, Value], ...] = (("self", In(0)), ("split_sizes", sizes), ("dim", dim))
    return replace(form, target="aten.split_with_sizes.default", args=args)


def _taken(site: OpSite, form: Form) -> Form:
    dim = split_dim(site)
    if dim is None:
        return form
    if site.input(0).shape[dim] != site.tensors[site.op.outputs[0]].shape[dim]:
        raise PlanError(f"{site.op.key}: {site.op.target} takes part of dim {dim}, which is split")
    return form.having(start=0, end=site.local_output()[dim])


def _narrowed(site: OpSite, form: Form) -> Form:
    dim = split_dim(site)
    return form if dim is None else form.having(length=site.local_output()[dim])


def _repeated(site: OpSite, form: Form) -> Form:
    return form.having(output_size=None)


_MOVED = OpFacts(flops=NO_FLOPS)
_COPY = replace(_MOVED, op_class=OpClass.COPY)
_VIEW = replace(_MOVED, op_class=OpClass.VIEW)
_STRIDED = replace(_VIEW, shares="strided")
_EXPAND = replace(_STRIDED, rule=_expand)
_CUT = replace(_STRIDED, rule=_split, form=_parts)
_SIZED = with_size("size")
FACTS = {
    **named("permute", replace(_STRIDED, rule=_permute)),
    **named("transpose t", replace(_STRIDED, rule=_swap)),
    **named("swapaxes mT", replace(_STRIDED, rule=_swap, flops=None)),
    **named("numpy_T", replace(_VIEW, rule=_swap)),
    **named("expand", replace(_EXPAND, form=_SIZED)),
    **named("broadcast_to", replace(_EXPAND, flops=None, form=_SIZED)),
    **named(
        "expand_as", replace(_EXPAND, flops=None, form=sized_as("aten.expand.default", "size"))
    ),
    **named("expand_copy", OpFacts(rule=_expand, form=_SIZED)),
    **named("broadcast_tensors", OpFacts(rule=_broadcast)),
    **named("swapdims", OpFacts(rule=_swap)),
    **named("slice", replace(_STRIDED, rule=_slice, form=_taken)),
    **named("narrow", replace(_VIEW, rule=_slice, form=_narrowed)),
    **named("select unbind", replace(_STRIDED, rule=_select)),
    **named("split chunk", _CUT),
    **named("split_with_sizes", replace(_CUT, shares="by class")),
    **named("tensor_split", replace(_CUT, shares="by class", flops=None)),
    **named("unsafe_split unsafe_chunk unsafe_split_with_sizes", OpFacts(rule=_split, form=_parts)),
    **named("movedim unfold diagonal", _STRIDED),
    **named("cat", replace(_COPY, rule=_cat, backward="handed on")),
    **named("concat", replace(_COPY, rule=_cat, flops=None, backward="handed on")),
    **named("concatenate", OpFacts(rule=_cat)),
    **named("stack", replace(_COPY, rule=_stack, backward="handed on")),
    **named("repeat", replace(_COPY, rule=_repeat)),
    **named("repeat_interleave", replace(_COPY, rule=_repeat_interleave, form=_repeated)),
    **named("slice_scatter select_scatter", replace(_MOVED, rule=_scatter_part)),
    **named("pad constant_pad_nd", replace(_COPY, rule=_pad)),
    **named("roll flip", replace(_COPY, rule=_moved)),
    **named("tril triu", replace(_COPY, rule=_moved, flops=None)),
    **named("im2col", OpFacts(op_class=OpClass.COPY)),
    **named("view_as_complex view_as_real", OpFacts(rule=_pairs)),
    **named("transpose_ t_ _stack", _MOVED),
}
