"""Random ops: noise is drawn sample by sample, so it may be split anywhere; what cannot be computed
from noise runs sample by sample, and only samples are split."""

from dataclasses import replace

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import CallPart, OpFacts, named
from meshwright.ir.graph.op_forms import always, numbered, sharded, without
from meshwright.ir.graph.op_site import Form, In, OpSite, Value
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    name_of,
    output_shapes,
)
from meshwright.ir.layout.layout import Shard, local_shape
from meshwright.ir.layout.nesting import local_split
from meshwright.ir.layout.samples import samples_on_dp
from meshwright.ir.ops.pointwise import elementwise


def _of_shape(op: Op, graph: Graph) -> Rule:
    return make_rule(op, graph, [], [letters("d", len(output_shapes(op, graph)[0]))])


def _alike(op: Op, graph: Graph) -> Rule:
    dims = letters("d", len(output_shapes(op, graph)[0]))
    return make_rule(op, graph, [dims, dims], [dims])


def _like(op: Op, graph: Graph) -> Rule:
    """Only the shape of the input counts; behind its first `dims` the noise has dims of size 1."""
    dims = letters("d", len(input_shapes(op, graph)[0]))
    count = int(str(given(op, "dims")))
    unread = [d[0] for d in dims[count:]]
    out: Dims = (*dims[:count], *(() for _ in dims[count:]))
    return make_rule(op, graph, [dims], [out], joined=unread)


def _each(op: Op, graph: Graph) -> Rule | None:
    """Run sample by sample: dim 0 of all they read and make."""
    shapes = (*input_shapes(op, graph), *output_shapes(op, graph))
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        return None
    dims: list[Dims] = [
        (("b",), *letters(f"w{i}_", len(shape) - 1)) for i, shape in enumerate(shapes)
    ]
    if name_of(op) == "multinomial" and len(shapes[0]) == 1:
        return None
    whole = {f for each in dims for d in each[1:] for f in d}
    count = len(op.inputs)
    return make_rule(op, graph, dims[:count], dims[count:], whole=whole, batch="b", plain="b")


def _dropped(site: OpSite, form: Form) -> Form:
    if form.arg("train") is not True or not form.arg("p"):
        return form
    shape = site.tensors[site.op.outputs[0]].shape
    return sharded(without(form, "train"), "dropout", key=site.op.key, **numbered(site, shape))


def _noise(site: OpSite, form: Form) -> Form:
    """Whole but for its samples, also where it is split on model axes."""
    layout = {axis: p for axis, p in site.output_layout(0).items() if axis == "dp"}
    shape = site.tensors[site.op.outputs[0]].shape
    size = local_shape(shape, layout, site.axes, site.coordinates)
    found: dict[str, Value] = {"size": size, "key": site.op.key}
    batch = layout.get("dp")
    if isinstance(batch, Shard):
        split = local_split(shape[batch.dim], "dp", batch, layout, site.axes, site.coordinates)
        per_sample = split.section // (site.axes["dp"].whole or split.section)
        found |= {"dim": batch.dim, "outer": split.outer, "per_sample": per_sample}
    plain = without(form, "like", "dims", "device")
    return replace(sharded(plain, "noise", **found), whole=True, by_sample=True)


def _each_sample(site: OpSite, form: Form) -> Form:
    cut = [
        name for name, value in form.args
        if isinstance(value, In) and isinstance(site.input_layout(value.index).get("dp"), Shard)
    ]  # fmt: skip
    extra: dict[str, Value] = {
        "target": site.op.target, "op_key": site.op.key, "cut": tuple(cut),
    }  # fmt: skip
    return sharded(form, "each_sample", **extra, **_rows(site))


def _rows(site: OpSite) -> dict[str, Value]:
    """How many rows each sample has along dim 0."""
    size, batch = site.tensors[site.op.outputs[0]].shape[0], site.axes.get("dp")
    split = isinstance(site.output_layout(0).get("dp"), Shard) and batch and batch.whole
    if not (split and batch):
        return {}
    before = samples_on_dp(site.output_layout(0), site.axes, site.coordinates).before
    found: dict[str, Value] = {"per_sample": size // batch.whole}
    return found | ({"first": before} if before else {})


def seeded(site: OpSite, form: Form) -> Form:
    if "dropout" in dict(form.args) and not (form.arg("train") and form.arg("dropout")):
        return form
    layout = {} if form.whole else site.output_layout(0)
    axes = tuple(axis for axis, p in layout.items() if isinstance(p, Shard))
    extra: dict[str, Value] = {"target": site.op.target, "op_key": site.op.key, "axes": axes}
    return sharded(form, "seeded", **extra)


_WIDE = 4
"""Bytes of a value in float32."""


def _unscaled(op: Op, part: CallPart) -> int:
    """Of narrow values, what a mask has multiplied is there while that is scaled; others are
    multiplied by both at once."""
    drops = part.device_kind == "cpu" and given(op, "train") and given(op, "p")
    return part.made_bytes * (part.width < _WIDE) if drops else 0


_DRAWN = OpFacts(op_class=OpClass.TRANSCENDENTAL)
_PARTED = OpFacts(rule=_alike)
FACTS = {
    "meshwright.noise": replace(_DRAWN, rule=_like, form=_noise),
    "meshwright.noise_of": replace(_DRAWN, rule=_of_shape, form=_noise),
    "meshwright.drop": replace(_PARTED, form=always("drop")),
    "meshwright.random_slope": replace(_PARTED, form=always("random_slope")),
    **named(
        "dropout",
        replace(
            _DRAWN,
            rule=elementwise(),
            form=_dropped,
            redrawn=True,
            forward_inside=_unscaled,
            inside_to_end=True,
        ),
    ),
    **named("dropout_", OpFacts(rule=elementwise(), form=_dropped, redrawn=True)),
    **named("native_dropout", replace(_DRAWN, form=seeded)),
    **named("bernoulli rand rand_like", _DRAWN),
    **named(
        "poisson binomial _standard_gamma multinomial _sample_dirichlet",
        OpFacts(rule=_each, form=_each_sample),
    ),
}
