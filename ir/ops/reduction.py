"""Ops along some dims: sums and means give summands if those are split, others do not split."""

from dataclasses import replace
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import MakeRule, OpFacts, named, per_element
from meshwright.ir.graph.op_site import Form, In, OpSite, Value
from meshwright.ir.graph.rules import (
    Dims,
    Rule,
    given,
    input_shapes,
    letters,
    make_rule,
    output_shapes,
)
from meshwright.ir.ops.pointwise import elementwise


def _reduced(op: Op, rank: int) -> set[int]:
    dims = given(op, "dim")
    if dims is None or dims == ():
        return set(range(rank))
    return {int(str(d)) % max(rank, 1) for d in (dims if isinstance(dims, tuple) else (dims,))}


def _reducing(*, sums: bool) -> MakeRule:
    """The rule of an op that leaves out dims; where it sums over them they may be split."""

    def rule(op: Op, graph: Graph) -> Rule | None:
        shape, *others = input_shapes(op, graph)
        if others:
            return None
        dims, reduced = letters("d", len(shape)), _reduced(op, len(shape))
        kept = tuple(d for i, d in enumerate(dims) if i not in reduced)
        same = tuple(d if i not in reduced else () for i, d in enumerate(dims))
        outs = [same if len(s) == len(shape) else kept for s in output_shapes(op, graph)]
        if sums:
            return make_rule(op, graph, [dims], outs, linear=[{0}])
        return make_rule(op, graph, [dims], outs, whole={f"d{i}" for i in reduced})

    return rule


def _along(*, linear: bool) -> MakeRule:
    """The rule of an op whose results agree with its input in all dims but the one it works
    along."""

    def rule(op: Op, graph: Graph) -> Rule:
        shape = input_shapes(op, graph)[0]
        dim = given(op, "dim", -1)
        at = int(str(-1 if dim is None else dim)) % max(len(shape), 1)
        dims = letters("d", len(shape))
        outs: list[Dims] = []
        for k, out in enumerate(output_shapes(op, graph)):
            along = () if len(out) < len(shape) else ((f"o{k}",),)
            outs.append((*dims[:at], *along, *dims[at + 1 :]))
        whole = {f"d{at}", *(f"o{k}" for k in range(len(outs)))}
        return make_rule(op, graph, [dims], outs, whole=whole, linear=[{0}] if linear else [])

    return rule


def _mean(site: OpSite, form: Form) -> Form:
    if not site.sums() or site.is_whole():
        return form
    shape, told = site.input(0).shape, dict(form.args)
    dims = told.get("dim") or tuple(range(len(shape)))
    assert isinstance(dims, tuple)
    count = prod(shape[int(str(dim))] for dim in dims)
    args: dict[str, Value] = {"self": In(0), "dim": dims}
    args |= {name: told[name] for name in ("keepdim", "dtype") if name in told}
    target = "aten.sum.dim_IntList"
    return replace(form, target=target, args=tuple(args.items()), divisor=count)


_OTHER = OpFacts(rule=_reducing(sums=False))
_REDUCE = replace(_OTHER, op_class=OpClass.REDUCTION)
_SUM = replace(_REDUCE, rule=_reducing(sums=True))
_ALONG = OpFacts(rule=_along(linear=False))
_SOFTMAX = replace(_ALONG, op_class=OpClass.NORMALIZATION)
_SCAN = replace(_ALONG, op_class=OpClass.REDUCTION)
FACTS = {
    **named("sum", replace(_SUM, backward="handed on")),
    **named("mean", replace(_SUM, form=_mean)),
    **named(
        "all amax amin any argmax argmin linalg_vector_norm logsumexp max min norm prod std "
        "std_mean var var_mean",
        _REDUCE,
    ),
    **dict.fromkeys(("aten.min.other", "aten.max.other"), replace(_REDUCE, rule=elementwise())),
    **named("count_nonzero median nansum", _OTHER),
    **named("histc", OpFacts(op_class=OpClass.REDUCTION)),
    **named("softmax _softmax log_softmax _log_softmax", replace(_SOFTMAX, flops=per_element(5))),
    **named("_safe_softmax", _SOFTMAX),
    **named("cumsum", replace(_SCAN, rule=_along(linear=True))),
    **named("argsort cumprod sort topk", _SCAN),
    **named("cummax glu kthvalue logcumsumexp", _ALONG),
}
