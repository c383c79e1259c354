"""Every strategy of every op of every model, on simulated ranks, against the whole op."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph, Op, Ref
from meshwright.ir.layout.layout import Axis, Strategy
from meshwright.ir.trace.declared import mix_experts
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.candidate_splits import spread
from meshwright.planner.inside.data_layout import is_state, solve_data, taken_dims
from meshwright.planner.inside.factors import (
    AxisKind,
    Split,
    allowed,
    split_of,
    strategies,
    with_together,
)
from meshwright.planner.inside.segments import LayoutSegment
from meshwright.testing.models import CASES
from tests.planner.simulated_ops import Whole, check_strategy, run_whole, whole_of
from tests.traces import zoo_graph

BATCH = 8


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _strategies(graph: Graph, size: int) -> Iterator[tuple[Op, str, Axis, Strategy]]:
    """What the solver chooses from: `size` ranks of tp, and of dp with uneven shares."""
    data = solve_data(graph)
    shares = Axis(size, (BATCH - size + 1, *[1] * (size - 1)), BATCH)
    axis = AxisKind(1, BATCH)
    for segment, laid in zip(data.segments, data.laid, strict=True):
        for op in segment.ops:
            splits = data.splits[op.name]
            for strategy in strategies(op, segment.rules[op.name], graph, axis, splits):
                yield op, "dp", shares, strategy
        tensor = _tensor_splits(graph, segment, AxisKind(size), taken_dims(segment, laid, BATCH))
        for op in segment.ops:
            found = strategies(op, segment.rules[op.name], graph, AxisKind(size), tensor[op.name])
            for strategy in found:
                yield op, "tp", Axis(size), strategy


def _tensor_splits(
    graph: Graph, segment: LayoutSegment, axis: AxisKind, taken: dict[str, dict[int, int]]
) -> dict[str, tuple[Split, ...]]:
    return spread(
        segment.ops, segment.rules, axis, taken=taken, seeds={}, natural=lambda op: True,
        barred=lambda name: is_state(graph, name, parameters=False),
    )[0]  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_splits_spread_until_nothing_new_appears(name: str) -> None:
    """Whatever a value of an op may be split by leads to nothing that the op has not."""
    case, axis = CASES[name], AxisKind(2)
    graph = zoo_graph(case, BATCH, torch.float32)
    data, looked_at = solve_data(graph), 0
    for segment, laid in zip(data.segments, data.laid, strict=True):
        taken = taken_dims(segment, laid, BATCH)
        found, shards = spread(
            segment.ops, segment.rules, axis, taken=taken, seeds={}, natural=lambda op: True
        )
        for op in segment.ops:
            if (rule := segment.rules[op.name]) is None:
                continue
            places = zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True)
            for value, dims in places:
                for shard in shards.get(value, ()):
                    split = split_of(rule, dims, shard, axis)
                    for one in with_together(rule, split, axis) if split else ():
                        looked_at += 1
                        assert one in found[op.name] or not allowed(op, rule, one, axis, taken)
    assert looked_at > 100


def _kind(op: Op, graph: Graph) -> str:
    """Equal for ops that do the same on equal shapes."""
    shapes = [graph.tensors[name].shape for name in op.inputs]
    plain = [(key, arg) for key, arg in op.args if not isinstance(arg, Ref | tuple)]
    return f"{op.target} {plain} {shapes}"


def _check_every(graph: Graph, model: nn.Module, inputs: dict[str, Tensor], size: int) -> None:
    """Each strategy of each op does what the whole op does."""
    values = run_whole(graph, model, inputs)
    done: set[object] = set()
    failures: list[str] = []
    wholes: dict[str, Whole] = {}
    for op, axis_name, axis, strategy in _strategies(graph, size):
        kind = (_kind(op, graph), axis_name, strategy)
        if kind in done:
            continue
        done.add(kind)
        if op.name not in wholes:
            wholes[op.name] = whole_of(op, graph, values)
        try:
            check_strategy(op, graph, wholes[op.name], strategy, axis_name, axis)
        except (AssertionError, RuntimeError, PlanError, IndexError) as error:
            failures.append(f"{op.key} {op.target} {axis_name}: {strategy}: {error}")
    assert not failures, "\n\n".join(failures)
    assert len(done) > 10


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_every_strategy_computes_the_op(name: str, size: int) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().double()
    batch = case.batch(BATCH, torch.Generator().manual_seed(1))
    pairs = batch.items() if isinstance(batch, dict) else enumerate(batch)
    inputs = {str(key): _double(value) for key, value in pairs}
    _check_every(zoo_graph(case, BATCH), model, inputs, size)


class ExpertForms(nn.Module):
    """Layers of experts whose weights are stored in three ways, with biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        count, width, inner = 6, 4, 6
        shapes = {
            "router": (width, count),
            "turned": (count, width, 2 * inner), "gate": (count, inner, width),
            "up": (count, inner, width), "alone": (count, inner, width),
            "turned_down": (count, inner, width), "down": (count, width, inner),
            "double_bias": (count, 2 * inner), "bias": (count, inner), "last_bias": (count, width),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = (x @ self.router).softmax(-1).topk(2)
        x = mix_experts(
            x, index, weights, self.turned, self.down, gate_up_bias=self.double_bias,
            down_bias=self.last_bias, form="transposed_first interleaved",
        )  # fmt: skip
        x = mix_experts(
            x, index, weights, self.gate, self.turned_down, up=self.up,
            gate_up_bias=self.double_bias, form="transposed_last",
        )  # fmt: skip
        x = mix_experts(
            x, index, weights, self.alone, self.down, act="relu", gate_up_bias=self.bias,
            down_bias=self.last_bias, form="scaled_input",
        )  # fmt: skip
        return x.pow(2).sum()


@pytest.mark.parametrize("size", [2, 3])
def test_every_strategy_of_experts_however_they_are_stored(size: int) -> None:
    model = ExpertForms().double()
    drawn = torch.randn(
        BATCH, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    _check_every(trace(model, {"x": drawn}), model, {"x": drawn}, size)
