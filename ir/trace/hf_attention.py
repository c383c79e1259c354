"""Attention of transformers' models over windows and with sinks, as one operator while traced.

The library hands attention a mask, which tells nothing of how it was made. So masks that are plain
(causal, or causal within a sliding window, of whole unpadded samples) are remembered as they are
made, and attention that gets one of them becomes `meshwright.windowed_attention`; the mask is then
read by nobody. All else is computed as the library does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshwright.ir.graph.windowed import WINDOWED_ATTENTION

_EAGER = "eager"
MARK = "_meshwright_windows"
"""Of configs (copies) of models with sinks."""
_ALL = "and_masks.<locals>.and_mask"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
MakeMask = Callable[..., Any]
Attend = Callable[..., Any]
GetAttention = Callable[[str, Attend], Attend]


def set_up_sinks(copy: nn.Module) -> None:
    """Marks models with sinks, which the library computes by whole scores alone. The name of their
    attention stays: a model's own code may ask for it, and do something else under another."""
    for module in copy.modules():
        sinks = any(name.endswith(".sinks") for name, _ in module.named_parameters())
        if isinstance(module, PreTrainedModel) and sinks and module._supports_attention_backend:
            setattr(module.config, MARK, True)


def window_of(mask_function: Any) -> int | None:
    """The window of a causal mask, 0 if it is all that was before; None of any other mask."""
    windows, causal = list[int](), False
    for part in _parts(mask_function):
        name = getattr(part, "__qualname__", "")
        if name == "causal_mask_function" and _is_library(part):
            causal = True
        elif name == _WINDOW and _is_library(part):
            windows.append(part.__closure__[0].cell_contents)
        else:
            return None
    return min(windows, default=0) if causal else None


def _is_library(function: Any) -> bool:
    return str(function.__module__) == masking_utils.__name__


def _parts(function: Any) -> Iterator[Any]:
    if getattr(function, "__qualname__", "") == _ALL and _is_library(function):
        for part in function.__closure__[0].cell_contents:
            yield from _parts(part)
    else:
        yield function


@dataclass
class PlainMasks:
    """Masks that were made during a trace, with their windows."""

    known: dict[int, tuple[Tensor, int, int]] = field(default_factory=dict)
    """By identity, with how often it had been written to; the tensor is kept, so that no other gets
    its number."""

    def remembering(self, make: MakeMask) -> MakeMask:
        """The same masks; of plain ones it is known what they are."""

        def mask(*args: Any, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            window = window_of(kwargs.get("mask_function"))
            whole = kwargs.get("attention_mask") is None and not kwargs.get("q_offset")
            whole &= not kwargs.get("kv_offset") and kwargs["q_length"] == kwargs["kv_length"]
            if isinstance(made, Tensor) and whole and window is not None:
                self.known[id(made)] = made, window, made._version
            return made

        return mask

    def window(self, mask: Any) -> int | None:
        """None if it is no plain one, or was changed since."""
        found = self.known.get(id(mask))
        return found[1] if found and found[2] == mask._version else None


@contextmanager
def attending(masks: PlainMasks) -> Iterator[None]:
    """Attention as the trace wants it; as it was afterwards."""
    functions: Any = ALL_ATTENTION_FUNCTIONS
    original, get = functions["sdpa"], functions.get_interface
    functions["sdpa"] = _by_windows(original, masks)
    functions.get_interface = _with_sinks(get, masks)
    try:
        yield
    finally:
        functions["sdpa"] = original
        del functions.get_interface


_CHANGES = ("softcap", "position_bias", "cache", "output_attentions")
"""Arguments under which attention is something else."""


def _by_windows(original: Attend, masks: PlainMasks) -> Attend:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        dropout: float = 0.0, scaling: float | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        window = masks.window(attention_mask)
        changed = dropout or any(isinstance(x := more.get(name), Tensor) or x for name in _CHANGES)
        if window is None or changed or query.shape[2] != key.shape[2]:
            return original(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
            )
        made = WINDOWED_ATTENTION(query, key, value, window, more.get("s_aux"), scaling)
        return made.transpose(1, 2).contiguous(), None

    return attention


def _with_sinks(get: GetAttention, masks: PlainMasks) -> GetAttention:
    """The same attention; by windows, too, where it is a model's own that knows sinks, if its
    modules hand over the sinks that they have."""

    def get_interface(name: str, default: Attend) -> Attend:
        found = get(name, default)
        if name != _EAGER:
            return found
        by_windows = _by_windows(found, masks)

        def attention(module: nn.Module, *args: Any, **more: Any) -> Any:
            marked = getattr(getattr(module, "config", None), MARK, False)
            handed = getattr(module, "sinks", None) is None or more.get("s_aux") is not None
            return (by_windows if marked and handed else found)(module, *args, **more)

        return attention

    return get_interface
