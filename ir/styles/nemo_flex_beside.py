"""NeMo with DeepEP or HybridEP whose tokens travel beside another micro-batch's work."""

from dataclasses import replace

from meshwright.ir.styles.nemo_beside import SHOWN
from meshwright.ir.styles.nemo_flex import STYLE as FLEX

STYLE = replace(
    FLEX,
    title="NeMo with DeepEP, tokens travel beside other work",
    travel_shown=SHOWN,
    experts_wait=False,
    reference="Megatron-Bridge 067f987df, skills/nemo-mbridge-perf-moe-comm-overlap/SKILL.md: "
    "HybridEP production-shape validation",
)
