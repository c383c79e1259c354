"""Models whose parameters are whole while space, sequence and experts are split: what follows is
attention in rings, halos and tokens that travel, and it is the model itself."""

import pytest
import torch

from meshwright.ir.plan.plan import model_mesh
from meshwright.ir.trace.loss_module import flatten_batch
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from tests.codegen.equality import plan_of, run_plan
from tests.codegen.quick import QUICK
from tests.codegen.zoo import traced, wanted

CASES = [
    ("llama", {"cp": 3, "tp": 2}, (3, 1), "S(2) S(2) S(2) -> S(2)"),
    ("bert_mlm", {"cp": 3}, (8,), "S(2) S(2) S(2) S(2) -> S(2)"),
    ("mixtral", {"cp": 2, "ep": 2}, (3, 1),
     "S(0,outer=16) S(0,outer=16) S(0,outer=16) S(0) S(0) -> S(0,outer=16)"),
    ("vgg19", {"cp": 2}, (5, 3), "S(2) R|P R|P -> S(2)"),
    ("resnet50", {"cp": 2}, (8,), "S(2) R|P -> S(2)"),
]  # fmt: skip
"""Model, mesh, shares of the batch, and a strategy that must be among those that are chosen."""


@pytest.mark.parametrize(("name", "mesh", "shares", "strategy"), CASES)
def test_parts_brought_together_inside_are_the_model(
    name: str, mesh: dict[str, int], shares: tuple[int, ...], strategy: str
) -> None:
    case, model, graph = traced(name)
    loss, grads = wanted(name)
    axes = model_mesh(mesh)
    layouts = solve_layouts(graph, axes, usual(axes, QUICK))
    assert any(strategy in texts.values() for one in layouts for texts in one.ops.values())
    plan = plan_of(graph, layouts, shares, graph.batch_size // sum(shares))
    found_loss, found = run_plan(model, graph, plan, flatten_batch(case.example()))
    torch.testing.assert_close(found_loss, loss, rtol=1e-10, atol=0)
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for path, grad in found.items():
        near = {"rtol": 1e-10, "atol": 1e-10 * largest}
        torch.testing.assert_close(grad, grads[path], **near, msg=path)
