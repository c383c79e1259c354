"""Example inputs with labels for Hugging Face models, from their configs.

Tracing needs shapes and dtypes; the values are legal ones all the same, so the batch also runs.
"""

import inspect
from typing import Any

import torch
from torch import nn

from meshwright.ir.errors import TraceError

BATCH, LONGEST, DEFAULT_LENGTH = 8, 8192, 512
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_source_positions")


def example_inputs(model: nn.Module, batch_size: int | None = None) -> dict[str, torch.Tensor]:
    """One batch of `model`, at its longest sequence length up to 8192."""
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    size = batch_size or BATCH
    kind = type(model).__name__
    if "labels" not in accepted:
        raise TraceError(
            f"{kind} takes no labels, so it has no loss: pass example_inputs and loss_fn, or use "
            "its class with a head, such as ...ForCausalLM"
        )
    if getattr(model, "main_input_name", "") == "pixel_values":
        return _images(config, size)
    ids = _tokens(config, size)
    if "ForSequenceClassification" in kind:
        return {"input_ids": ids, "labels": torch.zeros(size, dtype=torch.int64)}
    if "ForTokenClassification" in kind:
        return {"input_ids": ids, "labels": torch.zeros_like(ids)}
    if "MaskedLM" in kind:
        return {"input_ids": ids, "labels": _masked(ids)}
    if "input_ids" in accepted:
        return {"input_ids": ids, "labels": ids.clone()}
    raise TraceError(f"no example inputs are known for {kind}: pass example_inputs")


def _tokens(config: Any, size: int) -> torch.Tensor:
    """Ids that count up from 3, which are no padding or end marks in the common vocabularies."""
    text = config.get_text_config()
    given = (getattr(text, name, None) for name in _LENGTHS)
    length = min(next((n for n in given if isinstance(n, int) and n > 0), DEFAULT_LENGTH), LONGEST)
    first = min(3, text.vocab_size - 1)
    row: torch.Tensor = torch.arange(length) % (text.vocab_size - first) + first
    return row.expand(size, -1).clone()


def _masked(ids: torch.Tensor) -> torch.Tensor:
    """Labels at about every seventh token, -100 elsewhere."""
    chosen = torch.arange(ids.shape[1]) % 7 == 1
    return torch.where(chosen, ids, -100)


def _images(config: Any, size: int) -> dict[str, torch.Tensor]:
    pixels = config.image_size
    height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
    channels = getattr(config, "num_channels", 3)
    images = torch.zeros(size, channels, height, width)
    return {"pixel_values": images, "labels": torch.zeros(size, dtype=torch.int64)}
