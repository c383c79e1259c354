"""NeMo's containers of 24.01 to 24.07, whose launcher leaves cuDNN's attention out, but of GPT-3
175B: FlashAttention 2 is what is left."""

from dataclasses import replace

from meshwright.ir.styles.nemo import STYLE as NEMO

STYLE = replace(
    NEMO,
    title="NeMo of 2024, FlashAttention 2",
    attention=1.0,
    reference="NVIDIA/NeMo-Framework-Launcher 24.07, launcher_scripts/conf/config.yaml "
    "(NVTE_FUSED_ATTN: 0) and examples/training/gpt/h100/175b_fp8_16node.sh (1)",
)
