"""One op, split over several axes at once on simulated ranks, against the whole op, both ways."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.codegen.collectives.comm import Comm, SentCollective
from meshwright.codegen.lower.local import form_of
from meshwright.ir.graph.graph import Arg, Kind, Op, Ref
from meshwright.ir.graph.graph import Tensor as Value
from meshwright.ir.graph.images import is_channels_last
from meshwright.ir.graph.op_site import OpSite
from meshwright.ir.graph.operators import operator
from meshwright.ir.layout.layout import RP, Axis, P, Placement, Strategy, parse_strategy
from meshwright.testing.simulated import coordinates_of, evaluate, simulate
from meshwright.testing.whole_values import part as part_on

Where = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """An op with its arguments; tensors among them become its inputs."""

    target: str
    args: Mapping[str, Arg | Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self.args.values() if isinstance(x, Tensor)]

    def leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        kept = (x.detach().clone() for x in tensors)
        return [x.requires_grad_() if x.is_floating_point() else x for x in kept]

    def site(
        self, strategies: Mapping[str, Strategy], output: tuple[int, ...], comm: Comm
    ) -> OpSite:
        args: dict[str, Arg] = {}
        known: dict[str, Value] = {}
        for name, arg in self.args.items():
            if isinstance(arg, Tensor):
                args[name], known[name] = Ref(name), _value(name, tuple(arg.shape), arg)
            else:
                args[name] = arg
        known["made"] = _value("made", output, self.tensors[0])
        op = Op("op", "op", self.target, tuple(args.items()), tuple(known)[:-1], ("made",), "")
        axes = {axis: Axis(size) for axis, size in comm.sizes.items()}
        return OpSite(op, known, strategies, axes, comm.coordinates)

    def run(
        self, comm: Comm, strategies: Mapping[str, Strategy], output: tuple[int, ...],
        inputs: Sequence[Tensor], grad: Tensor | None,
    ) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
        """The result and the gradients of the inputs."""
        leaves = self.leaves(inputs)
        (made,) = evaluate(form_of(self.site(strategies, output, comm)), comm, leaves)
        made.backward(torch.ones_like(made) if grad is None else grad)
        return made.detach(), [x.grad for x in leaves]


def _value(name: str, shape: tuple[int, ...], like: Tensor) -> Value:
    dtype = str(like.dtype).removeprefix("torch.")
    return Value(
        name, shape, dtype, Kind.ACTIVATION, requires_grad=like.is_floating_point(),
        channels_last=is_channels_last(like),
    )  # fmt: skip


def part(x: Tensor, layout: Mapping[str, Placement], sizes: Where, at: Where) -> Tensor:
    """What the rank at these coordinates holds of a value that is split on some axes, in other
    dims each."""
    for axis, placement in layout.items():
        x = part_on(x, placement, Axis(sizes[axis]), at[axis])
    return x


def check(
    case: Case, strategies: Mapping[str, str], sizes: dict[str, int]
) -> list[list[SentCollective]]:
    """What each rank sent; raises unless the ranks together do what the op does."""
    parsed = {axis: parse_strategy(text) for axis, text in strategies.items()}
    alone = Comm({}, dict.fromkeys(sizes, 1), dict.fromkeys(sizes, 0))
    made: Tensor = operator(case.target)(**case.args)
    shape = tuple(made.shape)
    grad = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    whole, whole_grads = case.run(alone, {}, shape, case.tensors, grad)
    outputs = {axis: strategy.outputs[0] for axis, strategy in parsed.items()}
    inputs = [{a: s.inputs[i] for a, s in parsed.items()} for i in range(len(case.tensors))]

    logs: dict[tuple[int, ...], list[SentCollective]] = {}

    def body(comm: Comm) -> tuple[Tensor, list[Tensor | None]]:
        at = comm.coordinates
        comm.log = logs[tuple(at.values())] = []
        mine = [part(x, p, sizes, at) for x, p in zip(case.tensors, inputs, strict=True)]
        return case.run(comm, parsed, shape, mine, part(grad, outputs, sizes, at))

    results = simulate(sizes, body)
    places = [coordinates_of(sizes, rank) for rank in range(len(results))]

    def compare(expected: Tensor, layout: Mapping[str, Placement], found: list[Tensor]) -> None:
        summed = [axis for axis, placement in layout.items() if placement in (P, RP)]
        for at in places:
            kept = [
                x
                for other, x in zip(places, found, strict=True)
                if all(other[axis] == at[axis] for axis in sizes if axis not in summed)
            ]
            torch.testing.assert_close(sum(kept), part(expected, layout, sizes, at))

    compare(whole, outputs, [made for made, _ in results])
    for i, expected in enumerate(whole_grads):
        if expected is not None:
            compare(expected, inputs[i], [g for _, grads in results if (g := grads[i]) is not None])
    return [logs[place] for place in sorted(logs)]
