"""Megatron-Core since 2023: distributed optimizer with gradients reduced beside the backward,
flash attention, sequence parallelism, the input gradient's collective beside the weight's."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import RESERVED, ZERO_ONLY, Style

STYLE = Style(
    title="Megatron-Core",
    vocab_multiple=128,
    libraries=2025,
    variants=("halves",),
    regathers=True,
    balanced=True,
    token_to="expert",
    fused_experts=True,
    narrow_experts=True,
    kernels=(
        "layer_norm",
        "rms_norm",
        "bias_gelu",
        "gelu",
        "swiglu",
        "rotary",
        "cross_entropy",
        "route",
    ),
    pins=(*ZERO_ONLY, "overlap=gradients"),
    memory=StackMemory(reserved=RESERVED),
    reference="Megatron-Core 0.9, distributed_data_parallel.py, tensor_parallel/layers.py, "
    "moe/token_dispatcher.py (MoEAlltoAllTokenDispatcher permutes before it sends); "
    "Transformer Engine, grouped_linear.py (GroupedLinear under fp8_autocast)",
)
