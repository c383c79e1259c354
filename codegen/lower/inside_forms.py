"""Ops that communicate inside because their operands are split along what they sum or look over."""

from dataclasses import replace

from meshwright.codegen.lower.shape_forms import Rule
from meshwright.codegen.lower.site import Form, In, OpSite, Value
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.windows import CONVOLUTIONS, POOLS, Window, spans, windows
from meshwright.ir.layout.layout import Shard
from meshwright.ir.layout.op_messages import goes_round


def _sizes(site: OpSite, axis: str, size: int, shard: Shard) -> tuple[int, ...]:
    """Elements of each rank, which are one run of a dim of global `size`."""
    if shard.outer > 1:
        raise PlanError(f"{site.op.key}: {shard} on {axis} has sections; outer must be 1")
    return tuple(shard.inner * n for n in site.axes[axis].sizes(size // shard.inner))


def _splitting(site: OpSite, index: int, dim: int) -> list[str]:
    """Axes that split a dim of an input."""
    shards = site.input_shards(index)
    return [axis for axis, p in shards if p.dim == dim and site.axes[axis].size > 1]


def _only_axis(site: OpSite, dim: int, axes: list[str]) -> str:
    if len(axes) > 1:
        raise PlanError(
            f"{site.op.key}: dim {dim} is split over {', '.join(axes)}; "
            "what communicates inside an op is split over one axis"
        )
    return axes[0]


def _attention(site: OpSite, form: Form) -> Form:
    dims = len(site.input(0).shape)
    axes = [a for a, s in site.strategies.items() if site.axes[a].size > 1 and goes_round(s, dims)]
    if not axes:
        return form
    if form.target.startswith("sharded."):
        raise PlanError(
            f"{site.op.key}: attention with dropout {form.arg('dropout_p')} is split along keys, "
            "which has none; split heads or samples, or set it to 0"
        )
    splitting = [a for i in (0, 1) for a in _splitting(site, i, dims - 2)]
    axis = _only_axis(site, dims - 2, list(dict.fromkeys(splitting)))
    extra: dict[str, Value] = {"axis": axis}
    sections: list[int] = []
    for index, name in enumerate(("queries", "keys")):
        shard, size = site.input_layout(index)[axis], site.input(index).shape[-2]
        assert isinstance(shard, Shard)
        extra[name] = _sizes(site, axis, size // shard.outer, replace(shard, outer=1))
        sections.append(shard.outer)
    if sections != [1, 1]:
        extra["sections"] = tuple(sections)
    return replace(form.having(**extra), target="sharded.ring_attention")


def _experts(site: OpSite, form: Form) -> Form:
    """Tokens may be split in any way: they only travel."""
    tokens, experts = _splitting(site, 0, 0), _splitting(site, 3, 0)
    if not set(tokens) & set(experts):
        return form
    axis = _only_axis(site, 0, experts)
    shard = site.input_layout(3)[axis]
    assert isinstance(shard, Shard)
    extra: dict[str, Value] = {"axis": axis}
    extra["experts"] = _sizes(site, axis, site.input(3).shape[0], shard)
    return replace(
        form, args=(*site.arguments().items(), *extra.items()), target="sharded.routed_experts"
    )


def _windowed(site: OpSite, form: Form) -> Form:
    shapes = [site.input(i).shape for i in range(len(site.op.inputs))]
    output = site.tensors[site.op.outputs[0]].shape
    found = windows(site.op, shapes, output)
    lead = len(shapes[0]) - len(found)
    dims = range(lead, len(shapes[0]))
    split = {dim: axes for dim in dims if (axes := _splitting(site, 0, dim))}
    if not split:
        return form
    halos, paddings = [], [0 if w is None else w.padding for w in found]
    for dim, axes in split.items():
        window, axis = found[dim - lead], _only_axis(site, dim, axes)
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
    sizes = _sizes(site, axis, size, holds)
    needed = tuple(window.reads(*span) for span in spans(_sizes(site, axis, made, makes)))
    return (axis, dim, sizes, needed)


def _with_halos(form: Form, halos: tuple[Value, ...], paddings: tuple[int, ...]) -> Form:
    target, name = form.target, form.args[0][0]
    if form.arg("padding") is not None:
        form = form.having(padding=paddings)
    extra: dict[str, Value] = {"target": target.replace(".padding", ".default"), "name": name}
    extra |= {"halos": halos, "fill": -float("inf") if "max_pool" in target else 0.0}
    assert isinstance(form.arg(name), In)
    return replace(form, args=(*extra.items(), *form.args), target="sharded.windowed")


RULES: dict[str, Rule] = {
    "aten.scaled_dot_product_attention": _attention,
    "meshwright.experts": _experts,
    **{f"aten.{name}": _windowed for name in sorted(CONVOLUTIONS | POOLS)},
}
"""Op (without overload) -> its rule; they come after all others."""
