"""The model zoo, lowered and run on simulated ranks, against the models themselves."""

from typing import Any

import pytest
import torch

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.lower import lower
from meshwright.ir.trace.loss_module import flatten_batch
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.testing.models import CASES
from meshwright.testing.split_all import split_all
from tests.codegen.equality import plan_of, run_plan, samples_of, whole_tensor
from tests.codegen.zoo import traced, wanted

ROUNDED = {"mixtral": 1e-12, "t5": 1e-12}
"""Experts run as one op of our own, and a weight that is used three times adds up its gradients in
another order: equal up to rounding, not to the bit."""
BATCH_NORM = ("resnet50",)
"""Their statistics are those of a micro-batch, so micro-batches differ from one process."""


def compare(name: str, tp: int, shares: tuple[int, ...], count: int, tolerance: float) -> None:
    case, model, graph = traced(name)
    loss, grads = wanted(name)
    plan = plan_of(graph, split_all(graph, tp), shares, count)
    found_loss, found = run_plan(model, graph, plan, flatten_batch(case.example()))
    torch.testing.assert_close(found_loss, loss, rtol=tolerance, atol=0)
    assert set(found) == set(grads)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for path, grad in found.items():
        torch.testing.assert_close(
            grad, grads[path], rtol=tolerance, atol=tolerance * largest, msg=path
        )


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_the_trivial_plan_is_the_model_to_the_bit(name: str) -> None:
    compare(name, 1, (CASES[name].batch_size,), 1, ROUNDED.get(name, 0.0))


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("tp", "shares", "count"),
    [(1, (3, 1), 2), (2, (8,), 1), (2, (5, 3), 1), (4, (2, 2), 2), (3, (2,), 4)],
)
def test_a_split_model_is_the_model(
    name: str, tp: int, shares: tuple[int, ...], count: int
) -> None:
    if name in BATCH_NORM and count > 1:
        shares, count = tuple(share * count for share in shares), 1
    compare(name, tp, shares, count, 1e-10)


def test_stages_of_a_model_with_tied_weights() -> None:
    case, model, graph = traced("gpt2")
    plan = plan_of(graph, split_all(graph, 2), (3, 1), 2, cuts=(1, 3))
    found_loss, _ = run_plan(model, graph, plan, flatten_batch(case.example()))
    torch.testing.assert_close(found_loss, wanted("gpt2")[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "bert_mlm", "dlrm", "gnmt"])
def test_the_written_source_of_a_model_runs(name: str) -> None:
    case, model, graph = traced(name)
    plan = plan_of(graph, solve_layouts(graph, ()), (8,))
    (program,) = lower(graph, plan, 0)
    assert max(map(len, program.source.splitlines())) <= 100
    written: dict[str, Any] = {}
    exec(compile(program.source, f"{name}.py", "exec"), written)
    comm = Comm({}, {"dp": 1, "tp": 1}, {"dp": 0, "tp": 0})
    tensors = {p.name: whole_tensor(model, graph, p.name) for p in program.params}
    tensors |= samples_of(graph, flatten_batch(case.example()), 0, 8)
    if program.totals:
        tensors |= written["totals"](comm, tensors)
    assert torch.equal(written["forward"](comm, tensors)[program.loss], wanted(name)[0])
