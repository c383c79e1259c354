"""Rewrites in-place operations to functional ones; only buffers still change.

A write gives a new value, which later readers of the same memory use. A write through a view is
scattered into a new value of what it is a view of, and other views are taken again when next read.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.ir.errors import TraceError
from meshwright.ir.graph.graph import Arg, Kind, Ref
from meshwright.ir.graph.saved import call
from meshwright.ir.torch_private import (
    makes_view,
    schema_arguments,
    storage_key,
    written_arguments,
)
from meshwright.ir.trace.flat_trace import Raw, RawOp, dtype_name, make_op, substitute

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _View:
    """A value that is result `index` of `op`, a view of `base`."""

    base: str
    op: RawOp
    index: int


@dataclass(slots=True)
class _State:
    """Which value each piece of memory holds at the point that the rewrite has reached."""

    raw: Raw
    done: list[RawOp] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)
    """Result of an in-place call -> the value it wrote."""
    current: dict[str, str] = field(default_factory=dict)
    views: dict[str, _View] = field(default_factory=dict)
    version: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    """View -> version of its root when it was last taken."""
    live: set[str] = field(default_factory=set)
    """Values that have gradients."""

    def root(self, name: str) -> str:
        while name in self.views:
            name = self.views[name].base
        return name

    def now(self, value: Arg) -> Arg:
        return substitute(value, self.current)

    def emit(self, target: Any, given: dict[str, Arg], like: RawOp, stem: str) -> str:
        """Append a call with one result, on values as they are now; the name of the result."""
        op = make_op(target, {k: self.now(v) for k, v in given.items()}, like, [""])
        (fake,) = call(op, self.raw.fakes)
        name = self.raw.fresh(stem)
        self.raw.fakes[name] = fake
        op.outputs = [name]
        self.done.append(op)
        return name


def functionalise(raw: Raw) -> Raw:
    """The same step without in-place operations."""
    if not any(written_arguments(op.target) for op in raw.ops):
        return raw
    state = _State(raw)
    state.live = {name for name, tensor in raw.tensors.items() if tensor.requires_grad}
    for op in raw.ops:
        op = replace(op, args={k: substitute(v, state.same) for k, v in op.args.items()})
        for name in dict.fromkeys(op.inputs):
            _refresh(state, name)
        written = written_arguments(op.target)
        if written:
            _write(state, op, written)
        else:
            _keep(state, op)
    loss = state.same.get(raw.loss, raw.loss)
    _refresh(state, loss)
    raw.ops, raw.loss = state.done, state.current.get(loss, loss)
    return raw


def _keep(state: _State, op: RawOp) -> None:
    if op.grad and "detach" not in op.name and not state.live.isdisjoint(op.inputs):
        state.live.update(op.outputs)
    state.done.append(replace(op, args={k: state.now(v) for k, v in op.args.items()}))
    for index, output in enumerate(op.outputs):
        base = _viewed(state.raw, op, output)
        if base:
            state.views[output] = _View(base, op, index)
            state.taken[output] = state.version.get(state.root(base), 0)


def _viewed(raw: Raw, op: RawOp, output: str) -> str:
    """The input whose memory `output` shares, or ""."""
    if not output or not (makes_view(op.target) or op.name in _MAYBE_VIEWS) or not op.inputs:
        return ""
    source = op.inputs[0]
    if op.name.startswith("aten.to."):
        return "" if _is_copy(raw, op, source, output) else source
    if op.name in _MAYBE_VIEWS:
        shared = storage_key(raw.fakes[source]) == storage_key(raw.fakes[output])
        return source if shared else ""
    return source


def _is_copy(raw: Raw, op: RawOp, source: str, output: str) -> bool:
    """Whether `to` makes new memory for sure: of another kind, or as it is asked to."""
    given, made = raw.fakes[source], raw.fakes[output]
    return bool(op.args.get("copy")) or (given.dtype, given.device) != (made.dtype, made.device)


_MAYBE_VIEWS = frozenset(
    {"aten.reshape.default", "aten.contiguous.default", "aten.flatten.using_ints"}
)


def _refresh(state: _State, name: str) -> None:
    """Take a view again if its memory has changed since."""
    view = state.views.get(name)
    if view is None or state.taken[name] == state.version.get(state.root(name), 0):
        return
    _refresh(state, view.base)
    outputs = [state.raw.fresh(o) if o else "" for o in view.op.outputs]
    args = {k: state.now(v) for k, v in view.op.args.items()}
    state.done.append(replace(view.op, args=args, outputs=outputs))
    for old, new in zip(view.op.outputs, outputs, strict=True):
        if old:
            state.raw.fakes[new] = state.raw.fakes[old]
            state.current[old] = new
            state.taken[old] = state.version.get(state.root(name), 0)


def _write(state: _State, op: RawOp, written: tuple[str, ...]) -> None:
    first = op.args[written[0]]
    if len(written) > 1 or not isinstance(first, Ref):
        raise _cannot(op, "it changes several tensors in place")
    root = state.root(first.name)
    kind = state.raw.tensors[root].kind if root in state.raw.tensors else Kind.ACTIVATION
    if kind is Kind.PARAMETER:
        if op.name == "aten.embedding_renorm_.default":
            raise TraceError(
                f"{op.source or op.path}: max_norm rescales rows of a parameter where they are "
                "looked up, differently on each replica; build the table without it"
            )
        raise _cannot(op, "it changes a parameter in place")
    state.same.update({output: first.name for output in op.outputs if output})
    if op.name == "aten.detach_.default" and first.name not in state.live:
        return  # it has no gradient to cut off: `torch.tensor` asks for this of what it has made
    if kind is Kind.BUFFER:
        state.done.append(replace(op, args={k: state.now(v) for k, v in op.args.items()}))
        return
    if first.name not in state.live or not op.grad:
        _check_seen(state, first.name, op)
    if op.grad and not state.live.isdisjoint(op.inputs):
        _mark_live(state, first.name)
    value = _functional(state, op, first)
    fake, before = state.raw.fakes[value], state.raw.fakes[first.name]
    if fake.dtype != before.dtype:
        cast: dict[str, Arg] = {"self": Ref(value), "dtype": dtype_name(before.dtype)}
        value = state.emit(aten.to.dtype, cast, op, value)
    _assign(state, first.name, value, op)


def _check_seen(state: _State, name: str, op: RawOp) -> None:
    """A write that autograd does not see leaves the gradient of what it overwrites as it was: so it
    is written where it goes through a detached view, and refused elsewhere."""
    while name not in state.live and name in state.views:
        if state.views[name].op.name.startswith("aten.detach."):
            return
        name = state.views[name].base
    if name in state.live:
        raise _cannot(
            op, "it changes a value that has a gradient where autograd does not see it (no_grad "
            "or data), so that the gradient would pass as if nothing had changed; to mean "
            "that, write x + (new - x).detach()"
        )  # fmt: skip


def _mark_live(state: _State, name: str) -> None:
    """What a value with gradients is written into has them too, and all views of it."""
    root = state.root(name)
    state.live.update({root, *(view for view in state.views if state.root(view) == root)})


def _functional(state: _State, op: RawOp, written: Ref) -> str:
    """Append the functional form of an in-place call; the name of its value."""
    stem = op.name.split(".")[1].rstrip("_")
    if stem in _BITWISE:
        packet = getattr(aten, _BITWISE[stem])
        overload = op.name.split(".")[2]
        target = getattr(packet, f"Tensor_{overload}" if "shift" in stem else overload, None)
        target = target or getattr(packet, overload)
        return state.emit(target, {"self": op.args["self"], "other": op.args["other"]}, op, stem)
    shape = tuple(state.raw.fakes[written.name].shape)
    if stem in ("copy", "fill") and isinstance(
        source := op.args.get("src", op.args.get("value")), Ref
    ):
        now = state.current.get(source.name, source.name)
        if tuple(state.raw.fakes[now].shape) == shape:
            return now
        return state.emit(aten.expand.default, {"self": Ref(now), "size": shape}, op, stem)
    if stem == "zero":
        return state.emit(aten.zeros_like.default, {"self": written}, op, stem)
    if stem == "fill":
        given: dict[str, Arg] = {"self": written, "fill_value": op.args["value"]}
        return state.emit(aten.full_like.default, given, op, stem)
    namespace, name, overload = op.name.split(".")
    space = getattr(torch.ops, namespace)
    overload = _OVERLOADS.get(op.name, overload)
    packets = (getattr(space, name.rstrip("_") + end, None) for end in ("", "_functional"))
    target = next(filter(None, (getattr(p, overload, None) for p in packets)), None)
    if not name.endswith("_") or target is None or stem in ("t", "transpose", "resize"):
        raise _cannot(op, "it has no form that returns a new tensor")
    # By position: dropout_ calls `self` what dropout calls `input`.
    names = (argument.name for argument in schema_arguments(target))
    return state.emit(target, dict(zip(names, op.args.values(), strict=False)), op, stem)


_BITWISE = {
    "__iand": "bitwise_and", "__ior": "bitwise_or", "__ixor": "bitwise_xor",
    "__ilshift": "bitwise_left_shift", "__irshift": "bitwise_right_shift",
}  # fmt: skip
_OVERLOADS = {"aten.bernoulli_.float": "p"}
"""In-place call -> the overload of its functional form, where that is called otherwise."""


def _assign(state: _State, name: str, value: str, op: RawOp) -> None:
    """The memory of `name` now holds `value`; what it is a view of changes with it."""
    state.current[name] = value
    view = state.views.get(name)
    if view is None:
        state.version[name] = state.version.get(name, 0) + 1
        return
    _assign(state, view.base, _scatter(state, view, Ref(value), op), op)
    state.taken[name] = state.version[state.root(name)]


def _scatter(state: _State, view: _View, value: Ref, op: RawOp) -> str:
    """The new value of `view.base` when the view of it becomes `value`."""
    args, short = view.op.args, view.op.name.split(".")[1]
    base: dict[str, Arg] = {"self": Ref(view.base), "src": value}
    if short in ("alias", "contiguous") or (short == "to" and args.get("memory_format") is None):
        return value.name
    if short == "detach":
        return _written_unseen(state, view.base, value, op)
    if short == "select":
        given = base | {"dim": args["dim"], "index": args["index"]}
        return _into(state, aten.select_scatter.default, given, op)
    if short == "diagonal":
        given = base | {key: args[key] for key in ("offset", "dim1", "dim2")}
        return _into(state, aten.diagonal_scatter.default, given, op)
    if short == "slice":
        given = base | {key: args[key] for key in ("dim", "start", "end", "step")}
        return _into(state, aten.slice_scatter.default, given, op)
    if short == "transpose":
        given = {"self": value, "dim0": args["dim0"], "dim1": args["dim1"]}
        return state.emit(aten.transpose.int, given, op, "transpose")
    if short == "t":
        return state.emit(aten.t.default, {"self": value}, op, "t")
    if short == "permute":
        rank = state.raw.fakes[view.base].ndim
        dims = [d % rank for d in _ints(args["dims"])]
        back = tuple(sorted(range(rank), key=dims.__getitem__))
        return state.emit(aten.permute.default, {"self": value, "dims": back}, op, "permute")
    if short in _RESHAPES:
        shape = tuple(state.raw.fakes[view.base].shape)
        return state.emit(aten.reshape.default, {"self": value, "shape": shape}, op, "reshape")
    raise _cannot(op, f"it writes through {view.op.name}")


def _into(state: _State, target: Any, given: dict[str, Arg], op: RawOp) -> str:
    """A scatter; of complex values, which autograd does not know, as pairs of real ones."""
    base, stem = given["self"], str(target).split(".")[1]
    assert isinstance(base, Ref)
    fake = state.raw.fakes[base.name]
    if not fake.is_complex():
        return state.emit(target, given, op, stem)
    pairs = {
        key: Ref(state.emit(aten.view_as_real.default, {"self": given[key]}, op, "view_as_real"))
        for key in ("self", "src")
    }
    dims = {
        key: value % fake.ndim for key, value in given.items()
        if key.startswith("dim") and isinstance(value, int)
    }  # fmt: skip
    if "offset" in given:  # a diagonal comes last, behind the pairs
        return state.emit(target, given, op, stem)
    written = state.emit(target, given | pairs | dims, op, stem)
    return state.emit(aten.view_as_complex.default, {"self": Ref(written)}, op, "view_as_complex")


def _written_unseen(state: _State, base: str, value: Ref, op: RawOp) -> str:
    """What a write through a detached view makes of its base: autograd does not see the write, so
    the gradient goes to what was there before."""
    if not state.raw.fakes[base].is_floating_point():
        return value.name
    before = state.emit(aten.detach.default, {"self": Ref(base)}, op, "before")
    now = state.emit(aten.detach.default, {"self": value}, op, "now")
    # Exactly 0: what is written keeps all its digits.
    nothing = state.emit(aten.sub.Tensor, {"self": Ref(base), "other": Ref(before)}, op, "nothing")
    return state.emit(aten.add.Tensor, {"self": Ref(now), "other": Ref(nothing)}, op, "written")


def _ints(value: Arg) -> list[int]:
    assert isinstance(value, tuple)
    return [v for v in value if isinstance(v, int)]


_RESHAPES = frozenset("view reshape flatten unflatten squeeze unsqueeze view_as".split())


def _cannot(op: RawOp, why: str) -> TraceError:
    return TraceError(
        f"{op.source or op.path}: {op.name} cannot be captured: {why}; use the operation that "
        "returns a new tensor"
    )
