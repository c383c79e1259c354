"""Convolutions: samples, channels and space may be split."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.gemm import NARROW, Gemm
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import Args, MakeForm, OpFacts, Shape, ShapeOf, named
from meshwright.ir.graph.op_forms import then
from meshwright.ir.graph.op_site import Form, OpSite
from meshwright.ir.graph.rules import Dims, Rule, given, input_shapes, letters, make_rule, slot
from meshwright.ir.ops.pooling import SLIDING, halos_of, with_borders


def _convolution(op: Op, graph: Graph) -> Rule | None:
    """x[n, c, ...] weight[o, c, ...] (bias[o]) -> [n, o, ...].

    With groups, c = g x i and o = g x j, the weight is [g x j, i], and only whole groups are split.
    """
    if given(op, "transposed"):
        return None
    x, weight = input_shapes(op, graph)[:2]
    groups = int(str(given(op, "groups", 1)))
    if len(x) != len(weight):
        return None
    space = len(x) - 2
    channels: tuple[str, ...]
    kernel: Dims
    out: tuple[str, ...]
    if groups == 1:
        channels, kernel, out = ("c",), (("o",), ("c",)), ("o",)
        sizes, whole = {"c": weight[1], "o": weight[0]}, set[str]()
    else:
        sizes = {"g": groups, "i": weight[1], "j": weight[0] // groups}
        channels = ("g",) + ("i",) * (sizes["i"] > 1)
        out = ("g",) + ("j",) * (sizes["j"] > 1)
        kernel, whole = (out, ("i",)), {"i", "j"}
    inputs: list[Dims] = [
        (("n",), channels, *letters("x", space)),
        (*kernel, *letters("k", space)),
        (out,),
    ]
    places = letters("y", space)
    whole |= {f for d in (*letters("x", space), *letters("k", space), *places) for f in d}
    added = [2] if slot(op, "bias") is not None else []
    return make_rule(
        op, graph, inputs[: len(op.inputs)], [(("n",), out, *places)],
        sizes=sizes, whole=whole, added=added, linear=[{0, *added}],
        plain=(halos := halos_of(op, graph)), together=halos,
    )  # fmt: skip


def split_groups(argument: str) -> MakeForm:
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


def _flops(args: Args, of: ShapeOf, out: Shape) -> int:
    weight = of(args.get("weight"))  # [out channels, in channels / groups, *kernel]
    return 2 * prod(out) * prod(weight[1:]) + prod(out) * bool(of(args.get("bias")))


def _transposed_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    weight = of(args.get("weight"))  # [in channels, out channels / groups, *kernel]
    return 2 * prod(of(args.get("input"))) * prod(weight[1:]) + prod(out) * bool(
        of(args.get("bias"))
    )


def _either_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """Of a call that says whether it is transposed."""
    return (_transposed_flops if args.get("transposed") else _flops)(args, of, out)


def _in_time_flops(args: Args, of: ShapeOf, out: Shape) -> int:
    """A weight is [time, in channels, out channels] here, and there always is a bias."""
    return prod(out) * (2 * prod(of(args.get("weight"))[:2]) + 1)


def _products(shapes: Sequence[Shape], flops: float) -> tuple[Gemm, ...]:
    """The implicit product: output positions x output channels over the window."""
    if len(shapes) < 2 or len(shapes[1]) < 3:
        return ()
    image, weight = shapes[0], shapes[1]
    k = prod(weight[1:])
    groups = max(1, image[1] // weight[1]) if weight[1] else 1
    n = weight[0] // groups
    if not n * k:
        return ()
    together = max(d for d in range(1, groups + 1) if groups % d == 0 and n * d <= max(n, NARROW))
    rows = max(1, round(flops / (2 * groups * n * k)))
    return (Gemm(groups, rows, n, k, packed=(1, together, together)),)


_OTHER = OpFacts(op_class=OpClass.CONVOLUTION)
_CONVOLUTION = replace(
    SLIDING,
    op_class=OpClass.CONVOLUTION,
    products=_products,
    rule=_convolution,
    form=then(split_groups("groups"), with_borders),
)
FACTS = {
    **named("conv1d conv2d conv3d", replace(_CONVOLUTION, flops=_flops)),
    **named("convolution", replace(_CONVOLUTION, flops=_either_flops)),
    **named("_convolution", replace(_OTHER, products=_products, flops=_either_flops)),
    **named(
        "conv_transpose1d conv_transpose2d conv_transpose3d",
        replace(_OTHER, flops=_transposed_flops),
    ),
    **named("conv_tbc", replace(_OTHER, flops=_in_time_flops)),
}
