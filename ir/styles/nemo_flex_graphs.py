"""NeMo with DeepEP or HybridEP and CUDA graphs of attention and routers: of a layer the CPU
launches experts alone, which is taken to hide."""

from dataclasses import replace

from meshwright.ir.styles.nemo_flex import STYLE as FLEX

STYLE = replace(
    FLEX,
    title="NeMo with DeepEP, graphs of attention and routers",
    experts_cpu_s=(0.0, 0.0),
    experts_wait=False,
    reference="Megatron-Bridge v0.2.0 and v0.4.2, scripts/performance/configs: cuda_graph_scope "
    "attn, moe_router, moe_preprocess",
)
