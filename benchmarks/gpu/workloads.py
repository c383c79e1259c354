"""Models of the day: what the published comparisons are of, and the same in tiny."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from meshwright.ir.graph.graph import Fusion, Graph
from meshwright.ir.trace.loss_module import flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.testing.networks import ResNet50

Batch = dict[str, Tensor] | tuple[Tensor, ...]
CLASSES = 1000
PRECISION = "bf16"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with its loss inside, or beside it in `loss_fn`, and its batch."""

    name: str
    build: Callable[[bool, float], nn.Module]
    """Takes whether it is to be tiny, and the dropout. Weights are on torch's default device."""
    sizes: tuple[int, int]
    """Samples of a batch; of the tiny one."""
    draw: Callable[[bool, int, torch.Generator], Batch]
    loss_fn: Callable[..., Tensor] | None = None

    def model(self, tiny: bool, device: str, dropout: float = 0.0) -> nn.Module:
        """The module with the same weights each time on one kind of device."""
        torch.manual_seed(0)
        with torch.device(device):
            return self.build(tiny, dropout).train()

    def batch(self, tiny: bool, samples: int = 0) -> Batch:
        """A batch on the host, the same each time."""
        return self.draw(tiny, samples or self.sizes[tiny], torch.Generator().manual_seed(1))

    def graph(
        self,
        tiny: bool,
        *,
        samples: int = 0,
        dropout: float = 0.0,
        kernels: Sequence[str | Fusion] = (),
        precision: str = PRECISION,
    ) -> Graph:
        """Its step, traced without memory for weights."""
        model = self.model(tiny, "meta", dropout)
        return trace(model, self.batch(tiny, samples), self.loss_fn, kernels=kernels,
                     precision=precision)  # fmt: skip


def _words(vocabulary: int, length: int, tiny_length: int = 16) -> Callable[..., Batch]:
    def draw(tiny: bool, samples: int, generator: torch.Generator) -> Batch:
        shape = (samples, tiny_length if tiny else length)
        ids = torch.randint(2, 64 if tiny else vocabulary, shape, generator=generator)
        return {"input_ids": ids, "labels": ids.clone()}

    return draw


def _images(named: bool, tiny_side: int) -> Callable[..., Batch]:
    def draw(tiny: bool, samples: int, generator: torch.Generator) -> Batch:
        side = tiny_side if tiny else 224
        images = torch.randn(samples, 3, side, side, generator=generator)
        labels = torch.randint(8 if tiny else CLASSES, (samples,), generator=generator)
        return {"pixel_values": images, "labels": labels} if named else (images, labels)

    return draw


def _gpt2(width: int, layers: int) -> Callable[[bool, float], nn.Module]:
    """Of Radford et al. 2019, table 2."""

    def build(tiny: bool, dropout: float) -> nn.Module:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
        full = {"n_embd": width, "n_layer": layers, "n_head": width // 64}
        return GPT2LMHeadModel(GPT2Config(
            **(sizes if tiny else full), use_cache=False, bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        ))  # fmt: skip

    return build


def _llama(tiny: bool, dropout: float) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
    # Llama 3.2 1B, its config.
    full = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 8192}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(
        **(sizes if tiny else full), use_cache=False, tie_word_embeddings=True,
        attention_dropout=dropout,
    ))  # fmt: skip


def _bert(tiny: bool, dropout: float) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64, "vocab_size": 64}  # fmt: skip
    full = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
            "intermediate_size": 4096}  # fmt: skip
    return BertForMaskedLM(BertConfig(
        **(sizes if tiny else full), hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    ))  # fmt: skip


def _vit(tiny: bool, dropout: float) -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 64, "image_size": 32, "num_labels": 8}  # fmt: skip
    # Dosovitskiy et al. 2020, table 1.
    full = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
            "intermediate_size": 4096, "num_labels": CLASSES}  # fmt: skip
    return ViTForImageClassification(ViTConfig(
        **(sizes if tiny else full), hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    ))  # fmt: skip


def _resnet(tiny: bool, dropout: float) -> nn.Module:
    return ResNet50(4, 8, (1, 1, 1, 1)) if tiny else ResNet50(64, CLASSES)


def _classified(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels)


WORKLOADS = {
    one.name: one
    for one in (
        Workload("gpt2-small", _gpt2(768, 12), (8, 2), _words(50257, 1024)),
        Workload("gpt2-medium", _gpt2(1024, 24), (8, 2), _words(50257, 1024)),
        Workload("llama-1b", _llama, (4, 2), _words(128256, 2048)),
        Workload("bert-large", _bert, (32, 2), _words(30522, 512)),
        Workload("resnet-50", _resnet, (128, 2), _images(named=False, tiny_side=32), _classified),
        Workload("vit-l", _vit, (64, 2), _images(named=True, tiny_side=32)),
    )
}


def on(batch: Batch, device: str) -> Batch:
    """The batch on a device."""
    if isinstance(batch, dict):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return tuple(tensor.to(device) for tensor in batch)


def samples_of(batch: Batch) -> int:
    """How many samples a batch has."""
    return len(next(iter(flatten_batch(batch).values())))
