"""What Hugging Face models need: caches off, their own example inputs, and whole expert layers.

transformers is imported only for a model that comes from it.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn


def is_hf(model: nn.Module) -> bool:
    """Whether the model is a transformers one, told without importing transformers."""
    return any(c.__module__.startswith("transformers.modeling_utils") for c in type(model).__mro__)


def prepare(copy: nn.Module) -> None:
    """Set a (copied) model up for training: no key-value caches, also in nested configs."""
    for module in copy.modules():
        for config in _configs(getattr(module, "config", None)):
            if getattr(config, "use_cache", False):
                config.use_cache = False


def _configs(config: Any) -> Iterator[Any]:
    """A config and those nested in it."""
    if hasattr(config, "to_dict"):
        yield config
        for value in vars(config).values():
            if value is not config and hasattr(value, "to_dict"):
                yield from _configs(value)
