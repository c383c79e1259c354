"""Attention of transformers' models while it is traced: which masks are known, and what is read."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshwright.ir.errors import PlanError
from meshwright.ir.trace.hf_attention import WITH_SINKS, PlainMasks, attending

LENGTH, WINDOW = 6, 3
CAUSAL = masking_utils.causal_mask_function
SLIDING = masking_utils.sliding_window_causal_mask_function(WINDOW)


def _mask(masks: PlainMasks, function: Any, **more: Any) -> Tensor:
    make = masks.remembering(masking_utils.eager_mask)
    sizes = {"batch_size": 1, "q_length": LENGTH, "kv_length": LENGTH, "dtype": torch.float64}
    return make(**sizes | {"mask_function": function, "attention_mask": None} | more)


def test_masks_of_two_functions_are_known_and_no_others() -> None:
    masks = PlainMasks()
    assert masks.window(None) is None
    assert masks.window(_mask(masks, CAUSAL)) == 0
    known = _mask(masks, SLIDING)
    assert masks.window(known) == WINDOW
    assert masks.window(known + 0) is None
    known[..., 0] = 0.0
    assert masks.window(known) is None
    padded = torch.ones(1, LENGTH, dtype=torch.bool)
    assert masks.window(_mask(masks, SLIDING, attention_mask=padded)) is None
    assert masks.window(_mask(masks, SLIDING, q_offset=2)) is None
    assert masks.window(_mask(masks, SLIDING, kv_length=LENGTH + 2)) is None
    documents = masking_utils.packed_sequence_mask_function(torch.zeros(1, LENGTH))
    for other in (
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_overlay(WINDOW),
        masking_utils.and_masks(CAUSAL, documents),
        masking_utils.or_masks(CAUSAL, documents),
        lambda batch, head, query, key: query >= key,
    ):
        assert masks.window(_mask(masks, other)) is None


class _Layer(nn.Module):
    sinks: Tensor | None = None


def _attend(mask: Tensor, masks: PlainMasks, layer: nn.Module, **more: Any) -> Tensor:
    with attending(masks):
        return ALL_ATTENTION_FUNCTIONS[WITH_SINKS](layer, *_inputs(), mask, **more)[0]


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(1, heads, LENGTH, 4, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2)
    ]


def _by_hand(mask: Tensor, sinks: Tensor | None) -> Tensor:
    query, key, value = _inputs()
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    chances = (query @ key.mT / 2 + mask).exp()
    total = chances.sum(-1, keepdim=True)
    total = total if sinks is None else total + sinks.exp()[:, None, None]
    return (chances / total @ value).transpose(1, 2)


def test_layers_with_sinks_and_without_by_windows_and_by_scores() -> None:
    """As some models have them in layers of windows alone."""
    masks, layer = PlainMasks(), _Layer()
    given = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    for function in (CAUSAL, SLIDING):
        known = _mask(masks, function)
        for mask in (known, known + 0):  # the second is read, as that of documents is
            for sinks in (given, None):
                layer.sinks = sinks
                found = _attend(mask, masks, layer, s_aux=sinks)
                torch.testing.assert_close(found, _by_hand(known, sinks))


def test_sinks_that_are_not_handed_over_are_refused() -> None:
    masks, layer = PlainMasks(), _Layer()
    layer.sinks = torch.zeros(4, dtype=torch.float64)
    for mask in (_mask(masks, SLIDING), _mask(masks, SLIDING) + 0):
        with pytest.raises(PlanError, match=r"_Layer has sinks.*s_aux=self\.sinks"):
            _attend(mask, masks, layer)
    with pytest.raises(PlanError, match="got no mask"):
        _attend(None, masks, layer, s_aux=layer.sinks)  # type: ignore[arg-type]
