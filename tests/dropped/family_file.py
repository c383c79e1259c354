"""Elements times their own size, an operator that is told how long rows are.

A test copies it to a folder of a user's own under another name; NAME stands for its namespace.
"""

from math import prod

import torch
from torch import Tensor
from torch.library import custom_op

from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph, Op
from meshwright.ir.graph.op_facts import OpFacts
from meshwright.ir.graph.rules import Rule, input_shapes, letters, make_rule


@custom_op("NAME::stretch", mutates_args=())
def stretch(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] != width:
        raise ValueError(f"rows have {x.shape[-1]} elements, not {width}")
    return x * x.abs()


@stretch.register_fake
def _shape(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] != width:
        raise ValueError(f"rows have {x.shape[-1]} elements, not {width}")
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx, grad):
    (x,) = ctx.saved_tensors
    return 2 * grad * x.abs(), None


stretch.register_autograd(_differentiate, setup_context=_save)


def _rule(op: Op, graph: Graph) -> Rule:
    dims = letters("d", len(input_shapes(op, graph)[0]))
    return make_rule(op, graph, [dims], [dims])


def _form(site, form):
    """A rank's rows are shorter where they are split."""
    return form.having(width=site.local_input(0)[-1])


FACTS = {
    "NAME.stretch": OpFacts(
        op_class=OpClass.TRANSCENDENTAL,
        rule=_rule,
        flops=lambda args, of, out: 7 * prod(out),
        autocast="first",
        form=_form,
    )
}
