"""Memory of pipelines of wide layers, whose messages are as large as what they save: predicted
beside tracked bytes of tensors."""

import pytest

from tests.told_memory import told_of_pipeline
from tests.wide_layers import WideLayers, rows

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
        WideLayers(), rows(), "fp32", num_microbatches=4, schedule=schedule, recompute=recompute
    )
    assert told == pytest.approx([1.0] * 2, abs=0.01)


@pytest.mark.parametrize("schedule", ["zbv", "dual_pipe_v", "dual_pipe_v_pairs"])
def test_no_rank_of_a_v_holds_more_than_is_predicted(schedule: str) -> None:
    told = told_of_pipeline(WideLayers(), rows(), "fp32", num_microbatches=4, schedule=schedule)
    assert min(told) >= 0.999 and max(told) <= 1.02
