"""Models of Hugging Face that have the shape of a published one."""

from dataclasses import dataclass
from typing import Any

import peft
import transformers
from torch import nn

from benchmarks.published.measured import RowError
from benchmarks.published.shapes import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA of peft: what is trained beside a frozen model."""

    rank: int
    only: tuple[str, ...]
    """Names of the layers that have one."""
    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """What a model is made of."""

    shape: Shape
    flash: bool = True
    """Flash attention; otherwise products, a softmax and what lies between."""
    dropout: float = 0.0
    squared: bool = False
    """Its activation is a squared ReLU."""
    narrow: bool = False
    """Its products are of 8-bit floats, which those of GPT-2, transposed, cannot be."""
    activation: str = "gelu_pytorch_tanh"
    """Of a model whose MLP is not gated, by the name that Hugging Face has for it."""
    adapter: Adapter | None = None
    """None: all of it is trained."""


def model_of(model: ModelKind, seq: int, attention: str) -> nn.Module:
    """Returns a model of Hugging Face of that kind, `attention` by its name there, with what peft
    puts beside its layers."""
    config = config_of(model, seq)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if model.adapter is None:
        return made  # type: ignore[no-any-return]
    lora = peft.LoraConfig(
        r=model.adapter.rank, target_modules=list(model.adapter.only),
        lora_dropout=model.adapter.dropout, task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(made, lora)  # type: ignore[no-any-return]


def config_of(model: ModelKind, seq: int) -> Any:
    """Returns the configuration of Hugging Face that has the shape."""
    shape, p = model.shape, model.dropout
    if shape.experts:
        return _with_experts(shape, seq)
    common = {"vocab_size": shape.vocab, "tie_word_embeddings": shape.tied, "use_cache": False}
    if shape.gated or model.squared:
        kind = transformers.LlamaConfig if shape.gated else transformers.NemotronConfig
        return kind(
            hidden_size=shape.hidden, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.ffn, max_position_embeddings=seq, **common,
        )  # fmt: skip
    if model.narrow:
        return transformers.OPTConfig(
            hidden_size=shape.hidden, num_hidden_layers=shape.layers, ffn_dim=shape.ffn,
            num_attention_heads=shape.heads, max_position_embeddings=seq, dropout=p,
            attention_dropout=p, activation_function=model.activation,
            word_embed_proj_dim=shape.hidden, **common,
        )  # fmt: skip
    return transformers.GPT2Config(
        n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads, n_inner=shape.ffn,
        n_positions=seq, activation_function=model.activation, attn_pdrop=p, resid_pdrop=p,
        embd_pdrop=p, **common,
    )  # fmt: skip


def _with_experts(shape: Shape, seq: int) -> Any:
    if not shape.gated:
        raise RowError("experts that are not gated")
    common = {
        "vocab_size": shape.vocab, "tie_word_embeddings": shape.tied, "use_cache": False,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn, "moe_intermediate_size": shape.expert_ffn,
        "num_experts_per_tok": shape.top_k, "max_position_embeddings": seq,
    }  # fmt: skip
    if shape.latent:
        if shape.moe_every > 1:
            raise RowError("latent attention with experts in some layers only")
        return transformers.DeepseekV3Config(
            n_routed_experts=shape.experts, first_k_dense_replace=shape.dense_layers,
            n_shared_experts=shape.shared_ffn // shape.expert_ffn, n_group=1, topk_group=1,
            **common,
        )  # fmt: skip
    if shape.window:
        widths = {"intermediate_size": shape.expert_ffn, "head_dim": shape.head_dim}
        del common["moe_intermediate_size"]
        return transformers.GptOssConfig(
            num_local_experts=shape.experts, sliding_window=shape.window, **(common | widths)
        )
    common |= {
        "num_experts": shape.experts, "decoder_sparse_step": shape.moe_every,
        "mlp_only_layers": list(range(shape.dense_layers)), "head_dim": shape.head_dim,
    }  # fmt: skip
    if shape.shared_ffn:
        return transformers.Qwen2MoeConfig(
            shared_expert_intermediate_size=shape.shared_ffn, **common
        )
    return transformers.Qwen3MoeConfig(norm_topk_prob=True, **common)
