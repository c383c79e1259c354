"""BLOOM's Megatron-DeepSpeed with its BF16_Optimizer (README of tr11-176B-ml): gradients are kept
and summed in float32 on all ranks; those of a backward are there in half precision besides, and are
cast one tensor after the other."""

from dataclasses import replace

from meshwright.ir.styles.bloom import STYLE as FP16

STYLE = replace(
    FP16,
    title="Megatron-DeepSpeed of 2022 in bf16",
    memory=replace(
        FP16.memory, holds_gradients=True, stepping=0.0, norms=1.0, stepping_bytes=2 * 10**9
    ),
)
