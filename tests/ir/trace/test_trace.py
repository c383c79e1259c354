"""The traced graph computes what the model computes: loss, gradients and buffers in float64."""

from copy import deepcopy

import pytest
import torch

from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.trace.loss_module import TrainingStep, flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret
from meshwright.testing.models import CASES, ModelCase
from tests.traces import zoo_graph


@pytest.fixture(scope="module", params=sorted(CASES))
def traced(request: pytest.FixtureRequest) -> tuple[ModelCase, Graph]:
    case = CASES[request.param]
    return case, zoo_graph(case)


def test_same_loss_and_gradients(traced: tuple[ModelCase, Graph]) -> None:
    case, graph = traced
    batch = case.example(seed=3)
    eager, ours = case.model(), case.model()
    inputs = flatten_batch(batch)
    expected = TrainingStep(eager, case.loss_fn, tuple(inputs))(*inputs.values())
    expected.backward()
    values = interpret(graph, ours, batch)
    values[graph.loss].backward()
    torch.testing.assert_close(values[graph.loss], expected, rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None or not q.grad.any(), name
        else:
            assert q.grad is not None, name
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-11, atol=1e-12, msg=name)
    for (name, b), c in zip(eager.named_buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(c, b, rtol=1e-12, atol=1e-12, msg=name)


def test_tensors_are_described_rightly(traced: tuple[ModelCase, Graph]) -> None:
    case, graph = traced
    for name, value in interpret(graph, case.model(), case.example()).items():
        tensor = graph.tensors[name]
        assert tensor.shape == tuple(value.shape), name
        assert tensor.dtype == str(value.dtype).removeprefix("torch."), name
        assert tensor.requires_grad == value.requires_grad, name


def test_blocks_cover_the_ops(traced: tuple[ModelCase, Graph]) -> None:
    _, graph = traced
    at = graph.prelude
    for block in graph.blocks:
        assert block.start == at < block.stop
        at = block.stop
    assert at == len(graph.ops)
    assert len({b.name for b in graph.blocks}) == len(graph.blocks)
    by_pattern: dict[str, set[str]] = {}
    for block in graph.blocks:
        by_pattern.setdefault(block.pattern, set()).add(block.signature)
    assert all(len(signatures) == 1 for signatures in by_pattern.values())
    for ops in (graph.prelude_ops, *map(graph.block_ops, graph.blocks)):
        assert len({op.key for op in ops}) == len(ops)


def test_equal_blocks_correspond(traced: tuple[ModelCase, Graph]) -> None:
    _, graph = traced
    first = {b.pattern: b for b in graph.distinct_blocks()}
    for block in graph.blocks:
        other = first[block.pattern]
        pairs = zip(
            block.inputs + block.outputs + block.params,
            other.inputs + other.outputs + other.params,
            strict=True,
        )
        for a, b in ((graph.tensors[x], graph.tensors[y]) for x, y in pairs):
            assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        keys = [op.key for op in graph.block_ops(block)]
        assert keys == [op.key for op in graph.block_ops(other)]


def test_every_value_is_made_before_it_is_read(traced: tuple[ModelCase, Graph]) -> None:
    _, graph = traced
    known = {n for n, t in graph.tensors.items() if t.kind is not Kind.ACTIVATION}
    for op in graph.ops:
        assert known.issuperset(op.inputs)
        known.update(op.outputs)


def test_model_is_left_as_it_was(traced: tuple[ModelCase, Graph]) -> None:
    case, _ = traced
    model = case.model().eval()
    before = deepcopy(model.state_dict())
    config = str(getattr(model, "config", ""))
    trace(model, case.example(), case.loss_fn)
    assert not model.training
    assert str(getattr(model, "config", "")) == config
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_batch_size_is_asked_for_not_given(traced: tuple[ModelCase, Graph]) -> None:
    case, graph = traced
    other = trace(case.model(), case.example(2), case.loss_fn, global_batch_size=8)
    assert other.fingerprint == graph.fingerprint
    assert [b.signature for b in other.blocks] == [b.signature for b in graph.blocks]
    bigger = trace(case.model(), case.example(2), case.loss_fn, global_batch_size=12)
    assert bigger.batch_size == 12
    assert bigger.fingerprint == graph.fingerprint
