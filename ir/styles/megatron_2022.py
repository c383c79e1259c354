"""Megatron-LM as Korthikanti et al. 2022 ran it: the input gradient's all-reduce runs beside the
weight's gradient; gradients are reduced after the last micro-batch."""

from dataclasses import replace

from meshwright.ir.styles import ZERO_ONLY
from meshwright.ir.styles.megatron_2021 import STYLE as BEFORE

STYLE = replace(
    BEFORE, title="Megatron-LM of 2022", libraries=2022, pins=(*ZERO_ONLY, "overlap=gradients"),
    reference="Korthikanti et al. 2022, section 6",
)  # fmt: skip
