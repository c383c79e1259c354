"""Gradients of parameters as the backward of a block makes them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwright.costmodel.block.price_ops import Walk, Where
from meshwright.costmodel.block.reprice import OpStep, PricedInput
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Block
from meshwright.ir.ops import facts

_LINEAR = "aten.linear.default"


class WeightGradients:
    """Gradients of parameters as ops make them. Those of one that several ops of the block read are
    added up before anything else has them: the first is there until the last."""

    def __init__(self, walk: Walk, steps: Sequence[OpStep]) -> None:
        self._walk = walk
        self._roots, self._elements = walk.facts.roots, walk.local.elements
        self._left = Counter([name for step in steps for name, _ in self._of(step)])
        self._waiting: dict[str, int] = {}

    @property
    def several(self) -> bool:
        """Whether several ops read one parameter."""
        return any([count > 1 for count in self._left.values()])

    def reads(self, step: OpStep) -> bool:
        """Whether an op reads a parameter that is trained."""
        return bool(self._of(step) or self.gathered(step))

    def gathered(self, step: OpStep) -> dict[str, int]:
        """Parameter -> bytes of its gradient as an op makes it, of those that lie otherwise than
        the op reads them: it is no parameter's gradient before it is moved."""
        return {
            self._roots.get(name, name): self._elements[operand.value] * operand.own_width
            for name, operand in self._moved(step)
        }

    def part_bytes(self, step: OpStep) -> int:
        """Returns bytes of these once they lie as the parameters do."""
        return sum([stored_bytes(self._walk, name, operand) for name, operand in self._moved(step)])

    def cast_before(self, step: OpStep) -> int:
        """Returns the most that one of these takes in the dtype that the op computes in."""
        narrow = [x for _, x in self._moved(step) if x.width < x.own_width]
        return max([self._elements[x.value] * x.width for x in narrow], default=0)

    def _moved(self, step: OpStep) -> Iterator[tuple[str, PricedInput]]:
        if step.op_class is OpClass.VIEW:
            return
        for name, where, operand in zip(step.op.inputs, step.places[0], step.inputs, strict=True):
            if operand.requires_grad and lies_otherwise(self._walk, name, where, operand):
                yield name, operand

    def place(self, step: OpStep, block: Block) -> int:
        """Where the first parameter that an op reads is among those of its block."""
        own = {name for name, _ in self._of(step)} | self.gathered(step).keys()
        roots = [self._roots.get(name, name) for name in block.params]
        return min([i for i, name in enumerate(roots) if name in own], default=0)

    @property
    def waiting_bytes(self) -> int:
        return sum(self._waiting.values())

    def by(self, step: OpStep) -> tuple[int, int]:
        """Returns bytes of those that an op makes; and of these, of which others wait."""
        own = self._of(step)
        again = [nbytes for name, nbytes in own if name in self._waiting]
        return sum([nbytes for _, nbytes in own]), sum(again)

    def cast_by(self, step: OpStep) -> tuple[int, int]:
        """Returns bytes of the gradients that an op makes of copies that autocast has made of
        parameters, and those of the largest when it is cast back; (0, 0): of none."""
        target = step.op.target
        if not target.startswith("aten.") or facts(target).cpu_casts:
            return 0, 0  # fused operators and cells say themselves what they have
        found = [
            (self._elements[operand.value] * operand.width,
             self._elements[operand.value] * operand.own_width)
            for name, where, operand in zip(
                step.op.inputs, step.places[0], step.inputs, strict=True
            )
            if operand.is_param and operand.requires_grad and operand.width < operand.own_width
            and not lies_otherwise(self._walk, name, where, operand)
        ]  # fmt: skip
        return sum([made for made, _ in found]), max([wide for _, wide in found], default=0)

    def sum_bytes(self, step: OpStep) -> int:
        """Returns the most that a sum takes beside its two terms: autograd adds to the first in
        place, unless that is a view, as those of a linear layer are."""
        if step.op.target != _LINEAR:
            return 0
        return max([nbytes for name, nbytes in self._of(step) if name in self._waiting], default=0)

    def waits(self, step: OpStep) -> None:
        """The op has run."""
        for name, nbytes in self._of(step):
            self._left[name] -= 1
            self._waiting[name] = nbytes
            if not self._left[name]:
                del self._waiting[name]

    def _of(self, step: OpStep) -> list[tuple[str, int]]:
        if step.op_class is OpClass.VIEW:
            return []
        return [
            (self._roots.get(name, name), self._elements[operand.value] * operand.own_width)
            for name, where, operand in zip(
                step.op.inputs, step.places[0], step.inputs, strict=True
            )
            if operand.is_param and operand.requires_grad
            and not lies_otherwise(self._walk, name, where, operand)
        ]  # fmt: skip


def lies_otherwise(walk: Walk, name: str, where: Where, operand: PricedInput) -> bool:
    """Tells whether a parameter is stored in other parts than an op reads."""
    return operand.is_param and walk.normal(where) != walk.normal(walk.placed.get(name, {}))


def stored_bytes(walk: Walk, name: str, operand: PricedInput) -> int:
    """Returns bytes of a parameter as it is stored, in its own dtype."""
    where = walk.placed.get(name)
    number = operand.value if where is None else walk.local.number(name, where)
    return walk.local.elements[number] * operand.own_width
