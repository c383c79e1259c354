"""Models with one odd thing each: equal to plain PyTorch, or refused in words."""

import pytest

from benchmarks.attack.odd_models import ODD
from benchmarks.attack.odd_try import attempt

SLOW = ("torch_compiled", "compiled_function", "lstm_two", "gru", "rnn", "lstm")
"""Tried at full size only, as are most of those that are known to be right for long."""
LONG_RIGHT = (
    "parameter_lists", "module_twice", "in_place_on_copy", "embedding_padding", "embedding",
    "frozen", "averaged", "keyword_only", "star", "loss_dict", "loss_named", "none_input",
    "batch_norm", "batch_norm_no_stats", "group_norm", "evaluated", "unfold", "old_weight_norm",
    "old_spectral_norm", "orthogonal", "forward_pre_hook", "detached_in_place", "dynamo_disabled",
    "scripted_function", "named_batch", "functional_call", "fft",
)  # fmt: skip


@pytest.mark.parametrize("name", [n for n in ODD if n not in (*SLOW, *LONG_RIGHT)])
def test_model_is_right_or_refused(name: str) -> None:
    result = attempt(name, ODD[name])
    assert result.held, result.what


@pytest.mark.parametrize("name", ["in_place_on_input", "weight_in_loss", "forward_hook_on_weight"])
def test_the_self_check_raises_no_false_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CHECK", "1")
    result = attempt(name, ODD[name])
    assert result.held, result.what
