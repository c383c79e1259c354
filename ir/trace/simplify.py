"""Brings the calls to one form each and drops those without effect."""

from collections.abc import Callable
from dataclasses import replace

import torch

from meshwright.ir.deadline import check_time
from meshwright.ir.errors import TraceError
from meshwright.ir.graph.frequency import count_frequencies
from meshwright.ir.graph.graph import Arg, Kind, Ref
from meshwright.ir.graph.noise import draw_noise
from meshwright.ir.graph.own_operators import COUNT_VALID, CROSS_ENTROPY_SUM
from meshwright.ir.torch_private import makes_view, schema_arguments, written_arguments
from meshwright.ir.trace.flat_trace import Raw, RawOp, dtype_name, make_op, refs, substitute
from meshwright.ir.trace.functional import functionalise

aten = torch.ops.aten


def simplify(raw: Raw) -> Raw:
    """The passes, in order; each takes and returns the whole step."""
    for rewrite in (functionalise, _canonical, _split_mean_cross_entropy, draw_noise,
                    count_frequencies, _drop_identities, _mark_gradients, _drop_detach,
                    drop_dead):  # fmt: skip
        check_time()
        raw = rewrite(raw)
    return raw


def _shape(raw: Raw, name: str) -> tuple[int, ...]:
    return tuple(raw.fakes[name].shape)


# One form each ------------------------------------------------------------------------------------

_RENAMED = {
    "aten.__and__.Tensor": aten.bitwise_and.Tensor,
    "aten.__or__.Tensor": aten.bitwise_or.Tensor,
    "aten.__and__.Scalar": aten.bitwise_and.Scalar,
    "aten.__or__.Scalar": aten.bitwise_or.Scalar,
    "aten.__xor__.Tensor": aten.bitwise_xor.Tensor,
    "aten.__xor__.Scalar": aten.bitwise_xor.Scalar,
    "aten.__lshift__.Tensor": aten.bitwise_left_shift.Tensor,
    "aten.__lshift__.Scalar": aten.bitwise_left_shift.Tensor_Scalar,
    "aten.__rshift__.Tensor": aten.bitwise_right_shift.Tensor,
    "aten.__rshift__.Scalar": aten.bitwise_right_shift.Tensor_Scalar,
    "aten._unsafe_view.default": aten.view.default,
}
_CASTS = ("aten.to.", "aten.type_as.", "aten._to_copy.", "aten._autocast_to_")
_SIZED = {
    "aten.view.default": (aten.view.default, "size"),
    "aten.view_as.default": (aten.view.default, "size"),
    "aten.reshape.default": (aten.reshape.default, "shape"),
    "aten.reshape_as.default": (aten.reshape.default, "shape"),
    "aten.flatten.using_ints": (aten.reshape.default, "shape"),
    "aten.unflatten.int": (aten.reshape.default, "shape"),
    "aten.expand.default": (aten.expand.default, "size"),
    "aten.expand_as.default": (aten.expand.default, "size"),
}


def _canonical(raw: Raw) -> Raw:
    raw.ops = [_canonical_op(raw, op) for op in raw.ops]
    return raw


def _canonical_op(raw: Raw, op: RawOp) -> RawOp:
    if op.name in _RENAMED:
        return replace(
            op, target=_RENAMED[op.name], args=dict(zip(
                (a.name for a in schema_arguments(_RENAMED[op.name])), op.args.values(),
                strict=True)),
        )  # fmt: skip
    if op.name.startswith(_CASTS):
        given: dict[str, Arg] = {
            "self": op.args["self"], "dtype": dtype_name(raw.fakes[op.outputs[0]].dtype),
        }  # fmt: skip
        return make_op(aten.to.dtype, given, op, op.outputs)
    if op.name in _SIZED:
        target, size = _SIZED[op.name]
        given = {"self": op.args["self"], size: _shape(raw, op.outputs[0])}
        return make_op(target, given, op, op.outputs)
    if op.name == "aten.lstm.input":
        # Before torch 2.13 the fake final states have a dim too many; they are shaped as the first.
        for output, state in zip(op.outputs[1:], refs(op.args["hx"]), strict=True):
            raw.fakes[output] = torch.empty_like(raw.fakes[state.name])
    if op.args.get("sparse") is True and op.name.startswith("aten.embedding"):
        # A sparse gradient has the same values; buckets and collectives are dense.
        return replace(op, args=op.args | {"sparse": False})
    if op.name == "aten.slice.Tensor":
        return _bounded_slice(raw, op)
    if not op.inputs and op.args.get("dtype", "") is None:
        # Made under another default dtype than the ranks have.
        kind = raw.fakes[op.outputs[0]].dtype
        if kind.is_floating_point and kind != torch.float32:
            return replace(op, args=op.args | {"dtype": dtype_name(kind)})
    return op


def _bounded_slice(raw: Raw, op: RawOp) -> RawOp:
    """Start and end counted from the front and inside the dim."""
    source, dim = op.args["self"], op.args["dim"]
    assert isinstance(source, Ref) and isinstance(dim, int)
    size = raw.fakes[source.name].shape[dim]
    start, end, step = slice(op.args["start"], op.args["end"], op.args["step"]).indices(size)
    bounds: dict[str, Arg] = {"dim": dim % raw.fakes[source.name].ndim, "start": start, "end": end}
    return replace(op, args=op.args | bounds | {"step": step})


# Mean cross-entropy -------------------------------------------------------------------------------

_MEAN = 1


def _split_mean_cross_entropy(raw: Raw) -> Raw:
    """A mean over the targets that count is a sum and a count, each right under any split."""
    ops: list[RawOp] = []
    for op in raw.ops:
        if op.name == "aten.cross_entropy_loss.default" and op.args["reduction"] == _MEAN:
            ops += _split(raw, op)
        else:
            ops.append(op)
    raw.ops = ops
    return raw


def _split(raw: Raw, op: RawOp) -> list[RawOp]:
    logits, target, weight = op.args["self"], op.args["target"], op.args["weight"]
    assert isinstance(logits, Ref) and isinstance(target, Ref)
    fake, labels = raw.fakes[logits.name], raw.fakes[target.name]
    if labels.is_floating_point() or (op.args["label_smoothing"] and weight is not None):
        return [op]  # class probabilities, or smoothing with weights: the mean is another one
    total, count = raw.fresh("loss_sum"), raw.fresh("loss_count")
    raw.fakes[total] = raw.fakes[op.outputs[0]]
    raw.fakes[count] = raw.fakes[op.outputs[0]].detach()
    shared: dict[str, Arg] = {
        "target": target, "weight": weight, "ignore_index": op.args["ignore_index"],
    }  # fmt: skip
    return [
        make_op(COUNT_VALID, {**shared, "dtype": dtype_name(fake.dtype)}, op, [count]),
        make_op(CROSS_ENTROPY_SUM,
                {**shared, "logits": logits, "label_smoothing": op.args["label_smoothing"]},
                op, [total]),
        make_op(aten.div.Tensor, {"self": Ref(total), "other": Ref(count)}, op, op.outputs),
    ]  # fmt: skip


# Calls without effect -----------------------------------------------------------------------------

_COPIES = frozenset({
    "aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default",
    "aten.view.default", "aten.reshape.default", "aten.expand.default", "aten.to.dtype",
    "aten.contiguous.default", "aten.clone.default", "aten.slice.Tensor", "aten.positive.default",
})  # fmt: skip


def _is_identity(raw: Raw, op: RawOp) -> bool:
    if op.name in ("aten.dropout.default", "aten.feature_dropout.default"):
        return not op.args["train"] or op.args["p"] == 0
    if op.name in ("aten.add.Tensor", "aten.sub.Tensor") and op.args["other"] == 0:
        return raw.fakes[op.inputs[0]].dtype == raw.fakes[op.outputs[0]].dtype
    if op.name == "aten.broadcast_tensors.default":
        return len({_shape(raw, name) for name in op.inputs}) == 1
    if op.name not in _COPIES:
        return False
    source = op.args["self"]
    assert isinstance(source, Ref)
    before, after = raw.fakes[source.name], raw.fakes[op.outputs[0]]
    if op.name == "aten.to.dtype" and after.dtype == torch.float32:
        return False  # under autocast its input may be bfloat16: models cast up before a loss
    same = before.shape == after.shape and before.dtype == after.dtype
    return same and (before.stride() == after.stride() or op.name == "aten.reshape.default")


def _drop(raw: Raw, unneeded: Callable[[RawOp], bool]) -> Raw:
    """Remove calls whose results are their first inputs."""
    names: dict[str, str] = {}
    ops: list[RawOp] = []
    for op in raw.ops:
        op = replace(op, args={k: substitute(v, names) for k, v in op.args.items()})
        if unneeded(op):
            names |= zip(op.outputs, op.inputs, strict=False)
        else:
            ops.append(op)
    raw.ops = ops
    raw.loss = names.get(raw.loss, raw.loss)
    return raw


def _drop_identities(raw: Raw) -> Raw:
    state = _state_views(raw)

    def unneeded(op: RawOp) -> bool:
        copied = op.name == "aten.clone.default" and op.inputs[0] in state
        return not copied and _is_identity(raw, op)

    return _drop(raw, unneeded)


def _state_views(raw: Raw) -> set[str]:
    """Buffers and views of them, if any is written to: a copy of what it was is not the same."""
    if not any(written_arguments(op.target) for op in raw.ops):
        return set()
    found = {name for name, tensor in raw.tensors.items() if tensor.kind is Kind.BUFFER}
    for op in raw.ops:
        if makes_view(op.target) and op.inputs and op.inputs[0] in found:
            found.update(op.outputs)
    return found


# Gradients ----------------------------------------------------------------------------------------

_NO_GRADIENT = (
    "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like", "noise", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
    "bernoulli",
    "argmax", "argmin", "one_hot", "bincount", "histc", "searchsorted", "bucketize",
)  # fmt: skip


_UNDERIVED = frozenset({"aten._sample_dirichlet.default", "aten.binomial.default"})


def _mark_gradients(raw: Raw) -> Raw:
    """Set requires_grad on every example value as autograd would.

    What a no-grad region reads is detached there, so that the calls themselves say it.
    """
    live = {name for name, tensor in raw.tensors.items() if tensor.requires_grad}
    ops: list[RawOp] = []
    for op in raw.ops:
        if not op.grad:
            op = _detached(raw, op, live, ops)
        short = op.name.split(".")[1].rstrip("_")
        if op.name in _UNDERIVED and any(n in live for n in op.inputs):
            raise TraceError(
                f"{op.source or op.path}: {op.name} has no derivative, and a gradient flows into "
                "what it reads: give it detached values"
            )
        if short not in _NO_GRADIENT and any(n in live for n in op.inputs):
            live.update(o for o in op.outputs if o and _differs(raw.fakes[o]))
        ops.append(op)
    raw.ops = ops
    seen = {id(fake) for name, fake in raw.fakes.items() if name in raw.tensors}
    for name, fake in raw.fakes.items():
        if name not in raw.tensors:
            # A fake tensor that is of several values, or of a graph, is not changed: making a new
            # one takes as long as an operator.
            alone = fake.is_leaf and id(fake) not in seen
            seen.add(id(fake))
            own = fake if alone else fake.detach()
            raw.fakes[name] = own.requires_grad_(name in live)
    return raw


def _differs(value: torch.Tensor) -> bool:
    """Whether values of its kind can have a gradient."""
    return value.is_floating_point() or value.is_complex()


def _detached(raw: Raw, op: RawOp, live: set[str], ops: list[RawOp]) -> RawOp:
    """`op` reading detached values, which are appended to `ops`."""
    names: dict[str, str] = {}
    for name in dict.fromkeys(n for n in op.inputs if n in live):
        names[name] = raw.fresh("detach")
        raw.fakes[names[name]] = raw.fakes[name].detach()
        ops.append(make_op(aten.detach.default, {"self": Ref(name)}, op, [names[name]]))
    return replace(op, args={k: substitute(v, names) for k, v in op.args.items()}, grad=True)


def _drop_detach(raw: Raw) -> Raw:
    """A detach matters only where there is a gradient to stop."""
    names = ("aten.detach.default", "aten.detach_.default")
    return _drop(raw, lambda op: op.name in names and not raw.fakes[op.inputs[0]].requires_grad)


def drop_dead(raw: Raw) -> Raw:
    """Keep what the loss needs and what changes a buffer."""
    needed = {raw.loss}
    ops: list[RawOp] = []
    for op in reversed(raw.ops):
        effect = changes_state(raw, op)
        if effect or any(o in needed for o in op.outputs):
            needed.update(op.inputs)
            ops.append(op)
    raw.ops = ops[::-1]
    used = {name for op in raw.ops for name in op.inputs}
    for name in [n for n, t in raw.tensors.items() if n not in used and t.kind is not Kind.INPUT]:
        if raw.tensors[name].kind is not Kind.PARAMETER:
            del raw.tensors[name]
    return raw


def changes_state(raw: Raw, op: RawOp) -> bool:
    """Whether the call writes to a buffer."""
    if any(written_arguments(op.target)):
        return True
    return op.name == "aten.batch_norm.default" and bool(op.args["training"])
