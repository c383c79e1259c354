"""The Whale benchmark on a small model: ours never worse than Whale's, both better than even."""

import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks.whale import Case, Ways, mixed, row


def test_shares_by_cost_tables_are_best() -> None:
    config = BertConfig(
        hidden_size=512, num_hidden_layers=2, num_attention_heads=8, intermediate_size=2048
    )
    ids = torch.zeros(2, 64, dtype=torch.long)
    case = Case(
        "BERT", lambda: (BertForMaskedLM(config), {"input_ids": ids, "labels": ids}, None), 32
    )
    ways = Ways.of(case, 2)
    even, whale, ours = ways.steps_s
    assert ours <= whale < even and 1.1 < ways.gain < 1.6
    assert ways.excess_gib == [0.0, 0.0, 0.0]
    assert row("BERT", ways).count("|") == 12
    assert mixed(2).num_devices == 4
