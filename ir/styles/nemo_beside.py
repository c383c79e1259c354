"""NeMo with tokens' all-to-alls of one micro-batch beside the work of another
(`overlap_moe_expert_parallel_comm`). Qwen3 30B-A3B on 16 H100, all else alike, took 24.71 s a step
without and 20.99 s with it, where 8.25 s were communication: 0.45 of these were hidden. The device
was never idle then, so that no wait for counts is counted."""

from dataclasses import replace

from meshwright.ir.styles.nemo import STYLE as NEMO

SHOWN = 0.55
STYLE = replace(
    NEMO,
    title="NeMo, tokens travel beside other work",
    travel_shown=SHOWN,
    experts_wait=False,
    reference="Megatron-Bridge 067f987df, skills/nemo-mbridge-perf-moe-comm-overlap/SKILL.md: "
    "HybridEP production-shape validation",
)
