"""Memory in narrow and wide numbers on a CPU: predicted beside tracked bytes of tensors."""

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright.testing.apart_libraries import with_library
from tests.told_memory import told_of_held

WORDS, TOKENS = 128, 64


class _Language(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids).logits[:, :-1].float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _gpt2() -> nn.Module:
    """Its GELU is of powers: in float32 under autocast on GPUs, not on CPUs."""
    drops = {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=WORDS, n_positions=TOKENS, n_embd=64, n_layer=2, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0, **drops,
    ))  # fmt: skip


def _llama() -> nn.Module:
    """Several products read one value, which each of them casts for itself."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
        use_cache=False,
    ))  # fmt: skip


CASES = [
    *((make, precision) for make in (_gpt2, _llama) for precision in ("bf16-autocast", "bf16")),
    (_llama, "fp8-rowwise"), (_llama, "fp8-tensorwise"), (_llama, "fp64"),
]  # fmt: skip
"""GPT-2's products are no linear layers, which alone are of 8-bit floats."""


@pytest.mark.parametrize(("make", "precision"), CASES)
def test_predicted_memory_is_what_tensors_hold(make, precision) -> None:
    with_library("torchao")
    torch.manual_seed(0)
    model, data = _Language(make()), (torch.randint(WORDS, (8, TOKENS)),)
    if precision == "fp64":
        model.double()  # its norms and angles are in float32 all the same
    assert told_of_held(model, data, precision) == pytest.approx(1.0, abs=0.01)


class _PartsOfOwn(nn.Module):
    """A layer in float64 and one value in bfloat16, in a model in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.wide, self.down = (
            nn.Linear(64, 64),
            nn.Linear(64, 64).double(),
            nn.Linear(64, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(torch.tanh(self.up(x)).double())).float()
        return self.down(torch.tanh(x.bfloat16()).float()).square().mean()


def test_parts_in_numbers_of_their_own_are_held_so() -> None:
    torch.manual_seed(0)
    found = told_of_held(_PartsOfOwn(), (torch.randn(512, 64),), "fp32", "adamw")
    assert found == pytest.approx(1.0, abs=0.001)
