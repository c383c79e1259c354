"""Attention of transformers' models while it is traced: which masks are known, and what is read."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import HYV4Config, HYV4ForCausalLM, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshwright.ir.graph.windowed import WINDOWED_ATTENTION
from meshwright.ir.trace import hf_attention
from meshwright.ir.trace.hf_attention import MARK, PlainMasks, attending
from meshwright.ir.trace.trace import trace
from meshwright.testing.interpret import interpret

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
    config = SimpleNamespace(**{MARK: True})
    sinks: Tensor | None = None


def _own(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """By whole scores, as a model with sinks has it in its file."""
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    chances = (query @ key.mT / 2 + mask).exp()
    total = chances.sum(-1, keepdim=True)
    if isinstance(module.sinks, Tensor):
        total = total + module.sinks.exp()[:, None, None]
    return (chances / total @ value).transpose(1, 2), None


def _attend(mask: Tensor, masks: PlainMasks, layer: nn.Module, **more: Any) -> tuple[Tensor, bool]:
    """What becomes of fixed inputs, and whether it was the operator that made it."""
    calls = list[bool]()

    def operator(*args: Any) -> Tensor:
        calls.append(True)
        return WINDOWED_ATTENTION(*args)

    with attending(masks), mock.patch.object(hf_attention, "WINDOWED_ATTENTION", operator):
        found = ALL_ATTENTION_FUNCTIONS.get_interface("eager", _own)(
            layer, *_inputs(), mask, **more
        )[0]
    return found, bool(calls)


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(1, heads, LENGTH, 4, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2)
    ]


def test_layers_with_sinks_and_without_by_windows_and_by_their_own_scores() -> None:
    """As some models have them in layers of windows alone."""
    masks, layer = PlainMasks(), _Layer()
    given = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    for function in (CAUSAL, SLIDING):
        known = _mask(masks, function)
        for mask in (known, known + 0):  # the second is read, as that of documents is
            for sinks in (given, None):
                layer.sinks = sinks
                found, by_windows = _attend(mask, masks, layer, s_aux=sinks)
                assert by_windows is (mask is known)
                torch.testing.assert_close(found, _own(layer, *_inputs(), known)[0])


def test_what_a_module_does_not_hand_over_or_no_model_marked_is_computed_by_itself() -> None:
    masks, layer = PlainMasks(), _Layer()
    mask = _mask(masks, SLIDING)
    layer.sinks = torch.arange(4, dtype=torch.float64)
    other = nn.Module()
    other.sinks = None  # type: ignore[assignment]
    for one in (layer, other):
        found, by_windows = _attend(mask, masks, one)
        assert not by_windows
        torch.testing.assert_close(found, _own(one, *_inputs(), mask)[0])


def test_models_that_ask_for_the_name_of_their_attention_hear_the_one_they_have() -> None:
    """HYV4 leaves out all but a few keys, under two names alone."""
    config = HYV4Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2,
        num_experts_per_tok=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4, index_head_dim=8, index_n_heads=2, index_topk=3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config._experts_implementation = "eager"  # the usual one has no float64
    torch.manual_seed(0)
    model, ids = HYV4ForCausalLM(config).double().train(), torch.randint(3, 32, (2, 12))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    batch = {"input_ids": ids, "labels": ids}
    wanted = float(model(**batch).loss.detach())
    graph = trace(model, batch)
    found = float(interpret(graph, model, batch)[graph.loss].detach())
    assert found == pytest.approx(wanted, 1e-6)
