"""The shape of a published model and how many parameters it has."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer; every `moe_every`-th layer after the first `dense_layers` has
    experts where there are any."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    """SwiGLU: two matrices into `ffn`. Such models have no biases, RMSNorm and rotary positions."""
    tied: bool
    positions: int = 0
    """Rows of the learned position embedding."""
    experts: int = 0
    moe_every: int = 1
    dense_layers: int = 0
    top_k: int = 2
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Of an expert that sees all tokens."""
    head_width: int = 0
    """Of a head; 0: the model's over its heads."""
    latent: bool = False
    """Attention by latent vectors, of DeepSeek-V3's widths."""
    window: int = 0
    """gpt-oss: every second layer sees so many tokens, attention has sinks, experts biases."""

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        return self.head_dim * self.kv_heads

    @property
    def attention_parameters(self) -> int:
        weights = 2 * self.hidden * (self.heads * self.head_dim + self.kv_width)
        return weights if self.gated else weights + 2 * self.hidden + 2 * self.kv_width

    @property
    def mlp_parameters(self) -> int:
        if self.gated:
            return 3 * self.hidden * self.ffn
        return 2 * self.hidden * self.ffn + self.hidden + self.ffn

    @property
    def expert_parameters(self) -> int:
        """All experts of one layer and their router."""
        each = (3 if self.gated else 2) * self.hidden * self.expert_ffn
        shared = 3 * self.hidden * self.shared_ffn
        return self.experts * (each + self.hidden) + shared

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (1 if self.gated else 2)

    def has_experts(self, layer: int) -> bool:
        if not self.experts or layer < self.dense_layers:
            return False
        return layer % self.moe_every == self.moe_every - 1

    def layer_parameters(self, layer: int = 0) -> int:
        block = self.expert_parameters if self.has_experts(layer) else self.mlp_parameters
        return self.attention_parameters + block + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def parameters(self) -> int:
        head = 0 if self.tied else self.vocab * self.hidden
        layers = sum(map(self.layer_parameters, range(self.layers)))
        return layers + self.embedding_parameters + head + self.norm_parameters

    def dense_flops(self, sequences: int, seq: int, factor: int) -> float:
        """The formula of SC21 (Narayanan et al. 2021, equation 3), `factor` 96 with recompute."""
        h, n = self.hidden, self.layers
        inner = 1 + seq / (6 * h) + self.vocab / (16 * n * h)
        return factor * float(sequences) * seq * n * h * h * inner


def read_shape(
    model: Mapping[str, Any], common: Mapping[str, Any], error: type[Exception]
) -> Shape:
    """The shape that a row describes."""
    if missing := [key for key in ("layers", "hidden", "heads") if not model.get(key)]:
        raise error(f"model.{', model.'.join(missing)} not given: no shape to predict from")
    hidden, heads = int(model["hidden"]), int(model["heads"])
    gated = _gated(model, hidden)
    vocab = int(model.get("vocab") or common.get("vocab") or 0)
    if not vocab:
        raise error("model.vocab is not given")
    if hidden % heads and not model.get("head_dim"):
        raise error(f"hidden {hidden} is not divisible by {heads} heads")
    moe: Mapping[str, Any] = model.get("moe") or {}
    ffn = int(model.get("ffn") or _usual_width(hidden, gated, bool(moe)))
    if gated and ("mlp_ratio" in model or not model.get("ffn")):
        # A ratio is rounded up (InternEvo, modules/mlp.py, and Llama's own code: multiple_of=256).
        ffn = -(-ffn // 256) * 256
    return Shape(
        layers=int(model["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(model.get("kv_heads") or heads),
        ffn=ffn,
        vocab=vocab,
        gated=gated,
        tied=_tied(model, gated, hidden),
        positions=0 if gated else int(common.get("seq") or model.get("positions") or 1024),
        experts=int(moe.get("experts") or 0),
        moe_every=int(moe.get("every") or 1),
        top_k=int(moe.get("topk") or moe.get("top_k") or 2),
        dense_layers=int(moe.get("dense_layers") or 0),
        expert_ffn=int(moe.get("ffn") or moe.get("moe_ffn") or model.get("moe_ffn") or ffn),
        shared_ffn=int(moe.get("shared_ffn") or 0),
        head_width=int(model.get("head_dim") or 0),
        latent=bool(model.get("latent")),
        window=int(model.get("window") or 0),
    )


def _usual_width(hidden: int, gated: bool, experts: bool) -> int:
    """GPT's; Llama's; GShard's, whose every layer is twice as wide (Lepikhin et al. 2020, table 1;
    Alpa's benchmark of it)."""
    if gated:
        return 8 * hidden // 3
    return (8 if experts else 4) * hidden


def _gated(model: Mapping[str, Any], hidden: int) -> bool:
    if act := model.get("act"):
        return "glu" in str(act).lower()
    name = str(model.get("name") or "").lower()
    if any(word in name for word in ("llama", "internlm", "mistral", "mixtral", "qwen")):
        return True
    if any(word in name for word in ("gpt", "gshard", "moe", "bert", "bloom", "opt")):
        return False
    # A plain MLP is four times as wide as the model; a gated one is not.
    return int(model.get("ffn") or 4 * hidden) != 4 * hidden or "kv_heads" in model


def _tied(model: Mapping[str, Any], gated: bool, hidden: int) -> bool:
    if model.get("tied") is not None:
        return bool(model["tied"])
    # GPT shares its embedding with the head; Llama and its kin do not, but for small ones.
    return not gated or (int(model.get("ffn") or 0) < 10_000 and "name" not in model)
