"""Ops whose form depends on how their operands are split: `codegen.sharded.sharded` says what they
do."""

from dataclasses import replace
from keyword import iskeyword

from meshwright.codegen.lower.shape_forms import Rule
from meshwright.codegen.lower.site import Form, In, OpSite, Value
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.layout import Shard, local_shape
from meshwright.ir.layout.nesting import dim_runs, local_split, splits_of


def _sharded(form: Form, target: str, /, **extra: Value) -> Form:
    """The call of a function of `codegen.sharded.sharded`; a name that Python keeps for itself,
    such as `from`, gets an underscore."""
    named = tuple((f"{n}_" if iskeyword(n) else n, v) for n, v in form.having(**extra).args)
    return replace(form, args=named, target=f"sharded.{target}")


def _without(form: Form, *names: str) -> Form:
    return replace(form, args=tuple((n, v) for n, v in form.args if n not in names))


def _index_of(form: Form, name: str) -> int:
    value = form.arg(name)
    assert isinstance(value, In), name
    return value.index


def _own(site: OpSite, index: int, dim: int) -> dict[str, Value]:
    """Which axes split this dim of an input, and which elements of it the rank has; or nothing."""
    splits = splits_of(site.input_layout(index), site.axes).get(dim, {})
    if not splits:
        return {}
    runs = dim_runs(site.input(index).shape[dim], splits, site.coordinates)
    if len(runs) > 1:
        texts = ", ".join(f"{shard} on {axis}" for axis, (shard, _) in splits.items())
        raise PlanError(f"{site.op.key}: {texts} gives a rank of input {index} several sections")
    start, size = runs[0] if runs else (0, 0)
    return {"axes": tuple(splits), "start": start, "size": size}


def _embedding(site: OpSite, form: Form) -> Form:
    rows = _own(site, _index_of(form, "weight"), 0)
    return _sharded(form, "embedding", **rows) if rows else form


def _embedding_bag(site: OpSite, form: Form) -> Form:
    rows = _own(site, _index_of(form, "weight"), 0)
    offsets = _index_of(form, "offsets")
    if not rows and site.local_input(offsets) == site.input(offsets).shape:
        return form
    mode, padding = form.arg("mode"), form.arg("padding_idx")
    if rows and (mode not in (0, 1) or padding not in (None, -1)):
        raise PlanError(f"{site.op.key}: rows are split only for modes sum and mean, no padding")
    form = _without(form, "scale_grad_by_freq", "sparse")
    return _sharded(form, "embedding_bag", **rows)


def _cross_entropy_sum(site: OpSite, form: Form) -> Form:
    own = _own(site, 0, 1)
    if not own:
        return form
    return _sharded(form, "cross_entropy_sum", **own, classes=site.input(0).shape[1])


def _cross_entropy_total(site: OpSite, form: Form) -> Form:
    own = _own(site, 0, 1)
    if not own:
        return form
    return _sharded(form, "cross_entropy_total", **own, classes=site.input(0).shape[1])


def _experts(site: OpSite, form: Form) -> Form:
    own = _own(site, _index_of(form, "gate_up"), 0)
    return _sharded(form, "experts", start=own["start"]) if own else form


def _index(site: OpSite, form: Form) -> Form:
    """Where an indexed dim is split, so is its index, which names positions in the whole."""
    indices = form.arg("indices")
    assert isinstance(indices, tuple)
    starts, steps = [0] * len(indices), [0] * len(indices)
    for dim, splits in splits_of(site.input_layout(0), site.axes).items():
        if dim >= len(indices) or indices[dim] is None:
            continue
        size = site.input(0).shape[dim]
        if any(axis.shares for _, axis in splits.values()):
            if len(splits) > 1 or any(shard.outer > 1 for shard, _ in splits.values()):
                raise PlanError(f"{site.op.key}: dim {dim}, which is indexed, has sections")
            steps[dim] = size // next(axis.whole for _, axis in splits.values())
        else:
            starts[dim] = int(str(_own(site, 0, dim)["start"]))
    if not any(starts) and not any(steps):
        return form
    return _sharded(form, "index", starts=tuple(starts), per_sample=tuple(steps))


def _batch_norm(site: OpSite, form: Form) -> Form:
    if form.arg("training") is not True:
        return form
    shape, shards = site.input(0).shape, dict(site.input_shards(0))
    axes = tuple(axis for axis, shard in shards.items() if shard.dim != 1)
    count = 1
    for dim, size in enumerate(shape):
        if dim != 1:
            count *= _in_microbatch(site, shards, dim, size)
    extra: dict[str, Value] = {"axes": axes, "count": count}
    channels = [axis for axis, shard in shards.items() if shard.dim == 1]
    running = form.arg("running_mean")
    if channels and isinstance(running, In) and not site.is_split(running.index, 0):
        extra |= _channels(site, channels)
    return _sharded(_without(form, "training"), "batch_norm", **extra)


def _channels(site: OpSite, axes: list[str]) -> dict[str, Value]:
    split = site.split(axes[0], site.input(0).shape, site.input_layout(0))
    if len(axes) > 1 or split.outer > 1:
        raise PlanError(
            f"{site.op.key}: channels are split over {', '.join(axes)}, but running statistics "
            "are whole; split them alike"
        )
    return {"channel_axis": axes[0], "channels": split.sizes}


def _in_microbatch(site: OpSite, shards: dict[str, Shard], dim: int, size: int) -> int:
    """Elements of a dim that all ranks together hold for one micro-batch."""
    for axis, shard in shards.items():
        along = site.axes[axis]
        if shard.dim == dim and along.shares:
            size = size // along.whole * sum(along.shares)
    return size


def _samples(site: OpSite) -> dict[str, Value]:
    """Where the samples lie in what the op makes, and which other axes split it."""
    layout = site.output_layout(0)
    others = tuple(axis for axis, p in layout.items() if isinstance(p, Shard) and axis != "dp")
    found: dict[str, Value] = {"axes": others} if others else {}
    batch = layout.get("dp")
    if isinstance(batch, Shard):
        split = site.split("dp", site.tensors[site.op.outputs[0]].shape, layout)
        per_sample = split.section // (site.axes["dp"].whole or split.section)
        found |= {"dim": batch.dim, "outer": split.outer, "per_sample": per_sample}
    return found


def _dropout(site: OpSite, form: Form) -> Form:
    if form.arg("train") is not True or not form.arg("p"):
        return form
    return _sharded(_without(form, "train"), "dropout", key=site.op.key, **_samples(site))


def _gelu_dropout(site: OpSite, form: Form) -> Form:
    """With the masks of the dropout that is part of it."""
    key = site.op.key.replace("/bias_gelu_dropout", "/dropout")
    plain = _without(_without(form, "seeds"), *_OF_SAMPLES)
    return _sharded(plain, "gelu_dropout", key=key, **_samples(site))


_OF_SAMPLES = ("dim", "outer", "per_sample")


def _attention(site: OpSite, form: Form) -> Form:
    if not form.arg("dropout_p"):
        return form
    samples = _samples(site)
    if samples.pop("dim", 0) or samples.pop("outer", 1) != 1:
        raise PlanError(f"{site.op.key}: attention with dropout wants the batch in dim 0")
    return _sharded(form, "attention", name=site.op.key, **samples)


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
    plain = _without(form, "like", "dims", "device")
    return replace(_sharded(plain, "noise", **found), whole=True, by_sample=True)


def _each_sample(site: OpSite, form: Form) -> Form:
    cut = [
        name for name, value in form.args
        if isinstance(value, In) and isinstance(site.input_layout(value.index).get("dp"), Shard)
    ]  # fmt: skip
    extra: dict[str, Value] = {
        "target": site.op.target, "op_key": site.op.key, "cut": tuple(cut),
    }  # fmt: skip
    return _sharded(form, "each_sample", **extra, **_rows(site))


def _rows(site: OpSite) -> dict[str, Value]:
    """How many rows each sample has along dim 0."""
    size, batch = site.tensors[site.op.outputs[0]].shape[0], site.axes.get("dp")
    split = isinstance(site.output_layout(0).get("dp"), Shard) and batch and batch.whole
    return {"per_sample": size // batch.whole} if split and batch else {}


def _random(site: OpSite, form: Form) -> Form:
    if "dropout" in dict(form.args) and not (form.arg("train") and form.arg("dropout")):
        return form
    layout = {} if form.whole else site.output_layout(0)
    axes = tuple(axis for axis, p in layout.items() if isinstance(p, Shard))
    extra: dict[str, Value] = {"target": site.op.target, "op_key": site.op.key, "axes": axes}
    return _sharded(form, "seeded", **extra)


RULES: dict[str, Rule] = {
    "aten.embedding": _embedding,
    "aten.embedding_bag": _embedding_bag,
    "meshwright.cross_entropy_sum": _cross_entropy_sum,
    "meshwright.cross_entropy_total": _cross_entropy_total,
    "meshwright.experts": _experts,
    "aten.index": _index,
    "aten.batch_norm": _batch_norm,
    "aten.dropout": _dropout,
    "meshwright.bias_gelu_dropout": _gelu_dropout,
    "aten.dropout_": _dropout,
    "aten.scaled_dot_product_attention": _attention,
    **dict.fromkeys(
        ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu", "aten.randperm",
         "aten.native_dropout"),
        _random,
    ),
    "meshwright.noise": _noise,
    "meshwright.noise_of": _noise,
    "meshwright.drop": lambda site, form: _sharded(form, "drop"),
    "meshwright.random_slope": lambda site, form: _sharded(form, "random_slope"),
    **dict.fromkeys(
        ("aten.poisson", "aten.binomial", "aten._standard_gamma", "aten.multinomial",
         "aten._sample_dirichlet"),
        _each_sample,
    ),
}  # fmt: skip
"""Op (without overload) -> its rule."""
