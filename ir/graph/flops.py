"""Floating-point operations of one forward call, from shapes; a multiply-add counts 2."""

from collections.abc import Callable, Mapping
from math import prod

import torch

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.op_facts import ShapeOf, per_element
from meshwright.ir.ops import facts

Shape = tuple[int, ...]
Args = Mapping[str, Arg]
_VIEWS = frozenset(
    "view reshape transpose t permute expand slice select split split_with_sizes chunk unsqueeze"
    " squeeze contiguous clone detach to embedding index index_select gather arange zeros ones full"
    " empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full cat stack copy"
    " alias unbind narrow diagonal flip roll repeat repeat_interleave pad constant_pad_nd"
    " slice_scatter select_scatter numpy_T unfold movedim".split()
)


def flops(target: str, args: Args, fakes: Mapping[str, torch.Tensor], outputs: list[str]) -> int:
    """Forward flops of one call; 0 for what only moves data, else at least one per element."""
    short, known = target.split(".")[1].strip("_"), facts(target)
    rule = known.flops if known else _RULES.get(short)
    if rule is not None:
        return rule(args, lambda value: _shape(value, fakes), _first(outputs, fakes))
    if short in _VIEWS and not known:
        return 0
    sizes = [fakes[name].numel() for name in outputs if name]
    sizes += [fakes[v.name].numel() for v in args.values() if isinstance(v, Ref)]
    return max(sizes, default=0)


def _shape(value: Arg, fakes: Mapping[str, torch.Tensor]) -> Shape:
    return tuple(fakes[value.name].shape) if isinstance(value, Ref) else ()


def _first(outputs: list[str], fakes: Mapping[str, torch.Tensor]) -> Shape:
    return tuple(fakes[outputs[0]].shape) if outputs and outputs[0] else ()


def _linear(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("weight"))[-1] + prod(out) * bool(of(args.get("bias")))


def _addmm(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("mat1"))[1] + prod(out)


def _mm(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("self"))[-1]


def _baddbmm(args: Args, of: ShapeOf, out: Shape) -> int:
    return 2 * prod(out) * of(args.get("batch1"))[-1] + prod(out)


def _attention(args: Args, of: ShapeOf, out: Shape) -> int:
    """Scores and their product with the values; 5 per score for the softmax."""
    *batch, queries, width = of(args.get("query"))
    keys, value_width = of(args.get("key"))[-2], of(args.get("value"))[-1]
    scores = prod(batch) * queries * keys
    return 2 * scores * (width + value_width) + 5 * scores


def _convolution(args: Args, of: ShapeOf, out: Shape) -> int:
    weight = of(args.get("weight"))  # [out channels, in channels / groups, *kernel]
    return 2 * prod(out) * prod(weight[1:]) + prod(out) * bool(of(args.get("bias")))


def _transposed(args: Args, of: ShapeOf, out: Shape) -> int:
    weight = of(args.get("weight"))  # [in channels, out channels / groups, *kernel]
    return 2 * prod(of(args.get("input"))) * prod(weight[1:]) + prod(out) * bool(
        of(args.get("bias"))
    )


def _recurrent(args: Args, of: ShapeOf, out: Shape) -> int:
    """Each weight matrix once per token (tokens: the first two dims of the input)."""
    params = args.get("params")
    assert isinstance(params, tuple)
    weights = (of(p) for p in params)
    return 2 * prod(of(args.get("input"))[:2]) * sum(prod(w) for w in weights if len(w) == 2)


def _cross_entropy(args: Args, of: ShapeOf, out: Shape) -> int:
    return 5 * prod(of(args.get("logits")) or of(args.get("self")))


def _experts(args: Args, of: ShapeOf, out: Shape) -> int:
    """Every token through its `k` experts: gate and up, then down."""
    tokens, k = of(args.get("top_k_index"))
    _, double, hidden = of(args.get("gate_up"))
    return 2 * tokens * k * hidden * (double + double // 2)


_RULES: dict[str, Callable[[Args, ShapeOf, Shape], int]] = {
    "linear": _linear, "addmm": _addmm, "mm": _mm, "bmm": _mm, "matmul": _mm, "mv": _mm,
    "baddbmm": _baddbmm, "scaled_dot_product_attention": _attention,
    "conv1d": _convolution, "conv2d": _convolution, "conv3d": _convolution,
    "conv_transpose2d": _transposed, "lstm": _recurrent, "gru": _recurrent, "experts": _experts,
    "layer_norm": per_element(8), "group_norm": per_element(8),
    "batch_norm": per_element(8), "softmax": per_element(5), "log_softmax": per_element(5),
    "gelu": per_element(10), "silu": per_element(5), "tanh": per_element(5),
    "sigmoid": per_element(4), "cross_entropy_sum": _cross_entropy,
    "cross_entropy_loss": _cross_entropy,
}  # fmt: skip
