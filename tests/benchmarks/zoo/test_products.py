"""Products of families whose code is unlike others', beside torch's counter."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.zoo.configs import hf
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.ops import facts
from meshwright.ir.trace.trace import trace

_PRODUCTS = (OpClass.MATMUL, OpClass.CONVOLUTION, OpClass.ATTENTION)
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("Qwen3_5", _DELTA),
        ("HYV4", {**_LATENT, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
                  "num_hidden_layers": 1}),
        ("Dots1", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                   "n_shared_experts": 1, "moe_intermediate_size": 32, "n_routed_experts": 4,
                   "num_experts_per_tok": 2}),
        ("Lfm2Moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
        ("HunYuanMoEV1", {"head_dim": 8, "moe_topk": 2}),
    ],
)  # fmt: skip
def test_products_are_those_that_torch_counts(name: str, own: dict[str, Any]) -> None:
    """Its counter knows no triangular system, and sees a state of a delta rule that is made after
    the last chunk, where nobody reads it."""
    model = hf(f"{name}ForCausalLM", attn_implementation="eager", **own)().train()
    tokens = torch.randint(4, 60, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(**batch)
    ops = [op for op in trace(model, batch).ops if facts(op.target).op_class in _PRODUCTS]
    ours = sum(op.flops for op in ops if "solve_triangular" not in op.target)
    assert ours == pytest.approx(counted.get_total_flops(), rel=0.03)
