"""NeMo 2 on Megatron-Core 0.12, of containers before July 2025, for latent attention: its rotary
embedding has no kernel there. Its recipe pads experts to their capacity."""

from dataclasses import replace

from meshwright.ir.styles.nemo_padded import STYLE as NEMO

STYLE = replace(
    NEMO,
    title="NeMo, Megatron-Core 0.12, latent attention",
    kernels=tuple(kernel for kernel in NEMO.kernels if kernel != "rotary"),
    reference="Megatron-LM 7094270c, transformer/multi_latent_attention.py: rotary embeddings of "
    "YaRN refuse apply_rope_fusion",
)
