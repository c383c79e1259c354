"""Batches of the zoo: text, pictures, sound, by what a model takes."""

import torch
from torch import Tensor

from benchmarks.zoo.entry import LENGTH, VOCAB, Batch, Draw

CLASSES = 8


def tokens(size: int, generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(4, VOCAB, (size, length), generator=generator)


def causal(size: int, generator: torch.Generator) -> Batch:
    ids = tokens(size, generator)
    return {"input_ids": ids, "labels": ids.clone()}


def masked(size: int, generator: torch.Generator) -> Batch:
    """Sample i has i % 5 + 1 tokens with a label and ends in i % 3 padded ones."""
    ids = tokens(size, generator)
    labels, seen = torch.full_like(ids, -100), torch.ones_like(ids)
    for sample in range(size):
        chosen = torch.randperm(LENGTH - 3, generator=generator)[: sample % 5 + 1]
        labels[sample, chosen] = ids[sample, chosen]
        seen[sample, LENGTH - sample % 3 :] = 0
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


def sentences(size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return {"input_ids": tokens(size, generator), "labels": labels}


def translation(size: int, generator: torch.Generator) -> Batch:
    labels = tokens(size, generator, 12)
    labels[::3, 9:] = -100
    return {"input_ids": tokens(size, generator), "labels": labels}


def masked_translation(size: int, generator: torch.Generator) -> Batch:
    """Sample i ends in i % 3 padded tokens."""
    batch = translation(size, generator)
    assert isinstance(batch, dict)
    seen = torch.ones_like(batch["input_ids"])
    for sample in range(size):
        seen[sample, LENGTH - sample % 3 :] = 0
    return {**batch, "attention_mask": seen}


def images(pixels: int = 16, channels: int = 3) -> Draw:
    def draw(size: int, generator: torch.Generator) -> Batch:
        pictures = torch.randn(size, channels, pixels, pixels, generator=generator)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        return {"pixel_values": pictures, "labels": labels}

    return draw


def sound(samples: int = 400) -> Draw:
    def draw(size: int, generator: torch.Generator) -> Batch:
        waves = torch.randn(size, samples, generator=generator)
        return {
            "input_values": waves,
            "labels": torch.randint(CLASSES, (size,), generator=generator),
        }

    return draw


def spectrogram(bins: int, frames: int) -> Draw:
    def draw(size: int, generator: torch.Generator) -> Batch:
        features = torch.randn(size, bins, frames, generator=generator)
        return {"input_features": features, "labels": tokens(size, generator, 12)}

    return draw
