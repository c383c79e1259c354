"""Six models of realistic shapes whose training step takes about half a second on two cores."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.ir.graph.graph import Graph
from meshwright.ir.trace.trace import trace
from meshwright.testing.networks import vgg19

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
SEED = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, how to draw a batch for it, and its loss function where it has none."""

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    batch_size: int
    loss_fn: Callable[..., torch.Tensor] | None = None

    def model(self) -> nn.Module:
        """The model with the same float32 weights every time, in training mode."""
        logging.getLogger("transformers").setLevel(logging.ERROR)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build().train()

    def batch(self) -> Batch:
        """One global batch, always the same."""
        return self.draw(self.batch_size, torch.Generator().manual_seed(SEED))

    def graph(self) -> Graph:
        """The traced step."""
        return trace(self.model(), self.batch(), self.loss_fn)


VOCAB, WIDTH, LAYERS, HEADS, TOKENS = 4096, 384, 6, 8, 96


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    ))  # fmt: skip


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=4, max_position_embeddings=TOKENS,
        pad_token_id=0, bos_token_id=0, eos_token_id=1, use_cache=False,
    ))  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=320, num_hidden_layers=8, num_attention_heads=HEADS,
        intermediate_size=1280, max_position_embeddings=TOKENS, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(  # type: ignore[call-arg]
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, image_size=80, patch_size=8, num_labels=100,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(  # type: ignore[call-arg]
        vocab_size=VOCAB, d_model=320, d_kv=40, d_ff=1280, num_layers=4, num_decoder_layers=4,
        num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=1, use_cache=False,
    ))  # fmt: skip


def _vgg() -> nn.Module:
    return vgg19(width=48, classes=100)


def _vgg_last() -> nn.Module:
    """The same with its channels innermost in memory."""
    return _vgg().to(memory_format=torch.channels_last)


def _tokens(size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2, VOCAB, (size, length), generator=generator)


def _causal(size: int, generator: torch.Generator) -> Batch:
    ids = _tokens(size, TOKENS, generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked(size: int, generator: torch.Generator) -> Batch:
    """15 % of the tokens have a label; sample i ends in i % 4 padded ones."""
    ids = _tokens(size, TOKENS, generator)
    chosen = torch.rand(ids.shape, generator=generator) < 0.15
    attention_mask = torch.ones_like(ids)
    for sample in range(size):
        attention_mask[sample, TOKENS - sample % 4 :] = 0
    labels = torch.where(chosen, ids, -100)
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def _translation(size: int, generator: torch.Generator) -> Batch:
    source, target = (_tokens(size, length, generator) for length in (TOKENS, 64))
    return {"input_ids": source, "labels": target}


def _images(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(100, (size,), generator=generator)
    return torch.randn(size, 3, 80, 80, generator=generator), labels


def _named_images(size: int, generator: torch.Generator) -> Batch:
    images, labels = _images(size, generator)
    return {"pixel_values": images, "labels": labels}


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("gpt2", _gpt2, _causal, 16),
        Subject("llama", _llama, _causal, 16),
        Subject("bert", _bert, _masked, 16),
        Subject("vit", _vit, _named_images, 16),
        Subject("t5", _t5, _translation, 16),
        Subject("vgg", _vgg, _images, 16, F.cross_entropy),
        Subject("vgg-last", _vgg_last, _images, 16, F.cross_entropy),
    )
}
