"""Random numbers drawn in forward become ops of our own, from which all others are computed.

Noise has one of two kinds, uniform in [0, 1) or normal, and the shape of a tensor, or one given.
Whoever runs it can make the numbers of a sample alone, so that they do not depend on the layout.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.own_operators import LIBRARY
from meshwright.ir.graph.saved import call
from meshwright.ir.trace.flat_trace import Raw, RawOp, dtype_name, make_op

aten = torch.ops.aten

LIBRARY.define("noise(Tensor like, int dims, str kind, ScalarType dtype) -> Tensor")
LIBRARY.define("noise_of(int[] size, str kind, ScalarType dtype, Device? device=None) -> Tensor")

LIBRARY.define("drop(Tensor input, Tensor noise, float p, bool alpha) -> Tensor")
LIBRARY.define("random_slope(Tensor input, Tensor noise, float lower, float upper) -> Tensor")

UNIFORM, NORMAL = "uniform", "normal"
_DRAW = {UNIFORM: torch.rand, NORMAL: torch.randn}
_CELLS = -1.7580993408473766
"""What alpha dropout puts in place of what it drops: SELU's least value."""


def noise(like: Tensor, dims: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Numbers in the shape of a tensor, which are the same along all but its first `dims` dims."""
    size = (*like.shape[:dims], *(1 for _ in like.shape[dims:]))
    made: Tensor = _DRAW[kind](size, dtype=dtype, device=like.device)
    return made


def noise_of(
    size: list[int], kind: str, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Numbers in this shape."""
    made: Tensor = _DRAW[kind](size, dtype=dtype, device=device)
    return made


def drop(input: Tensor, noise: Tensor, p: float, alpha: bool) -> Tensor:
    """Without what has noise below p, the rest scaled; with `alpha` so that mean and variance are
    as before, if they were 0 and 1."""
    kept = noise >= p
    if not alpha:
        return input * kept.to(input.dtype) / (1 - p)
    a = float(((1 - p) * (1 + p * _CELLS**2)) ** -0.5)
    return torch.where(kept, input, _CELLS) * a - a * _CELLS * p


def random_slope(input: Tensor, noise: Tensor, lower: float, upper: float) -> Tensor:
    """Negative numbers times slopes of their own between the two."""
    return torch.where(input >= 0, input, input * (lower + noise * (upper - lower)))


LIBRARY.impl("drop", drop, "CompositeImplicitAutograd")
LIBRARY.impl("random_slope", random_slope, "CompositeImplicitAutograd")
LIBRARY.impl("noise", noise, "CompositeExplicitAutograd")
LIBRARY.impl("noise_of", noise_of, "CompositeExplicitAutograd")
DROP, RANDOM_SLOPE = torch.ops.meshwright.drop.default, torch.ops.meshwright.random_slope.default
NOISE, NOISE_OF = torch.ops.meshwright.noise.default, torch.ops.meshwright.noise_of.default


def is_random(target: object) -> bool:
    """Whether the operator draws random numbers."""
    return target in (NOISE, NOISE_OF) or torch.Tag.nondeterministic_seeded in getattr(
        target, "tags", ()
    )


def draw_noise(raw: Raw) -> Raw:
    """Computes what is drawn at random, where it can be, from noise of the two kinds."""
    ops: list[RawOp] = []
    for op in raw.ops:
        rewrite = _REWRITES.get(op.name.split(".")[1]) if op.name.startswith("aten.") else None
        if rewrite is None or not rewrite(_Writer(raw, op, ops)):
            ops.append(op)
    raw.ops = ops
    return raw


class _Writer:
    """Writes the calls that stand for one."""

    def __init__(self, raw: Raw, op: RawOp, done: list[RawOp]) -> None:
        self.raw, self.op, self.done = raw, op, done
        self.fake = raw.fakes[op.outputs[0]]
        """Of the result."""

    def arg(self, name: str) -> Arg:
        return self.op.args.get(name)

    def of(self, value: Arg) -> Tensor:
        assert isinstance(value, Ref)
        return self.raw.fakes[value.name]

    def emit(self, target: object, /, **given: Arg) -> Ref:
        op = make_op(target, given, self.op, [""])
        (fake,) = call(op, self.raw.fakes)
        op.outputs = [self.raw.fresh(f"{self.op.outputs[0]}_drawn")]
        self.raw.fakes[op.outputs[0]] = fake
        self.done.append(op)
        return Ref(op.outputs[0])

    def drawn(self, kind: str, like: Arg = None, *, dims: int = -1, wide: bool = False) -> Ref:
        """Noise in the shape of `like`, or of the result."""
        dtype = self.fake.dtype if self.fake.is_floating_point() else torch.float32
        kinds: dict[str, Arg] = {
            "kind": kind, "dtype": dtype_name(torch.float64 if wide else dtype),
        }  # fmt: skip
        if like is None:
            return self.emit(NOISE_OF, size=tuple(self.fake.shape), **kinds)
        rank = self.of(like).ndim
        return self.emit(NOISE, like=like, dims=rank if dims < 0 else min(dims, rank), **kinds)

    def times(self, x: Arg, y: Arg) -> Ref:
        return self.emit(aten.mul.Tensor, self=x, other=y)

    def plus(self, x: Arg, y: Arg) -> Ref:
        return self.emit(aten.add.Tensor, self=x, other=y)

    def to(self, x: Ref, dtype: torch.dtype) -> Ref:
        same = self.of(x).dtype == dtype
        return x if same else self.emit(aten.to.dtype, self=x, dtype=dtype_name(dtype))

    def give(self, x: Ref) -> bool:
        """What the call made is this."""
        x = self.to(x, self.fake.dtype)
        last = self.done[-1]
        assert last.outputs == [x.name]
        last.outputs = list(self.op.outputs)
        self.raw.fakes[self.op.outputs[0]] = self.fake
        return True


def _plain(kind: str) -> Callable[[_Writer], bool]:
    def rewrite(w: _Writer) -> bool:
        return w.give(w.drawn(kind, w.arg("self")))

    return rewrite


def _integers(w: _Writer) -> bool:
    """randint, randint_like and random_: whole numbers from `low` up to but not `high`."""
    low, high = w.arg("low") or w.arg("from") or 0, w.arg("high") or w.arg("to")
    if not isinstance(low, int) or not isinstance(high, int):
        return False
    # In float64: float32 has not enough values for large ranges.
    u = w.times(w.drawn(UNIFORM, w.arg("self"), wide=True), high - low)
    whole = w.to(w.emit(aten.floor.default, self=u), torch.int64)
    return w.give(w.plus(whole, low))


def _bernoulli(w: _Writer) -> bool:
    p = w.arg("p")
    chance = w.arg("self") if p is None else p
    u = w.drawn(UNIFORM, w.arg("self"))
    if isinstance(chance, Ref):
        below = w.emit(aten.lt.Tensor, self=u, other=chance)
    else:
        below = w.emit(aten.lt.Scalar, self=u, other=chance)
    # A cast that is there even to the same dtype: the comparison gives bool.
    return w.give(w.emit(aten.to.dtype, self=below, dtype=dtype_name(w.fake.dtype)))


def _normal(w: _Writer) -> bool:
    mean, std = w.arg("mean"), w.arg("std")
    size = w.arg("self")
    if size is None and w.op.args.get("size") is None:
        # normal(mean, std) of tensors has the shape of both together.
        tensors = [x for x in (mean, std) if isinstance(x, Ref)]
        alike = [x for x in tensors if w.of(x).shape == w.fake.shape]
        if not alike:
            return False
        size = alike[0]
    z = w.drawn(NORMAL, size)
    scaled = z if std == 1 else w.times(z, std)
    return w.give(scaled if mean == 0 else w.plus(scaled, mean))


def _uniform(w: _Writer) -> bool:
    low, high = w.arg("from"), w.arg("to")
    assert isinstance(low, int | float) and isinstance(high, int | float)
    u = w.drawn(UNIFORM, w.arg("self"))
    u = u if high - low == 1 else w.times(u, high - low)
    return w.give(u if low == 0 else w.plus(u, low))


def _minus_log(w: _Writer) -> Ref:
    """-log(1 - u), which is not 0 as far as the numbers can say it."""
    u = w.drawn(UNIFORM, w.arg("self"))
    tiny = torch.finfo(w.fake.dtype if w.fake.is_floating_point() else torch.float32).tiny
    u = w.emit(aten.clamp_min.default, self=u, min=tiny)
    return w.emit(aten.neg.default, self=w.emit(
        aten.log1p.default, self=w.emit(aten.neg.default, self=u)))  # fmt: skip


def _exponential(w: _Writer) -> bool:
    rate = w.arg("lambd")
    return w.give(w.emit(aten.div.Tensor, self=_minus_log(w), other=rate))


def _geometric(w: _Writer) -> bool:
    p = w.arg("p")
    assert isinstance(p, float | int)
    rate = float(-torch.log1p(torch.tensor(-float(p), dtype=torch.float64))) if p < 1 else 1e300
    tries = w.emit(aten.ceil.default, self=w.emit(
        aten.div.Tensor, self=_minus_log(w), other=rate))  # fmt: skip
    return w.give(w.emit(aten.clamp_min.default, self=tries, min=1))


def _cauchy(w: _Writer) -> bool:
    u = w.plus(w.drawn(UNIFORM, w.arg("self")), -0.5)
    turned = w.emit(aten.tan.default, self=w.times(u, torch.pi))
    return w.give(w.plus(w.times(turned, w.arg("sigma")), w.arg("median")))


def _log_normal(w: _Writer) -> bool:
    z = w.times(w.drawn(NORMAL, w.arg("self")), w.arg("std"))
    return w.give(w.emit(aten.exp.default, self=w.plus(z, w.arg("mean"))))


def _rrelu(w: _Writer) -> bool:
    if not w.arg("training"):
        return False
    x = w.arg("self")
    slopes = {"lower": w.arg("lower"), "upper": w.arg("upper")}
    return w.give(w.emit(RANDOM_SLOPE, input=x, noise=w.drawn(UNIFORM, x), **slopes))


def _drops(dims: int, *, alpha: bool) -> Callable[[_Writer], bool]:
    """Drops elements, or what `dims` dims lead to, channels for example."""

    def rewrite(w: _Writer) -> bool:
        x, p = w.arg("input"), w.arg("p")
        if not w.arg("train") or not isinstance(p, float) or not 0 < p < 1:
            return False
        noise = w.drawn(UNIFORM, x, dims=dims)
        return w.give(w.emit(DROP, input=x, noise=noise, p=p, alpha=alpha))

    return rewrite


_REWRITES: dict[str, Callable[[_Writer], bool]] = {
    **dict.fromkeys(("rand", "rand_like"), _plain(UNIFORM)),
    **dict.fromkeys(("randn", "randn_like"), _plain(NORMAL)),
    **dict.fromkeys(("randint", "randint_like", "random"), _integers),
    "bernoulli": _bernoulli,
    **dict.fromkeys(("normal", "normal_functional"), _normal),
    "uniform": _uniform,
    "exponential": _exponential,
    "geometric": _geometric,
    "cauchy": _cauchy,
    "log_normal": _log_normal,
    "rrelu": _rrelu,
    "feature_dropout": _drops(2, alpha=False),
    "alpha_dropout": _drops(-1, alpha=True),
    "feature_alpha_dropout": _drops(2, alpha=True),
}
