"""Models whose parameters are whole while space, sequence and experts are split: what follows is
attention in rings, halos and tokens that travel, and it is the model itself."""

import pytest
import torch

from benchmarks.moe_families import SAMPLES, TOKENS, WIDTH, MoeStep, layer_of, layers_of
from meshwright.ir.plan.plan import model_mesh
from meshwright.ir.trace.loss_module import flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.planner.across.model_space import num_experts
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from tests.codegen.equality import plan_of, run_plan
from tests.codegen.quick import QUICK
from tests.codegen.zoo import traced, wanted

ZIGZAG = "S(2,outer=2,zigzag)"
CASES = [
    ("llama", {"cp": 3, "tp": 2}, (3, 1), "S(2) S(2) S(2) -> S(2)"),
    ("llama", {"cp": 4, "tp": 2}, (2,), " ".join([ZIGZAG] * 3) + f" -> {ZIGZAG}"),
    ("bert_mlm", {"cp": 3}, (8,), "S(2) S(2) S(2) S(2) -> S(2)"),
    ("mixtral", {"cp": 3, "ep": 2}, (3, 1),
     "S(0,outer=8) S(0,outer=8) S(0,outer=8) S(0) S(0) -> S(0,outer=8)"),
    ("vgg19", {"cp": 2}, (5, 3), "S(2) R|P R|P -> S(2)"),
    ("resnet50", {"cp": 2}, (8,), "S(2) R|P -> S(2)"),
]  # fmt: skip
"""Model, mesh, shares of the batch, and a strategy that must be among those that are chosen."""


@pytest.mark.sampled
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


def test_experts_of_which_parameters_are_only_views_lie_where_tokens_travel() -> None:
    """DBRX has the matrices of all experts one under the other."""
    step = MoeStep(layer_of(next(layers_of("dbrx"))))
    batch = {"x": torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)}
    graph = trace(step, batch)
    assert num_experts(graph) == 4
    axes = model_mesh({"ep": 2})
    layouts = solve_layouts(graph, axes, usual(axes, QUICK))
    held = {path: texts for one in layouts for path, texts in one.parameters.items()}
    assert {texts["ep"] for path, texts in held.items() if "mlp" in path} == {"S(0)"}
    expected = step(**batch)
    expected.backward()
    plan = plan_of(graph, layouts, (1,), graph.batch_size)
    loss, found = run_plan(step, graph, plan, batch)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
    for path, grad in found.items():
        wanted_grad = step.get_parameter(path).grad
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-10, atol=1e-7, msg=path)
