"""Memory of pipelines of wide layers, whose messages are as large as what they save: predicted
beside tracked bytes of tensors."""

import pytest
import torch
from torch import Tensor, nn

from tests.told_memory import told_of_pipeline

WIDE, NARROW, LAYERS, ROWS = 256, 64, 8, 2048


class _Layers(nn.Module):
    """What a layer hands on is four times as wide as what is inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, NARROW), nn.Tanh(), nn.Linear(NARROW, WIDE), nn.Sigmoid())
            for _ in range(LAYERS)
        )
        self.last = nn.Linear(WIDE, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x).tanh().mean()


CASES = [
    ("gpipe", "none"), ("gpipe", "full"), ("one_f_one_b", "none"), ("one_f_one_b", "full"),
    ("interleaved", "none"), ("interleaved", "full"), ("zero_bubble", "none"),
    ("zero_bubble", "full"), ("zbv", "none"), ("zbv", "full"), ("dual_pipe_v", "full"),
    ("dual_pipe_v_pairs", "full"),
]  # fmt: skip
"""Schedules and recompute."""


@pytest.mark.parametrize(("schedule", "recompute"), CASES)
def test_pipelines_hold_what_is_predicted(schedule: str, recompute: str) -> None:
    told = told_of_pipeline(
        _Layers(), (torch.randn(ROWS, WIDE),), "fp32", num_microbatches=4, schedule=schedule,
        recompute=recompute,
    )  # fmt: skip
    assert told == pytest.approx([1.0] * 2, abs=0.01)


@pytest.mark.parametrize("schedule", ["zbv", "dual_pipe_v", "dual_pipe_v_pairs"])
def test_no_rank_of_a_v_holds_more_than_is_predicted(schedule: str) -> None:
    data = (torch.randn(ROWS, WIDE),)
    told = told_of_pipeline(_Layers(), data, "fp32", num_microbatches=4, schedule=schedule)
    assert min(told) >= 0.999 and max(told) <= 1.02
