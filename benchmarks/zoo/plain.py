"""Plain PyTorch models, written in the usual ways, and their batches."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.batches import CLASSES, tokens
from benchmarks.zoo.entry import LENGTH, Batch, Entry
from benchmarks.zoo.plain_nets import (
    Autoencoder,
    Cells,
    GraphNet,
    Mixer,
    NeuralField,
    OneGraph,
    Recurrent,
    Siamese,
    Temporal,
    TopKGate,
    TorchTransformer,
    UNet,
)
from benchmarks.zoo.plain_state import (
    Lora,
    Momentum,
    OwnFunction,
    Queue,
    RunningNorm,
    StraightThrough,
    Tied,
    Universal,
)
from meshwright.testing.networks import DLRM, GNMT, ResNet50, vgg19


def _vectors(size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return torch.randn(size, 32, generator=generator), labels


def _pictures(pixels: int) -> Any:
    def draw(size: int, generator: torch.Generator) -> Batch:
        images = torch.randn(size, 3, pixels, pixels, generator=generator)
        return images, torch.randint(CLASSES, (size,), generator=generator)

    return draw


def _segments(size: int, generator: torch.Generator) -> Batch:
    images = torch.randn(size, 3, 16, 16, generator=generator)
    return images, torch.randint(4, (size, 16, 16), generator=generator)


def _graphs(size: int, generator: torch.Generator) -> Batch:
    nodes = torch.randn(size, 10, 8, generator=generator)
    edges = torch.randint(10, (size, 2, 24), generator=generator)
    return nodes, edges, torch.randint(CLASSES, (size,), generator=generator)


def _one_graph(size: int, generator: torch.Generator) -> Batch:
    return (
        torch.randn(size, 8, generator=generator),
        torch.randint(size, (24,), generator=generator),
        torch.randint(size, (24,), generator=generator),
        torch.randint(CLASSES, (size,), generator=generator),
    )


def _words(length: int) -> Any:
    def draw(size: int, generator: torch.Generator) -> Batch:
        ids = tokens(size, generator)
        return ids, ids[:, :length].clone()

    return draw


def _rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _text(size: int, generator: torch.Generator) -> Batch:
    return tokens(size, generator), torch.randint(CLASSES, (size,), generator=generator)


def _pair(size: int, generator: torch.Generator) -> Batch:
    target = tokens(size, generator, 9)
    return tokens(size, generator), target[:, :-1], target[:, 1:].contiguous()


def _translation(size: int, generator: torch.Generator) -> Batch:
    source, target = tokens(size, generator, 8), tokens(size, generator, 9)
    return {"source": source, "target": target[:, :-1], "labels": target[:, 1:].contiguous()}


def _translation_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _clicks(size: int, generator: torch.Generator) -> Batch:
    dense = torch.randn(size, 8, generator=generator)
    bags = torch.randint(40, (size, 4, 3), generator=generator)
    return {"dense": dense, "bags": bags, "clicked": torch.rand(size, generator=generator).round()}


def _click_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(output["logit"], batch["clicked"])


def _noisy(size: int, generator: torch.Generator) -> Batch:
    return {"x": torch.randn(size, 32, generator=generator),
            "noise": torch.randn(size, 8, generator=generator)}  # fmt: skip


def _two_pictures(size: int, generator: torch.Generator) -> Batch:
    left, right = torch.randn(2, size, 3, 16, 16, generator=generator)
    same = torch.randint(2, (size,), generator=generator)
    return {"left": left, "right": right, "same": same}


def _rays(size: int, generator: torch.Generator) -> Batch:
    return torch.randn(size, 12, 3, generator=generator), torch.rand(size, 3, generator=generator)


CE = F.cross_entropy


PLAIN = (
    Entry("resnet50_plain", "plain", ResNet50, _pictures(64), CE),
    Entry("vgg19", "plain", vgg19, _pictures(32), CE),
    Entry("unet", "plain", UNet, _segments, CE),
    Entry("gnmt", "plain", GNMT, _translation, _translation_loss),
    Entry("dlrm", "plain", DLRM, _clicks, _click_loss),
    Entry("graph_batch", "plain", GraphNet, _graphs, CE),
    Entry("graph_one", "plain", OneGraph, _one_graph, CE),
    Entry("autograd_function", "plain", OwnFunction, _vectors, CE),
    Entry("straight_through", "plain", StraightThrough, _vectors, CE),
    Entry("tied", "plain", Tied, _words(LENGTH), _rows),
    Entry("universal", "plain", Universal, _words(LENGTH), _rows),
    Entry("running_buffer", "plain", RunningNorm, _vectors, CE),
    Entry("assigned_buffer", "plain", Momentum, _vectors, CE),
    Entry("queue", "plain", Queue, _vectors, CE),
    Entry("nn_transformer", "plain", TorchTransformer, _pair, _rows),
    Entry("gru", "plain", Recurrent, _text, CE),
    Entry("rnn", "plain", lambda: Recurrent(nn.RNN), _text, CE),
    Entry("lstm_cell", "plain", Cells, _words(6), _rows),
    Entry("vae", "plain", Autoencoder, _noisy),
    Entry("siamese", "plain", Siamese, _two_pictures),
    Entry("weight_norm", "plain", Temporal, _words(LENGTH), _rows),
    Entry("mlp_mixer", "plain", Mixer, _pictures(16), CE),
    Entry("nerf", "plain", NeuralField, _rays, F.mse_loss),
    Entry("topk_gate", "plain", TopKGate, _vectors, CE),
    Entry("lora", "plain", Lora, _vectors, CE),
)
