"""The model zoo: one tiny case of each kind of model, without dropout, fit for float64 on one core.

Widths divide by 4 and there are 4 heads, so that tp=4 works; at least 4 layers, so that pp=4 works.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from meshwright.testing.exact import exact
from meshwright.testing.networks import DLRM, GNMT, ResNet50, vgg19

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
SEED = 1234
VOCAB, LENGTH = 64, 16


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model, how to draw a batch for it, and its loss function where it has none."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss_fn: Callable[..., torch.Tensor] | None = None
    batch_size: int = 8

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model with the same weights every time, in training mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build().to(dtype).train()

    def example(
        self, batch_size: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> Batch:
        """A batch; the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        batch = self.batch(batch_size or self.batch_size, generator)
        cast = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
        if isinstance(batch, dict):
            return {name: cast(tensor) for name, tensor in batch.items()}
        return tuple(map(cast, batch))


def tokens(size: int, generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, VOCAB, (size, length), generator=generator)


def _gpt2() -> nn.Module:
    return exact(GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )))  # fmt: skip


def _llama() -> nn.Module:
    return exact(LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=0, eos_token_id=1,
    )))  # fmt: skip


def _mixtral() -> nn.Module:
    return exact(MixtralForCausalLM(MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=32, sliding_window=None, experts_implementation="eager",
        pad_token_id=0, bos_token_id=0, eos_token_id=1,
    )))  # fmt: skip


def _causal_batch(size: int, generator: torch.Generator) -> Batch:
    ids = tokens(size, generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def _masked_batch(size: int, generator: torch.Generator) -> Batch:
    """Sample i has i % 5 + 1 tokens with a label and ends in i % 3 padded ones."""
    ids = tokens(size, generator)
    labels = torch.full_like(ids, -100)
    attention_mask = torch.ones_like(ids)
    for sample in range(size):
        chosen = torch.randperm(LENGTH - 3, generator=generator)[: sample % 5 + 1]
        labels[sample, chosen] = ids[sample, chosen]
        attention_mask[sample, LENGTH - sample % 3 :] = 0
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def _t5() -> nn.Module:
    return exact(T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2,
        num_heads=4, relative_attention_num_buckets=8, relative_attention_max_distance=16,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )))  # fmt: skip


def _translation_batch(size: int, generator: torch.Generator) -> Batch:
    labels = tokens(size, generator, 12)
    labels[::3, 9:] = -100
    return {"input_ids": tokens(size, generator), "labels": labels}


def _vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4, num_channels=3, num_labels=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def _image_batch(pixels: int, classes: int) -> Callable[[int, torch.Generator], Batch]:
    def draw(size: int, generator: torch.Generator) -> Batch:
        images = torch.randn(size, 3, pixels, pixels, generator=generator)
        return images, torch.randint(classes, (size,), generator=generator)

    return draw


def _labelled_images(size: int, generator: torch.Generator) -> Batch:
    images, labels = _image_batch(16, 8)(size, generator)
    return {"pixel_values": images, "labels": labels}


def _gnmt_batch(size: int, generator: torch.Generator) -> Batch:
    source, target = tokens(size, generator, 8), tokens(size, generator, 9)
    return {"source": source, "target": target[:, :-1], "labels": target[:, 1:].contiguous()}


def _gnmt_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _dlrm_batch(size: int, generator: torch.Generator) -> Batch:
    dense = torch.randn(size, 8, generator=generator)
    bags = torch.randint(40, (size, 4, 3), generator=generator)
    return {"dense": dense, "bags": bags, "clicked": torch.rand(size, generator=generator).round()}


def _click_loss(output: dict[str, Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output["logit"], batch["clicked"])


def _sequential() -> nn.Module:
    widths = [16, 32, 32, 32, 32, 8]
    layers: list[nn.Module] = []
    for left, right in pairwise(widths):
        layers += [nn.Linear(left, right), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _vector_batch(size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(8, (size,), generator=generator)
    return torch.randn(size, 16, generator=generator), labels


CASES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("sequential", _sequential, _vector_batch, F.cross_entropy),
        ModelCase("gpt2", _gpt2, _causal_batch),
        ModelCase("llama", _llama, _causal_batch),
        ModelCase("bert_mlm", _bert, _masked_batch),
        ModelCase("t5", _t5, _translation_batch),
        ModelCase("mixtral", _mixtral, _causal_batch),
        ModelCase("vit", _vit, _labelled_images),
        ModelCase("resnet50", ResNet50, _image_batch(64, 8), F.cross_entropy),
        ModelCase("vgg19", vgg19, _image_batch(32, 8), F.cross_entropy),
        ModelCase("gnmt", GNMT, _gnmt_batch, _gnmt_loss),
        ModelCase("dlrm", DLRM, _dlrm_batch, _click_loss),
    )
}
