"""NeMo AutoModel with torch's FlexAttention, as its gpt-oss has it, whose heads have sinks: 0.9 of
the rate of FlashAttention 2 forward and 0.85 backward (from memory: PyTorch on FlexAttention,
August 2024), of which the device's curve is."""

from dataclasses import replace

from meshwright.ir.styles.automodel import STYLE as AUTOMODEL

STYLE = replace(
    AUTOMODEL,
    title="NeMo AutoModel with FlexAttention",
    attention=1.16,
    reference="NVIDIA-NeMo/Automodel 36044ad: examples/llm_benchmark/gpt_oss/*.yaml (attn: flex); "
    "pytorch.org/blog/flexattention, limitations",
)
