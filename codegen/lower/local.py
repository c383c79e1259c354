"""What a rank calls for an op: the op itself with local shapes, or its sharded form.

An op runs unchanged on local tensors unless it says sizes (views, factories, splits), averages
over a split dim, draws random numbers, or is one of the few that must know the whole (vocabulary
lookup, cross-entropy, batch statistics): the facts of its family say it (`ir.ops`). `evaluate` of
`testing.simulated` runs a form at once.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from meshwright.codegen.sharded.sharded import FUNCTIONS
from meshwright.ir.graph.graph import Kind
from meshwright.ir.graph.op_site import Dtype, Form, In, OpSite, RankDevice, Value
from meshwright.ir.graph.operators import arguments, operator
from meshwright.ir.graph.windows import convolves_channels_last
from meshwright.ir.layout.layout import Shard
from meshwright.ir.ops import facts
from meshwright.ir.trace.changing import written


def form_of(site: OpSite) -> Form:
    """What the rank calls for the op."""
    form = Form(
        site.op.target, tuple(site.arguments().items()),
        guarded=_changed_buffers(site), channels_last=_images(site),
    )  # fmt: skip
    if not site.op.inputs:
        form = _made_from_nothing(site, form)
    make = facts(site.op.target).form
    return make(site, form) if make else form


def _made_from_nothing(site: OpSite, form: Form) -> Form:
    """No tensor argument says the device; what has no size that can be the rank's is made whole."""
    names = {argument.name for argument in arguments(operator(form.target))}
    args = tuple((name, arg) for name, arg in form.args if name != "device")
    if "device" in names:
        args = (*args, ("device", RankDevice()))
    split = any(isinstance(p, Shard) for p in site.output_layout(0).values())
    return replace(form, args=args, whole=split)


def bind(
    form: Form, resolve: Callable[[In | RankDevice], object]
) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """Callable, positional and keyword arguments; `resolve` says what In and Device stand for."""

    def value(arg: Value) -> object:
        match arg:
            case In() | RankDevice():
                return resolve(arg)
            case Dtype(name):
                return getattr(torch, name)
            case tuple():
                return tuple(value(item) for item in arg)
        return arg

    given = {name: value(arg) for name, arg in form.args}
    if form.target.startswith("sharded."):
        return FUNCTIONS[form.target], (), given
    op = operator(form.target)
    schema = arguments(op)
    for argument in reversed(schema):
        name = argument.name
        absent = name not in given or (given[name] is None and argument.keyword_only)
        same = name in given and not argument.required and _equal(given[name], argument.default)
        if absent or same:
            given.pop(name, None)
        elif not argument.keyword_only:
            break
    positional = tuple(given.pop(a.name) for a in schema if not a.keyword_only and a.name in given)
    return op, positional, given


def _equal(value: object, default: object) -> bool:
    """Whether an argument is its default; lists are tuples in a graph."""
    if isinstance(default, list):
        default = tuple(default)
    return type(value) is type(default) and value == default


def _changed_buffers(site: OpSite) -> tuple[int, ...]:
    if facts(site.op.target).mixes_samples:
        return tuple(i for i in range(len(site.op.inputs)) if _is_buffer(site, i))
    changed = set(written(site.op))
    return tuple(i for i, x in enumerate(site.op.inputs) if x in changed and _is_buffer(site, i))


def _images(site: OpSite) -> tuple[int, ...]:
    """What a convolution reads, where its results had their channels innermost in the trace."""
    return (0,) if convolves_channels_last(site.op, site.tensors) else ()


def _is_buffer(site: OpSite, index: int) -> bool:
    return site.input(index).kind is Kind.BUFFER
