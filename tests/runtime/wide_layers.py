"""One layer each of models of Hugging Face as wide as they are: GPT-2 medium, Llama 3.2 1B."""

from torch import nn


def gpt2(dropout: float) -> nn.Module:
    """With its words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        n_embd=1024, n_layer=1, n_head=16, use_cache=False, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout,
    ))  # fmt: skip


def llama(dropout: float) -> nn.Module:
    """With a tenth of its words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=12800, tie_word_embeddings=True, use_cache=False,
        attention_dropout=dropout,
    ))  # fmt: skip
