"""Language models of Hugging Face with few layers, whose memory is told beside what they hold."""

from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)


def gpt2(words: int, tokens: int, width: int, heads: int, layers: int = 2) -> nn.Module:
    """Its GELU is of powers: in float32 under autocast on GPUs, not on CPUs."""
    drops = {name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=words, n_positions=tokens, n_embd=width, n_layer=layers, n_head=heads,
        use_cache=False, bos_token_id=0, eos_token_id=0, **drops,
    ))  # fmt: skip


def llama(words: int, tokens: int, width: int, hidden: int, heads: int) -> nn.Module:
    """Several products read one value, which each of them casts for itself under autocast. Two
    heads of queries look at one of keys."""
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=hidden, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=tokens,
        use_cache=False,
    ))  # fmt: skip


def mixtral(words: int, tokens: int, width: int, hidden: int, heads: int) -> nn.Module:
    """Of four experts two have each token."""
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=words, hidden_size=width, intermediate_size=hidden, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=tokens,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    ))  # fmt: skip


class Language(nn.Module):
    """Its loss, of the words that it reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(ids, labels=ids).loss
        return loss
