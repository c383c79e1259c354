"""NeMo's recipes with Megatron-Core's flexible dispatcher, DeepEP or HybridEP: over nodes a token
is sent once to each node, and handed on inside of it."""

from dataclasses import replace

from meshwright.ir.styles.nemo import STYLE as NEMO

STYLE = replace(
    NEMO,
    title="NeMo with DeepEP",
    token_to="node",
    reference="deepseek-ai/DeepEP, README.md: tokens go over RDMA once to a node and over NVLink "
    "from there; Megatron-Bridge 0.2, scripts/performance/configs: moe_flex_dispatcher_backend",
)
