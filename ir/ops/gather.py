"""Look-ups by index: the index may be split, the looked-up dim only where rows are summed."""

from dataclasses import replace

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.bags import counts_from_zero, has_given_bags, is_cut
from meshwright.ir.graph.graph import Graph, Op, Ref
from meshwright.ir.graph.op_facts import NO_FLOPS, OpFacts, named
from meshwright.ir.graph.op_forms import index_of, own_part, sharded, without
from meshwright.ir.graph.op_site import Form, OpSite
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    aligned,
    dim_of,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
)
from meshwright.ir.layout.nesting import splits_of
from meshwright.ir.layout.samples import samples_on_dp


def _embedding(op: Op, graph: Graph) -> Rule:
    """weight[v, d], indices[...] -> [..., d]; rows that another rank owns count as zero."""
    index = letters("i", len(input_shapes(op, graph)[1]))
    whole = {"v"} if given(op, "sparse") else set()
    return make_rule(
        op, graph, [(("v",), ("d",)), index], [(*index, ("d",))], plain="v", whole=whole
    )


def _embedding_bag(op: Op, graph: Graph) -> Rule | None:
    """weight[v, d], indices[n], offsets[b] (weights[n]) -> [b, d]: bags of equal length may be
    split, unless gradients are divided by how often the whole batch looks up a row. They are equal
    where the model counts offsets itself, as it does of indices [b, l]. Given ones are so on the
    average, if they are of samples, and each rank gets those of its own."""
    shapes = input_shapes(op, graph)
    if len(shapes) not in (3, 4) or len(shapes[1]) != 1 or given(op, "scale_grad_by_freq"):
        return _whole(op, graph)
    bags = shapes[2][0] - bool(given(op, "include_last_offset"))
    padded = given(op, "padding_idx", -1) not in (None, -1)
    whole = {"v"} if given(op, "mode") == 2 or padded else set()
    outs: list[Dims] = [(("b",), ("d",))]
    for i, shape in enumerate(output_shapes(op, graph)[1:]):
        outs.append(letters(f"o{i}_", len(shape)))
    whole |= {f for dims in outs[1:] for d in dims for f in d}
    scale: list[Dims] = [(("n",),)] * (len(shapes) - 3)
    if has_given_bags(op, graph) and not is_cut(op, graph):
        inputs: list[Dims] = [(("v",), ("d",)), (("n",),), (("k",),), *scale]
        whole |= {"n", "k", "b"}
        return make_rule(op, graph, inputs, outs, plain="v", whole=whole)
    length = shapes[1][0] // bags
    sizes = {"b": bags, "l": length}
    items = (("b",) * (bags > 1) + ("l",) * (length > 1),)
    begins = (("b",) if bags == shapes[2][0] else ("k",),)  # with an end, each rank has its own
    whole.add("k")
    inputs = [(("v",), ("d",)), items, begins, *([items] if scale else [])]
    return make_rule(
        op, graph, inputs, outs, sizes=sizes, plain="v", whole=whole | {"l"}, batch="b"
    )


def _whole(op: Op, graph: Graph) -> Rule:
    """Nothing of it may be split; it is not to be tried, as its indices mean more than rows."""
    shapes = (*input_shapes(op, graph), *output_shapes(op, graph))
    dims = [letters(f"w{i}_", len(shape)) for i, shape in enumerate(shapes)]
    count, every = len(op.inputs), {f for each in dims for d in each for f in d}
    return make_rule(op, graph, dims[:count], dims[count:], whole=every)


def _index(op: Op, graph: Graph) -> Rule | None:
    """x[i, :, j]: the indexed dims stay whole; the dims of the indices come in their place."""
    indices = given(op, "indices")
    assert isinstance(indices, tuple)
    shape, *index_shapes = input_shapes(op, graph)
    if any(graph.tensors[name].dtype == "bool" for name in op.inputs[1:]):
        return None
    at = [i for i, item in enumerate(indices) if isinstance(item, Ref)]
    rank = max(len(s) for s in index_shapes)
    broadcast = letters("i", rank)
    own = {
        i: aligned(broadcast, len(s))[_only_dim(s)]
        for i, s, name in zip(at, index_shapes, op.inputs[1:], strict=True)
        if counts_from_zero(graph, name, shape[i])
    }
    x = tuple(own.get(i, (f"d{i}",)) for i in range(len(shape)))
    joined = at == list(range(at[0], at[0] + len(at)))
    place = at[0] if joined else 0
    kept = [d for i, d in enumerate(x) if i not in at]
    front = sum(1 for i in range(place) if i not in at)
    out = (*kept[:front], *broadcast, *kept[front:])
    inputs = [x, *(aligned(broadcast, len(s)) for s in index_shapes)]
    whole = {x[i][0] for i in at if i not in own}
    plain = {d[0] for d in own.values()}
    return make_rule(op, graph, inputs, [out], whole=whole, plain=plain, linear=[{0}])


def _only_dim(shape: tuple[int, ...]) -> int:
    return max(range(len(shape)), key=lambda i: shape[i])


def _index_select(op: Op, graph: Graph) -> Rule:
    rank = len(input_shapes(op, graph)[0])
    at = dim_of(op, rank)
    x = letters("d", rank)
    index: Dims = (("i",),) if input_shapes(op, graph)[1] else ()
    out = (*x[:at], ("i",), *x[at + 1 :])
    return make_rule(op, graph, [x, index], [out], whole=x[at], linear=[{0}])


def _gather(op: Op, graph: Graph) -> Rule:
    """gather: all dims but the gathered one agree, where index and input are equally long."""
    shape, index = input_shapes(op, graph)[:2]
    at = dim_of(op, len(shape))
    same = [i != at and shape[i] == index[i] for i in range(len(shape))]
    x = tuple((f"d{i}",) if same[i] else (f"x{i}",) for i in range(len(shape)))
    out = tuple((f"d{i}",) if same[i] else (f"o{i}",) for i in range(len(shape)))
    whole = {f for d in x for f in d if f[0] == "x"} | {
        f"o{i}" for i in range(len(shape)) if i != at
    }
    return make_rule(op, graph, [x, out], [out], whole=whole, linear=[{0}])


def _scatter(op: Op, graph: Graph) -> Rule:
    """scatter, scatter_add: dims other than the scattered one agree where all are equally long."""
    shapes = input_shapes(op, graph)
    rank = len(shapes[0])
    at = dim_of(op, rank)
    same = [i != at and len({s[i] for s in shapes if len(s) == rank}) == 1 for i in range(rank)]
    inputs: list[Dims] = []
    for k, shape in enumerate(shapes):
        full = len(shape) == rank
        inputs.append(
            tuple((f"d{i}",) if same[i] else (f"w{k}_{i}",) for i in range(rank)) if full else ()
        )
    out = inputs[0]
    whole = {f for dims in inputs for d in dims for f in d if f[0] == "w"}
    return make_rule(op, graph, inputs, [out], whole=whole)


def _one_hot(op: Op, graph: Graph) -> Rule:
    dims = letters("d", len(input_shapes(op, graph)[0]))
    return make_rule(op, graph, [dims], [(*dims, ("c",))], whole="c")


def _own_rows(site: OpSite, form: Form) -> Form:
    rows = own_part(site, index_of(form, "weight"), 0)
    return sharded(form, "embedding", **rows) if rows else form


def _own_bags(site: OpSite, form: Form) -> Form:
    rows = own_part(site, index_of(form, "weight"), 0)
    offsets = index_of(form, "offsets")
    if not rows and site.local_input(offsets) == site.input(offsets).shape:
        return form
    mode, padding = form.arg("mode"), form.arg("padding_idx")
    if rows and (mode not in (0, 1) or padding not in (None, -1)):
        raise PlanError(f"{site.op.key}: rows are split only for modes sum and mean, no padding")
    form = without(form, "scale_grad_by_freq", "sparse")
    return sharded(form, "embedding_bag", **rows)


def of_rows_here(form: Form, path: str) -> Form:
    """Returns the look-up in a table of which a rank has only some rows; `path`: of its weight."""
    if form.arg("scale_grad_by_freq"):
        raise PlanError(f"{path}: gradients by frequency need all of a bag's table; no sync for it")
    family = "looked_up" if form.target.split(".")[1] == "embedding" else "bags_looked_up"
    return sharded(without(form, "scale_grad_by_freq", "sparse"), family, path=path)


def _shifted(site: OpSite, form: Form) -> Form:
    """Where an indexed dim is split, so is its index, which names positions in the whole."""
    indices = form.arg("indices")
    assert isinstance(indices, tuple)
    starts, steps = [0] * len(indices), [0] * len(indices)
    at = samples_on_dp(site.input_layout(0), site.axes, site.coordinates)
    for dim, splits in splits_of(at.layout, at.axes).items():
        if dim >= len(indices) or indices[dim] is None:
            continue
        size = site.input(0).shape[dim]
        if any(axis.shares for _, axis in splits.values()):
            if len(splits) > 1 or any(shard.outer > 1 for shard, _ in splits.values()):
                raise PlanError(f"{site.op.key}: dim {dim}, which is indexed, has sections")
            steps[dim] = size // next(axis.whole for _, axis in splits.values())
            starts[dim] = at.before * steps[dim]
        else:
            starts[dim] = int(str(own_part(site, 0, dim)["start"]))
    if not any(starts) and not any(steps):
        return form
    return sharded(form, "index", starts=tuple(starts), per_sample=tuple(steps))


_GATHER = OpFacts(op_class=OpClass.GATHER)
_MOVES = replace(_GATHER, flops=NO_FLOPS)
_BAG = replace(_GATHER, rule=_embedding_bag)
_SCATTER = replace(_GATHER, rule=_scatter)
FACTS = {
    **named("embedding", replace(_MOVES, rule=_embedding, form=_own_rows)),
    **named("embedding_bag", replace(_BAG, form=_own_bags, by_batch=True)),
    **named("_embedding_bag", _BAG),
    **named("index", replace(_MOVES, rule=_index, form=_shifted, by_batch=True)),
    **named("index_select", replace(_MOVES, rule=_index_select)),
    **named("gather", replace(_MOVES, rule=_gather)),
    **named("take_along_dim", replace(_GATHER, rule=_gather)),
    **named("scatter scatter_add", _SCATTER),
    **named("scatter_reduce", OpFacts(rule=_scatter)),
    **named("one_hot", replace(_GATHER, rule=_one_hot)),
    **named("index_add index_copy index_put index_put_ take", _GATHER),
}
