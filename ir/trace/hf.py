"""What Hugging Face models need while they are traced; imported only for a model from transformers.

Three things of theirs depend on data or on not being traced: whether a causal mask can be left to
the attention kernel, whether positions tell of packed sequences, and how tokens go to experts. For
the time of the trace they are decided from shapes alone, then put back. Attention with a plain
mask of a sliding window, or with sinks, becomes one operator (`ir.graph.windowed`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn
from transformers import masking_utils
from transformers.integrations import moe

from meshwright.ir.trace.hf_attention import (
    PlainMasks,
    attending,
    set_up_sinks,
)
from meshwright.ir.trace.hf_experts import common_experts, set_up

_IMPLEMENTATION = "meshwright"


def prepare(copy: nn.Module) -> None:
    """Set a (copied) model up: no key-value caches, experts as one operator; nested configs too."""
    set_up(copy)
    set_up_sinks(copy)
    seen: set[int] = set()
    for module in copy.modules():
        for config in _configs(getattr(module, "config", None), seen):
            if getattr(config, "use_cache", False):
                config.use_cache = False
            if hasattr(config, "_experts_implementation"):
                config._experts_implementation = _IMPLEMENTATION


def _configs(config: Any, seen: set[int]) -> Iterator[Any]:
    """A config and those nested in it, each once."""
    if hasattr(config, "to_dict") and id(config) not in seen:
        seen.add(id(config))
        yield config
        for value in vars(config).values():
            yield from _configs(value, seen)


@contextmanager
def tracing(input_names: tuple[str, ...]) -> Iterator[None]:
    """Masks and experts as the trace wants them; as they were afterwards."""
    masks: Any = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    implementations: Any = moe.ALL_EXPERTS_FUNCTIONS
    find_packed = masking_utils.find_packed_sequence_indices
    original, eager = masks["sdpa"], masks["eager"]
    plain = PlainMasks()
    masks["sdpa"] = plain.remembering(_leave_to_kernel(original))
    masks["eager"] = plain.remembering(_leave_to_kernel(eager, causal=False))
    implementations[_IMPLEMENTATION] = common_experts
    if "position_ids" not in input_names:
        # Positions that the model counts itself never tell of packed sequences.
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        with attending(plain):
            yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        del implementations[_IMPLEMENTATION]
        masks["sdpa"], masks["eager"] = original, eager


def _leave_to_kernel(original: Callable[..., Any], *, causal: bool = True) -> Callable[..., Any]:
    """No mask where the kernel's own causal or full attention is the same. Eager attention has no
    `causal` one; a mask that lets all through it leaves out, too, but not in an export."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        queries, keys = kwargs.get("q_length"), kwargs.get("kv_length")
        window = kwargs.get("local_size")
        plain = kwargs.get("attention_mask") is None and (window is None or keys < window)
        if causal and plain and kwargs.get("allow_is_causal_skip", True) and queries == keys:
            return None
        if plain and kwargs.get("allow_is_bidirectional_skip", False):
            return None
        return _by_broadcasting(original, *args, **kwargs)

    return mask


def _by_broadcasting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The mask by calling its index function on whole tensors of indices where the library would
    use torch.vmap, which an export does not see through. Its own functions allow both."""
    if kwargs.get("use_vmap") and _of_library(kwargs.get("mask_function")):
        kwargs["use_vmap"] = False
    return original(*args, **kwargs)


def _of_library(given: Any) -> bool:
    """Whether a function is the library's, with all those that it was made of."""
    if isinstance(given, tuple | list):
        return all(map(_of_library, given))
    if not isinstance(given, FunctionType):
        return not callable(given)
    inner = (cell.cell_contents for cell in given.__closure__ or ())
    return given.__module__.startswith("transformers.") and all(map(_of_library, inner))
