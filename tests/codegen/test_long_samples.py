"""Long samples in parts, as whole models: windows, sinks, mixed layers and documents in one row."""

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import model_mesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.layout_objective import usual
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.testing.double import all_double
from tests.codegen.equality import plan_of, run_plan
from tests.codegen.quick import QUICK

SMALL = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "max_position_embeddings": 64, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
IDS = torch.randint(1, 40, (4, 16), generator=torch.Generator().manual_seed(1))
CASES = {
    "mixed": (Gemma3ForCausalLM, Gemma3TextConfig(
        **SMALL, sliding_window=5, query_pre_attn_scalar=6,
        layer_types=["sliding_attention", "full_attention"])),
    "sinks": (GptOssForCausalLM, GptOssConfig(
        **SMALL, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="eager")),
    "documents": (LlamaForCausalLM, LlamaConfig(**SMALL)),
}  # fmt: skip
POSITIONS = torch.tensor([[*range(7), *range(9)], [*range(16)], [*range(1), *range(15)],
                          [*range(4), *range(4), *range(8)]])  # fmt: skip
"""Of documents that follow each other in a row."""
RINGS = {
    "mixed": {"S(2,outer=2,zigzag) S(2,outer=2,zigzag) S(2,outer=2,zigzag) ->"},
    "sinks": {"S(2) S(2) S(2) R|P ->"},
    "documents": {"S(2) S(2) S(2) S(2) ->"},
}  # fmt: skip
"""Of attention where there are more ranks than heads."""


def step_of(name: str) -> tuple[Any, dict[str, torch.Tensor], Graph]:
    kind, config = CASES[name]
    torch.manual_seed(0)
    batch = {"input_ids": IDS, "labels": IDS}
    if name == "documents":
        batch["position_ids"] = POSITIONS
    with all_double():
        model = kind(config).double().train()
        return model, batch, trace(model, batch)


def test_windows_and_sinks_are_operators_and_no_mask_is_made() -> None:
    for name, windows in (("mixed", [5, None]), ("sinks", [5, 0])):
        graph = step_of(name)[2]
        seen = [dict(op.args).get("window") for op in graph.ops if "attention" in op.target]
        assert seen == windows
        assert not any(
            graph.tensors[n].shape[-2:] == (16, 16) for op in graph.ops for n in op.outputs
        )


@pytest.mark.parametrize("name", CASES)
def test_parts_of_long_samples_are_the_model(name: str) -> None:
    """Rings in zigzag and in runs, windows that fetch, heads, and pipeline stages."""
    model, batch, graph = step_of(name)
    with all_double():
        wanted = model(**batch).loss
        wanted.backward()
    grads = {path: p.grad for path, p in model.named_parameters()}
    largest = max(float(g.abs().max()) for g in grads.values() if g is not None)
    meshes: tuple[tuple[dict[str, int], tuple[int, ...], set[str]], ...] = (
        ({"cp": 8}, (), RINGS[name]), ({"cp": 2, "tp": 2}, (2,), set()),
    )  # fmt: skip
    for mesh, cuts, rings in meshes:
        axes = model_mesh(mesh)
        layouts = solve_layouts(graph, axes, usual(axes, QUICK), split_borders=True)
        placed = [texts.get("cp", "") for one in layouts for texts in one.ops.values()]
        assert all(any(text.startswith(ring) for text in placed) for ring in rings)
        plan = plan_of(graph, layouts, (2,), 2, cuts)
        loss, found = run_plan(model, graph, plan, batch)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=0)
        for path, grad in found.items():
            torch.testing.assert_close(
                grad, grads[path], rtol=1e-9, atol=1e-10 * largest, msg=f"{mesh} {path}"
            )
