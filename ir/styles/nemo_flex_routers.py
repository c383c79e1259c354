"""NeMo with DeepEP or HybridEP and CUDA graphs of routers and of what comes before tokens leave.
What is launched after the wait for counts is short, and taken to hide; what the CPU takes was
measured with these graphs (`nemo.py`)."""

from dataclasses import replace

from meshwright.ir.styles.nemo_flex import STYLE as FLEX

STYLE = replace(
    FLEX,
    title="NeMo with DeepEP, graphs of routers",
    experts_wait=False,
    reference="Megatron-Bridge v0.2.0 and v0.4.2, scripts/performance/configs: cuda_graph_scope "
    "moe_router, moe_preprocess",
)
