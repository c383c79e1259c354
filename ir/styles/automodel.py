"""NeMo AutoModel: torch's FSDP2 that keeps what it gathered, kernels of Transformer Engine in
PyTorch's models, and DeepEP, which sends a token once to each rank and permutes in the same
kernels, once the CPU has waited for counts: what it takes is Megatron-Core's, an assumption. Models
are made in bfloat16, and torch's Adam steps them so. Its loss is PyTorch's own. The gate of its
benchmarks, which balances by force, picks experts that follow on each other. What torchtitan's
trainer keeps has not been looked for in its own."""

from dataclasses import replace

from meshwright.ir.styles.nemo import STYLE as NEMO
from meshwright.ir.styles.torchtitan import STYLE as FSDP

STYLE = replace(
    FSDP,
    title="NeMo AutoModel",
    libraries=2025,
    attention=NEMO.attention,
    token_to="neighbours",
    fused_experts=True,
    experts_cpu_s=NEMO.experts_cpu_s,
    experts_wait=True,
    stepped="bfloat16",
    memory=replace(FSDP.memory, gathers_rest=False, loss_hole_bytes=0, kept_output_bytes=0),
    kernels=("rms_norm", "swiglu", "rotary", "route"),
    reference="NVIDIA-NeMo/Automodel 36044ad: docs/performance-summary.mdx, "
    "examples/llm_benchmark; deepseek-ai/DeepEP, docs/legacy.md: an implicit CPU wait of dispatch",
)
