"""Tiny configs of transformers models, by the names that their settings have."""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.zoo.entry import VOCAB

_SIZES: dict[str, int] = {
    **dict.fromkeys(
        "hidden_size d_model n_embd dim embedding_size embed_dim emb_dim projection_dim".split(), 32
    ),
    **dict.fromkeys(
        "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim "
        "hidden_dim ffn_intermediate_size d_inner inner_dim".split(), 64
    ),
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers "
        "decoder_layers num_encoder_layers layers".split(), 2
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads".split(), 4
    ),
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": VOCAB,
    "max_position_embeddings": 32, "n_positions": 32, "n_ctx": 32, "max_seq_len": 32,
    "max_source_positions": 32, "max_target_positions": 32,
    "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "image_size": 16, "patch_size": 4, "num_labels": 8,
}  # fmt: skip
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def settings(config_class: type, **own: Any) -> dict[str, Any]:
    """The settings of a tiny config: common sizes, no dropout, then its own."""
    known = config_class().to_dict()  # type: ignore[attr-defined]
    found: dict[str, Any] = {k: v for k, v in _SIZES.items() if isinstance(known.get(k), int)}
    found |= {k: v for k, v in _IDS.items() if k in known}
    found |= {
        name: 0.0 for name, value in known.items()
        if isinstance(value, float) and ("drop" in name or name == "p_dropout")
    }  # fmt: skip
    return found | {"num_labels": 8} | own


def hf(name: str, **own: Any) -> Callable[[], nn.Module]:
    """Builds the transformers model of this class name with a tiny config."""

    def build() -> nn.Module:
        import transformers

        logging.getLogger("transformers").setLevel(logging.ERROR)
        model_class = getattr(transformers, name)
        nested = {
            key: settings(_part(model_class.config_class, key), **value)
            for key, value in own.items()
            if key.endswith("_config") and isinstance(value, dict)
        }
        config = model_class.config_class(**settings(model_class.config_class, **own) | nested)
        model: nn.Module = model_class(config)
        for module in model.modules():
            # The usual kernel of experts has no float64.
            if hasattr(getattr(module, "config", None), "_experts_implementation"):
                module.config._experts_implementation = "eager"
        return model

    return build


def _part(config_class: Any, key: str) -> type:
    """The class of a nested config."""
    return type(getattr(config_class(), key))
