"""What a pattern looks at, and what it answers."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from meshwright.ir.graph.graph import Arg, Ref
from meshwright.ir.graph.operators import operator
from meshwright.ir.graph.saved import call
from meshwright.ir.trace.flat_trace import Raw, RawOp, make_op


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """Calls, and the fused one that makes what others need of them."""

    replaced: tuple[RawOp, ...]
    op: RawOp
    """Outputs have the names of those that they replace, "" where nothing had them."""
    at: RawOp
    """Of those replaced, the one in whose place it comes."""
    before: tuple[RawOp, ...] = ()
    """Calls that bring its operands into form, each with results of new names."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a place that looks right is not."""

    why: str


@dataclass(slots=True)
class Flow:
    """Who makes and who reads each value of a traced step."""

    raw: Raw
    makers: dict[str, RawOp] = field(default_factory=dict)
    readers: dict[str, list[RawOp]] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Raw) -> "Flow":
        flow = cls(raw)
        for op in raw.ops:
            flow.makers.update((name, op) for name in op.outputs if name)
            for name in op.outputs:
                flow.readers.setdefault(name, [])
            for name in dict.fromkeys(op.inputs):
                flow.readers.setdefault(name, []).append(op)
        return flow

    def maker(self, value: Arg, *names: str) -> RawOp | None:
        """The call that makes a value, if it is one of these operators."""
        op = self.makers.get(value.name) if isinstance(value, Ref) else None
        return op if op and op.name in names else None

    def shape(self, value: Arg) -> tuple[int, ...]:
        """() for what is no tensor."""
        return tuple(self.raw.fakes[value.name].shape) if isinstance(value, Ref) else ()

    def dtype(self, value: Arg) -> torch.dtype | None:
        return self.raw.fakes[value.name].dtype if isinstance(value, Ref) else None

    def uncast(self, value: Arg) -> tuple[Arg, tuple[RawOp, ...]]:
        """A value before casts, and the casts."""
        casts: list[RawOp] = []
        while op := self.maker(value, "aten.to.dtype"):
            casts.append(op)
            value = op.args["self"]
        return value, tuple(casts)

    def is_widened(self, casts: tuple[RawOp, ...]) -> bool:
        """Whether there is one cast, and it does not round."""
        if len(casts) != 1:
            return False
        old, new = (self.raw.fakes[n] for n in (casts[0].inputs[0], casts[0].outputs[0]))
        floating = old.is_floating_point() and new.is_floating_point()
        return floating and new.element_size() >= old.element_size()

    def with_example(self, op: RawOp) -> RawOp:
        """A new call with one result, which has a name and an example now."""
        (value,) = call(op, self.raw.fakes)
        name = self.raw.fresh(op.name.split(".")[1])
        wanted = any(self.raw.fakes[n].requires_grad for n in op.inputs)
        self.raw.fakes[name] = value.detach().requires_grad_(wanted)
        return replace(op, outputs=[name])

    def has_gradient(self, value: Arg) -> bool:
        return isinstance(value, Ref) and self.raw.fakes[value.name].requires_grad


def first_free(flow: Flow, add: RawOp, last: RawOp, *operands: Arg) -> RawOp:
    """The sum's place for a kernel that makes it too, unless an operand is only made later."""
    made = any(isinstance(value, Ref) and value.name in flow.makers for value in operands)
    return last if made else add


def either_way(op: RawOp) -> Iterator[tuple[Arg, Arg]]:
    """Both orders of the operands of a sum or product."""
    first, second = op.args["self"], op.args["other"]
    yield first, second
    yield second, first


def kernel_call(name: str, given: dict[str, Arg], like: RawOp, outputs: list[str]) -> RawOp:
    """A call of one of our operators."""
    return make_op(operator(f"meshwright.{name}.default"), given, like, outputs)


def residual_sum(flow: Flow, value: Arg, norm: RawOp) -> RawOp | None:
    """The sum that is normalised, if the same module or one around it makes it."""
    add = flow.maker(value, "aten.add.Tensor")
    if add is None or add.args["alpha"] != 1:
        return None
    first, second = add.args["self"], add.args["other"]
    within = norm.path == add.path or norm.path.startswith(f"{add.path}." if add.path else "")
    equal = flow.shape(first) == flow.shape(second) == flow.shape(value) != ()
    return add if equal and within else None
