"""Ops whose form depends on how their operands are split: `codegen.sharded` says what they do."""

from dataclasses import replace

from meshwright.codegen.shape_forms import Rule
from meshwright.codegen.site import Form, In, Site, Value
from meshwright.ir.errors import PlanError
from meshwright.ir.layout import Shard


def _sharded(form: Form, target: str, **extra: Value) -> Form:
    return replace(form.having(**extra), target=f"sharded.{target}")


def _without(form: Form, *names: str) -> Form:
    return replace(form, args=tuple((n, v) for n, v in form.args if n not in names))


def _index_of(form: Form, name: str) -> int:
    value = form.arg(name)
    assert isinstance(value, In), name
    return value.index


def _split_of(site: Site, index: int, dim: int) -> tuple[str, tuple[int, ...]] | None:
    """The axis that splits this dim of an input, and the elements of each rank."""
    size = site.input(index).shape[dim]
    for axis, shard in site.input_shards(index):
        if shard.dim == dim:
            if shard.outer > 1:
                raise PlanError(f"{site.op.key}: {shard} of input {index} has sections")
            return axis, site.sizes(axis, size, shard)
    return None


def _embedding(site: Site, form: Form) -> Form:
    rows = _split_of(site, _index_of(form, "weight"), 0)
    return _sharded(form, "embedding", axis=rows[0], sizes=rows[1]) if rows else form


def _embedding_bag(site: Site, form: Form) -> Form:
    rows = _split_of(site, _index_of(form, "weight"), 0)
    offsets = _index_of(form, "offsets")
    if not rows and site.local_input(offsets) == site.input(offsets).shape:
        return form
    mode, padding = form.arg("mode"), form.arg("padding_idx")
    if rows and (mode not in (0, 1) or padding not in (None, -1)):
        raise PlanError(f"{site.op.key}: rows are split only for modes sum and mean, no padding")
    form = _without(form, "scale_grad_by_freq", "sparse")
    if not rows:
        return _sharded(form, "embedding_bag")
    return _sharded(form, "embedding_bag", axis=rows[0], sizes=rows[1])


def _cross_entropy_sum(site: Site, form: Form) -> Form:
    classes = _split_of(site, 0, 1)
    return (
        _sharded(form, "cross_entropy_sum", axis=classes[0], sizes=classes[1]) if classes else form
    )


def _experts(site: Site, form: Form) -> Form:
    own = _split_of(site, _index_of(form, "gate_up"), 0)
    return _sharded(form, "experts", axis=own[0], sizes=own[1]) if own else form


def _index(site: Site, form: Form) -> Form:
    """Where an indexed dim is split, so is its index, which names positions in the whole."""
    indices = form.arg("indices")
    assert isinstance(indices, tuple)
    starts, steps = [0] * len(indices), [0] * len(indices)
    for axis, shard in site.input_shards(0):
        if shard.dim >= len(indices) or indices[shard.dim] is None:
            continue
        if shard.outer > 1:
            raise PlanError(f"{site.op.key}: {shard} of an indexed dim has sections")
        size, along = site.input(0).shape[shard.dim], site.axes[axis]
        if along.shares:
            steps[shard.dim] = size // along.whole
        else:
            starts[shard.dim] = sum(site.sizes(axis, size, shard)[: site.coordinates[axis]])
    if not any(starts) and not any(steps):
        return form
    return _sharded(form, "index", starts=tuple(starts), per_sample=tuple(steps))


def _batch_norm(site: Site, form: Form) -> Form:
    if form.arg("training") is not True:
        return form
    shape, shards = site.input(0).shape, dict(site.input_shards(0))
    axes = tuple(axis for axis, shard in shards.items() if shard.dim != 1)
    count = 1
    for dim, size in enumerate(shape):
        if dim != 1:
            count *= _in_microbatch(site, shards, dim, size)
    extra: dict[str, Value] = {"axes": axes, "count": count}
    channels = _split_of(site, 0, 1)
    running = form.arg("running_mean")
    if channels and isinstance(running, In) and not site.is_split(running.index, 0):
        extra |= {"channel_axis": channels[0], "channels": channels[1]}
    return _sharded(_without(form, "training"), "batch_norm", **extra)


def _in_microbatch(site: Site, shards: dict[str, Shard], dim: int, size: int) -> int:
    """Elements of a dim that all ranks together hold for one micro-batch."""
    for axis, shard in shards.items():
        if shard.dim == dim:
            return shard.outer * sum(site.sizes(axis, size, shard))
    return size


def _samples(site: Site, layout: dict[str, object]) -> dict[str, Value]:
    """Where the samples lie in a value, and which other axes split it."""
    axes = tuple(axis for axis, p in layout.items() if isinstance(p, Shard) and axis != "dp")
    found: dict[str, Value] = {"axes": axes} if axes else {}
    return found


def _dropout(site: Site, form: Form) -> Form:
    if form.arg("train") is not True or not form.arg("p"):
        return form
    layout = site.output_layout(0)
    extra: dict[str, Value] = {"key": site.op.key, **_samples(site, dict(layout))}
    batch = layout.get("dp")
    if isinstance(batch, Shard):
        shape = site.tensors[site.op.outputs[0]].shape
        section = shape[batch.dim] // batch.outer
        whole = site.axes["dp"].whole or section
        extra |= {"dim": batch.dim, "outer": batch.outer, "per_sample": section // whole}
    return _sharded(_without(form, "train"), "dropout", **extra)


def _attention(site: Site, form: Form) -> Form:
    if not form.arg("dropout_p"):
        return form
    layout = site.output_layout(0)
    extra: dict[str, Value] = {"name": site.op.key, **_samples(site, dict(layout))}
    batch = layout.get("dp")
    if isinstance(batch, Shard):
        if batch.dim != 0:
            raise PlanError(f"{site.op.key}: attention with dropout wants the batch in dim 0")
        rows = site.tensors[site.op.outputs[0]].shape[0]
        extra["per_sample"] = rows // (site.axes["dp"].whole or rows)
    return _sharded(form, "attention", **extra)


def _random(site: Site, form: Form) -> Form:
    if "dropout" in dict(form.args) and not (form.arg("train") and form.arg("dropout")):
        return form
    axes = tuple(axis for axis, p in site.output_layout(0).items() if isinstance(p, Shard))
    extra: dict[str, Value] = {"target": site.op.target, "op_key": site.op.key, "axes": axes}
    return _sharded(form, "seeded", **extra)


RULES: dict[str, Rule] = {
    "aten.embedding": _embedding,
    "aten.embedding_bag": _embedding_bag,
    "meshwright.cross_entropy_sum": _cross_entropy_sum,
    "meshwright.experts": _experts,
    "aten.index": _index,
    "aten.batch_norm": _batch_norm,
    "aten.dropout": _dropout,
    "aten.dropout_": _dropout,
    "aten.scaled_dot_product_attention": _attention,
    **dict.fromkeys(
        ("aten.lstm", "aten.gru", "aten.bernoulli", "aten.rand", "aten.randn", "aten.randint",
         "aten.randperm", "aten.rand_like", "aten.randn_like", "aten.native_dropout",
         "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout",
         "aten.multinomial"),
        _random,
    ),
}  # fmt: skip
"""Op (without overload) -> its rule."""
