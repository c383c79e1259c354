"""Ops that name sizes or counts: their forms with local ones."""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from math import prod

from meshwright.codegen.lower.site import Form, In, OpSite, RankDevice, Value
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.operators import arguments, operator
from meshwright.ir.layout.layout import Shard

Rule = Callable[[OpSite, Form], Form]


def factory(site: OpSite, form: Form) -> Form:
    """No tensor argument says the device; what has no size argument is made whole."""
    names = {argument.name for argument in arguments(operator(form.target))}
    args = tuple((name, arg) for name, arg in form.args if name != "device")
    if "device" in names:
        args = (*args, ("device", RankDevice()))
    sized = site.op.target.rpartition(".")[0] in _SIZES
    split = any(isinstance(p, Shard) for p in site.output_layout(0).values())
    return replace(form, args=args, whole=split and not sized)


def _size(site: OpSite, form: Form) -> Form:
    argument = _SIZES[site.op.target.rpartition(".")[0]]
    if argument not in dict(form.args):
        return form
    return form.having(**{argument: site.local_output()})


def _as(target: str, argument: str) -> Rule:
    """The other tensor only lends its shape, and may be placed otherwise."""

    def rule(site: OpSite, form: Form) -> Form:
        args: tuple[tuple[str, Value], ...] = (("self", In(0)), (argument, site.local_output()))
        return replace(form, target=target, args=args)

    return rule


def _unflatten(site: OpSite, form: Form) -> Form:
    dim = int(str(form.arg("dim"))) % len(site.input(0).shape)
    behind = len(site.input(0).shape) - dim - 1
    shape = site.local_output()
    return form.having(sizes=shape[dim : len(shape) - behind])


def _split(site: OpSite, form: Form) -> Form:
    dim = _dim(site, form)
    if not site.is_split(0, dim):
        return form
    sizes = tuple(site.local_output(i)[dim] for i in range(len(site.op.outputs)))
    args: tuple[tuple[str, Value], ...] = (("self", In(0)), ("split_sizes", sizes), ("dim", dim))
    return replace(form, target="aten.split_with_sizes.default", args=args)


def _dim(site: OpSite, form: Form) -> int:
    dim = form.arg("dim") or 0
    assert isinstance(dim, int)
    return dim % len(site.input(0).shape)


def _slice(site: OpSite, form: Form) -> Form:
    dim = _dim(site, form)
    if not site.is_split(0, dim):
        return form
    if site.input(0).shape[dim] != site.tensors[site.op.outputs[0]].shape[dim]:
        raise PlanError(f"{site.op.key}: {site.op.target} takes part of dim {dim}, which is split")
    return form.having(start=0, end=site.local_output()[dim])


def _narrow(site: OpSite, form: Form) -> Form:
    dim = _dim(site, form)
    return form.having(length=site.local_output()[dim]) if site.is_split(0, dim) else form


def _repeat_interleave(site: OpSite, form: Form) -> Form:
    return form.having(output_size=None)


def _squeeze(site: OpSite, form: Form) -> Form:
    """A dim that is 1 only locally must stay."""
    ones = zip(site.input(0).shape, site.local_input(0), strict=True)
    if all(whole == 1 or local != 1 for whole, local in ones):
        return form
    args: tuple[tuple[str, Value], ...] = (("self", In(0)), ("shape", site.local_output()))
    return replace(form, target="aten.reshape.default", args=args)


def _mean(site: OpSite, form: Form) -> Form:
    if not site.sums() or site.is_whole():
        return form
    shape, given = site.input(0).shape, dict(form.args)
    dims = given.get("dim") or tuple(range(len(shape)))
    assert isinstance(dims, tuple)
    count = prod(shape[int(str(dim))] for dim in dims)
    args: dict[str, Value] = {"self": In(0), "dim": dims}
    args |= {name: given[name] for name in ("keepdim", "dtype") if name in given}
    target = "aten.sum.dim_IntList"
    return replace(form, target=target, args=tuple(args.items()), divisor=count)


def _mean_loss(site: OpSite, form: Form) -> Form:
    """Reduction 1 is the mean: the local sum over the global count."""
    if not site.sums() or site.is_whole() or form.arg("reduction") != 1:
        return form
    sides = (site.input(0).shape[::-1], site.input(1).shape[::-1])
    return replace(
        form.having(reduction=2), divisor=prod(map(max, zip_longest(*sides, fillvalue=1)))
    )


def _groups(argument: str) -> Callable[[OpSite, Form], Form]:
    """Groups of channels are split with the channels."""

    def rule(site: OpSite, form: Form) -> Form:
        groups = form.arg(argument)
        if groups == 1 or not site.is_split(0, 1):
            return form
        assert isinstance(groups, int)
        local, whole = site.local_input(0)[1], site.input(0).shape[1]
        if groups * local % whole:
            raise PlanError(f"{site.op.key}: {groups} groups of {whole} channels cannot be split")
        return form.having(**{argument: groups * local // whole})

    return rule


_SIZES = {
    "aten.view": "size", "aten.view_copy": "size", "aten._unsafe_view": "size",
    "aten.reshape": "shape", "aten._reshape_copy": "size",
    "aten.expand": "size", "aten.expand_copy": "size", "aten.broadcast_to": "size",
    "aten.full": "size", "aten.zeros": "size", "aten.ones": "size", "aten.empty": "size",
    "aten.new_full": "size", "aten.new_zeros": "size", "aten.new_ones": "size",
    "aten.new_empty": "size",
}  # fmt: skip
"""Op -> its argument that is the shape of the output."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SIZES, _size),
    "aten.view_as": _as("aten.view.default", "size"),
    "aten.reshape_as": _as("aten.reshape.default", "shape"),
    "aten.expand_as": _as("aten.expand.default", "size"),
    "aten.unflatten": _unflatten,
    "aten.narrow": _narrow,
    **dict.fromkeys(
        ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unsafe_split",
         "aten.unsafe_chunk", "aten.unsafe_split_with_sizes", "aten.tensor_split"),
        _split,
    ),
    "aten.slice": _slice,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.squeeze": _squeeze,
    "aten.mean": _mean,
    **dict.fromkeys(
        ("aten.mse_loss", "aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss",
         "aten.binary_cross_entropy", "aten.binary_cross_entropy_with_logits", "aten.kl_div",
         "aten.soft_margin_loss"),
        _mean_loss,
    ),
    "aten.conv1d": _groups("groups"),
    "aten.conv2d": _groups("groups"),
    "aten.conv3d": _groups("groups"),
    "aten.convolution": _groups("groups"),
    "aten.group_norm": _groups("num_groups"),
}  # fmt: skip
"""Op (without overload) -> its rule."""
