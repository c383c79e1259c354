"""Mixture-of-experts layer as one operator, `meshwright.experts`.

Pairs of a token and an expert that it picked are sorted by expert once, so each product of all
experts is a grouped one over runs of rows (`ir.graph.grouped`). Backward keeps the first product
and takes the gate again. An index outside [0, experts) belongs to an expert that is not here, or to
none, and adds nothing: a rank can hold some of the experts, and a token can be dropped.

How the experts of a model differ is said as data: what is between their products is a text that
names a file of `ir.gates`, biases and a gate of its own are tensors that may be missing, and how
weights are stored is said in words (`ir.graph.expert_form`).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from meshwright.ir.errors import PlanError
from meshwright.ir.gates import parse_gate
from meshwright.ir.graph.expert_form import parse_form
from meshwright.ir.graph.grouped import PairGroups, groups_of
from meshwright.ir.graph.narrow_tokens import SCALE_BYTES, rounded
from meshwright.ir.graph.own_operators import LIBRARY
from meshwright.ir.graph.scaled_groups import fits, outer
from meshwright.ir.graph.scaled_groups import product as made_of
from meshwright.ir.precision import Scaling
from meshwright.ir.torch_private import backward_reaches

Tensors = tuple[torch.Tensor, ...]
_ARGUMENTS = (
    "Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor down, str act,"
    " Tensor? up=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, str form=''"
)
LIBRARY.define(f"experts({_ARGUMENTS}) -> Tensor")
LIBRARY.define(f"experts_forward({_ARGUMENTS}, *, ScalarType? products=None) -> (Tensor, Tensor)")
LIBRARY.define(f"experts_backward(Tensor grad, Tensor product, {_ARGUMENTS}) -> Tensor[]")
LIBRARY.define(f"experts_backward_tokens(Tensor grad, Tensor product, {_ARGUMENTS}) -> Tensor[]")
LIBRARY.define(
    "experts_backward_weights(Tensor grad, Tensor grad_product, Tensor gated, "
    f"{_ARGUMENTS}) -> Tensor[]"
)


class Operands(NamedTuple):
    """What the operator is given: E experts of width H and inner width I, T tokens with K each."""

    hidden: torch.Tensor
    """[T, H]."""
    top_k_index: torch.Tensor
    """[T, K] whole numbers."""
    top_k_weights: torch.Tensor
    """[T, K]."""
    gate_up: torch.Tensor
    """[E, 2I, H] gate and up; [E, I, H] where there is no gate, or where `up` has the other."""
    down: torch.Tensor
    """[E, H, I]."""
    act: str
    """A gate of `ir.gates`."""
    up: torch.Tensor | None = None
    """[E, I, H]."""
    gate_up_bias: torch.Tensor | None = None
    """[E, 2I] or [E, I], as the first product has columns."""
    down_bias: torch.Tensor | None = None
    """[E, H]."""
    form: str = ""

    @property
    def gated(self) -> bool:
        """Whether a gate multiplies what goes beside it."""
        return self.up is not None or self.columns == 2 * self.last().shape[1]

    @property
    def columns(self) -> int:
        """Of the first product: 2I or I."""
        dim = 2 if parse_form(self.form).transposed_first else 1
        return sum(weight.shape[dim] for weight in self.firsts)

    @property
    def firsts(self) -> Tensors:
        """The weights of the first product, whose columns come one after the other."""
        return (self.gate_up,) if self.up is None else (self.gate_up, self.up)

    def first(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight of the first product as [E, in, out]."""
        return weight if parse_form(self.form).transposed_first else weight.transpose(1, 2)

    def last(self) -> torch.Tensor:
        """The weight of the last product as [E, in, out]."""
        return self.down if parse_form(self.form).transposed_last else self.down.transpose(1, 2)

    def parts(self, product: torch.Tensor) -> Tensors:
        """Of the first product or its gradient [pairs, columns]: gate and up, or all."""
        if not self.gated:
            return (product,)
        if parse_form(self.form).interleaved:
            return product[:, ::2], product[:, 1::2]
        return product.chunk(2, dim=-1)

    @property
    def scaling(self) -> Scaling:
        """Of products on this rank: that of the form, where kernels take their sizes."""
        each = self.columns // len(self.firsts)
        widths = (self.hidden.shape[1], each, self.last().shape[1])
        return parse_form(self.form).scaling if fits(widths) else ""

    def come(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Tokens, or gradients of results, as experts read them."""
        rows = rows.to(dtype)
        return rounded(rows) if parse_form(self.form).narrow_tokens else rows

    def product(self, rows: torch.Tensor, weight: torch.Tensor, groups: PairGroups) -> torch.Tensor:
        """[pairs, out] of rows [pairs, in] by weights [E, in, out], in the dtype of rows."""
        return made_of(rows, weight.to(rows.dtype), groups, self.scaling)

    def outer(
        self, left: torch.Tensor, right: torch.Tensor, groups: PairGroups, turned: bool
    ) -> torch.Tensor:
        """Gradient of a weight that multiplied rows `left`, from that of the result, as stored."""
        first, second = (left, right) if turned else (right, left)
        return outer(first, second, groups, self.scaling)


def check_operands(given: Operands) -> None:
    """PlanError where shapes or texts do not make a layer of experts."""
    form, gate = parse_form(given.form), parse_gate(given.act)
    hidden, index = given.hidden, given.top_k_index
    routed = index.ndim == 2 and index.shape == given.top_k_weights.shape
    if hidden.ndim != 2 or not routed or len(index) != len(hidden):
        raise PlanError(
            f"experts: hidden {_shape(hidden)}, index {_shape(index)} and weights "
            f"{_shape(given.top_k_weights)} must be [tokens, width] and twice [tokens, picked]"
        )
    if index.is_floating_point() or index.dtype is torch.bool:
        raise PlanError(f"experts: an index of {index.dtype} must be of whole numbers, as int64")
    if not _fit(given):
        raise PlanError(
            f"experts: gate_up {_shape(given.gate_up)}, up {_shape(given.up)} and down "
            f"{_shape(given.down)} with form {given.form!r} do not go with tokens of "
            f"{hidden.shape[1]}; without words they are [experts, 2 * inner or inner, width], "
            "[experts, inner, width] and [experts, width, inner], and 'transposed_first' or "
            "'transposed_last' turns the last two dims"
        )
    count, width = len(given.down), hidden.shape[1]
    if form.narrow_tokens and width % SCALE_BYTES:
        raise PlanError(
            f"experts: a token of {width} values in 8-bit floats has no place for its scale: "
            f"nearest is a multiple of {SCALE_BYTES}, or tokens as they are"
        )
    for bias, columns in ((given.gate_up_bias, given.columns), (given.down_bias, width)):
        if bias is not None and bias.shape != (count, columns):
            raise PlanError(f"experts: a bias {_shape(bias)} must be [{count}, {columns}]")
    if (2 if given.gated else 1) not in gate.gate.parts:
        raise PlanError(f"experts: gate {given.act!r} needs a gate and what goes beside it")
    if form.interleaved and (given.up is not None or not given.gated):
        raise PlanError("experts: only gate and up in one weight can be interleaved")


def _fit(given: Operands) -> bool:
    """Whether weights go with each other and with tokens."""
    if any(weight.ndim != 3 for weight in (*given.firsts, given.down)):
        return False
    count, inner, width = given.last().shape
    legal = (2 * inner,) if given.up is not None else (inner, 2 * inner)
    firsts = [given.first(weight).shape for weight in given.firsts]
    return (
        all(shape[:2] == (count, width) for shape in firsts)
        and len({shape[2] for shape in firsts}) == 1
        and given.hidden.shape[1] == width
        and given.columns in legal
    )


def _shape(x: torch.Tensor | None) -> list[int] | None:
    return None if x is None else list(x.shape)


def dtype_of_products(hidden: torch.Tensor) -> torch.dtype:
    """Returns in which dtype products are computed: what autocast says, or as tokens are. To be
    asked before the operator of a forward is called: who watches operators has no autocast."""
    kind = hidden.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return hidden.dtype
    found: torch.dtype = torch.get_autocast_dtype(kind)
    return found


def _first_product(given: Operands, x: torch.Tensor, groups: PairGroups) -> torch.Tensor:
    """[pairs, columns] of rows [pairs, H]."""
    made = [given.product(x, given.first(weight), groups) for weight in given.firsts]
    product = made[0] if len(made) == 1 else torch.cat(made, -1)
    if given.gate_up_bias is not None:
        product += groups.rows_of(given.gate_up_bias.to(x.dtype))
    return product


def _groups(given: Operands, dtype: torch.dtype, known: int | None = None) -> PairGroups:
    """`known`: how many pairs have rows, where a forward has made some."""
    inner = given.last().shape[1]
    widths = (given.hidden.shape[1], inner, given.columns)
    some = parse_form(given.form).some
    count = given.down.shape[0]
    return groups_of(given.top_k_index, count, dtype, widths, some=some, known=known)


def _scale(given: Operands, groups: PairGroups, dtype: torch.dtype) -> torch.Tensor:
    """Routing weights of pairs [pairs, 1]."""
    return groups.picked(given.top_k_weights.reshape(-1)).unsqueeze(-1).to(dtype)


def experts_forward(
    *inputs: Any, products: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [T, H], and the first product [pairs, columns] of the pairs that are here, by
    expert; where all experts are, there are T*K pairs. `products`: their dtype, if it is known."""
    given = Operands(*inputs)
    check_operands(given)
    form = parse_form(given.form)
    dtype = products or dtype_of_products(given.hidden)
    with torch.autocast(given.hidden.device.type, enabled=False):
        groups = _groups(given, dtype)
        x, scale = groups.of_tokens(given.come(given.hidden, dtype)), _scale(given, groups, dtype)
        product = _first_product(given, x * scale if form.scaled_input else x, groups)
        gated = parse_gate(given.act).forward(given.parts(product))
        made = given.product(gated, given.last(), groups)
        del gated
        if given.down_bias is not None:
            made += groups.rows_of(given.down_bias.to(dtype))
        if not form.scaled_input:
            made *= scale
        return groups.summed(made, given.hidden), product


class _Incoming(NamedTuple):
    """What both parts of a backward read, by pairs. Rows of tokens are made where they are read: of
    all that is there at once they are the widest."""

    groups: PairGroups
    scale: torch.Tensor
    """Routing weights [pairs, 1]."""
    grad: torch.Tensor
    """Gradients of results [pairs, H]."""

    @classmethod
    def of(cls, given: Operands, grad: torch.Tensor, product: torch.Tensor) -> "_Incoming":
        """In the dtype of a product [pairs, columns]."""
        dtype = product.dtype
        groups = _groups(given, dtype, len(product))
        come = given.come(grad, dtype)
        return cls(groups, _scale(given, groups, dtype), groups.of_tokens(come))


def experts_backward(grad: torch.Tensor, product: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    """Gradients of hidden, top_k_weights, and the weights and biases that there are, in order."""
    given = Operands(*inputs)
    incoming = _Incoming.of(given, grad, product)
    *grads, grad_product, gated = _to_tokens(given, incoming, product)
    return grads + _to_weights(given, incoming, grad_product, gated)


def experts_backward_tokens(
    grad: torch.Tensor, product: torch.Tensor, *inputs: Any
) -> list[torch.Tensor]:
    """Gradients of hidden and of top_k_weights; then what those of weights are made of: that of the
    first product [pairs, columns], and the gate [pairs, I]."""
    given = Operands(*inputs)
    return _to_tokens(given, _Incoming.of(given, grad, product), product)


def experts_backward_weights(
    grad: torch.Tensor, grad_product: torch.Tensor, gated: torch.Tensor, *inputs: Any
) -> list[torch.Tensor]:
    """Gradients of the weights and biases that there are, in order, from what the other part of the
    backward has made."""
    given = Operands(*inputs)
    return _to_weights(given, _Incoming.of(given, grad, grad_product), grad_product, gated)


def _to_tokens(given: Operands, incoming: _Incoming, product: torch.Tensor) -> list[torch.Tensor]:
    form, gate = parse_form(given.form), parse_gate(given.act)
    groups, scale, grad = incoming
    dtype = product.dtype
    parts = given.parts(product)
    gated = gate.forward(parts)
    back = given.product(grad, given.last().transpose(1, 2), groups)
    if not form.scaled_input:
        grad_scale = (back * gated).sum(-1)
        if given.down_bias is not None:
            grad_scale += (grad * groups.rows_of(given.down_bias.to(dtype))).sum(-1)
        back *= scale
    grad_product = torch.empty_like(product)
    made = gate.backward(back, parts)
    for target, part in zip(given.parts(grad_product), made, strict=True):
        target.copy_(part)
    del back, made, part  # as much as tokens, where these are narrow
    grad_x, *more = (
        given.product(part, given.first(weight).transpose(1, 2), groups)
        for weight, part in zip(given.firsts, _columns(given, grad_product), strict=True)
    )
    for one in more:
        grad_x += one
    if form.scaled_input:
        grad_scale = (grad_x * groups.of_tokens(given.come(given.hidden, dtype))).sum(-1)
        grad_x *= scale
    grads = [groups.summed(grad_x, given.hidden), groups.placed(grad_scale, given.top_k_weights)]
    return [*grads, grad_product, gated]


def _to_weights(
    given: Operands, incoming: _Incoming, grad_product: torch.Tensor, gated: torch.Tensor
) -> list[torch.Tensor]:
    form = parse_form(given.form)
    groups, scale, grad = incoming
    read = groups.of_tokens(given.come(given.hidden, grad.dtype))
    (read if form.scaled_input else grad).mul_(scale)  # both are copies of our own
    first, last = form.transposed_first, form.transposed_last
    made = [given.outer(read, part, groups, first) for part in _columns(given, grad_product)]
    found = [made[0], given.outer(gated, grad, groups, last), *made[1:]]
    if given.gate_up_bias is not None:
        found.append(groups.sums_of(grad_product))
    if given.down_bias is not None:
        found.append(groups.sums_of(grad))
    return [g.to(w.dtype) for g, w in zip(found, _trained(given), strict=True)]


def _columns(given: Operands, product: torch.Tensor) -> Tensors:
    """Of the gradient of the first product: what belongs to each of its weights."""
    return (product,) if given.up is None else product.chunk(2, dim=-1)


def _trained(given: Operands) -> Iterator[torch.Tensor]:
    """Weights and biases that there are, in the order of the operator's arguments."""
    several = (given.gate_up, given.down, given.up, given.gate_up_bias, given.down_bias)
    yield from (x for x in several if x is not None)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        products = dtype_of_products(inputs[0])
        output, product = torch.ops.meshwright.experts_forward(*inputs, products=products)
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in inputs]
        ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(product, *(inputs[i] for i in ctx.places))
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        product, *tensors = ctx.saved_tensors
        inputs, grads = list(ctx.others), [None] * len(ctx.others)
        for place, tensor in zip(ctx.places, tensors, strict=True):
            inputs[place] = tensor
        trained = [place for place in ctx.places if Operands._fields[place] != "top_k_index"]
        nodes = dict(zip(ctx.places, [node for node, _ in ctx.next_functions], strict=True))
        tokens, weights = trained[:2], trained[2:]
        # The first half of a backward that is split wants gradients of tokens alone.
        if backward_reaches([nodes[place] for place in weights if nodes[place] is not None]):
            made = torch.ops.meshwright.experts_backward(grad, product, *inputs)
        else:
            made = torch.ops.meshwright.experts_backward_tokens(grad, product, *inputs)[:2]
            trained = tokens
        for place, one in zip(trained, made, strict=True):
            grads[place] = one
        return tuple(grads)


def _first(*inputs: Any) -> torch.Tensor:
    return experts_forward(*inputs)[0]


def _shape_of_result(*inputs: Any) -> torch.Tensor:
    given = Operands(*inputs)
    check_operands(given)
    return given.hidden.new_empty(given.hidden.shape)


def _forward_shapes(
    *inputs: Any, products: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    given = Operands(*inputs)
    check_operands(given)
    pairs = given.top_k_index.numel()
    product = given.hidden.new_empty(
        pairs, given.columns, dtype=products or dtype_of_products(given.hidden)
    )
    return given.hidden.new_empty(given.hidden.shape), product


def _backward_shapes(grad: torch.Tensor, _: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    given = Operands(*inputs)
    trained = (given.hidden, given.top_k_weights, *_trained(given))
    return [x.new_empty(x.shape) for x in trained]


def _tokens_shapes(grad: torch.Tensor, product: torch.Tensor, *inputs: Any) -> list[torch.Tensor]:
    given = Operands(*inputs)
    gated = product.new_empty(len(product), given.last().shape[1])
    found = (given.hidden, given.top_k_weights)
    return [*(x.new_empty(x.shape) for x in found), product.new_empty(product.shape), gated]


def _weights_shapes(*inputs: Any) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in _trained(Operands(*inputs[3:]))]


LIBRARY.impl("experts", _Experts.apply, "Autograd")
LIBRARY.impl("experts", _first, "CompositeExplicitAutograd")
LIBRARY.impl("experts", _shape_of_result, "Meta")
LIBRARY.impl("experts_forward", experts_forward, "CompositeExplicitAutograd")
LIBRARY.impl("experts_forward", _forward_shapes, "Meta")
LIBRARY.impl("experts_backward", experts_backward, "CompositeExplicitAutograd")
LIBRARY.impl("experts_backward", _backward_shapes, "Meta")
LIBRARY.impl("experts_backward_tokens", experts_backward_tokens, "CompositeExplicitAutograd")
LIBRARY.impl("experts_backward_tokens", _tokens_shapes, "Meta")
LIBRARY.impl("experts_backward_weights", experts_backward_weights, "CompositeExplicitAutograd")
LIBRARY.impl("experts_backward_weights", _weights_shapes, "Meta")

EXPERTS = torch.ops.meshwright.experts.default
EXPERTS_TARGET = str(EXPERTS)
"""As `Op.target` has it; made once, as it is compared often."""

_OPS = torch.ops.meshwright
MADE_OF: dict[Any, Callable[..., Any]] = {
    _OPS.experts_forward.default: experts_forward,
    _OPS.experts_backward.default: experts_backward,
    _OPS.experts_backward_tokens.default: experts_backward_tokens,
    _OPS.experts_backward_weights.default: experts_backward_weights,
}
"""What operators are made of, where somebody wants to see that."""
