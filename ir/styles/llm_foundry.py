"""LLM Foundry: Composer with FSDP of torch 1.13 and 2.1, MPT with flash attention in Triton, over
which version 2 is 1.3 to 2.5 times faster (Dao 2023, section 1): the middle."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import RESERVED, Style

STYLE = Style(
    title="LLM Foundry",
    beside_replicas=True,
    stops_early=True,
    libraries=2023,
    attention=1.9,
    kernels=("layer_norm", "cross_entropy"),
    band=0.55,
    memory=StackMemory(reserved=RESERVED),
    reference="llm-foundry: benchmarking/submit_benchmarks.py, models/mpt/modeling_mpt.py; "
    "yamls/pretrain (activation_checkpointing_reentrant: false)",
)
