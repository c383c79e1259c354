"""Models of Hugging Face as they are, under torch's FSDP, as their own Trainer and accelerate run
them too: operators one by one, FlashAttention 2, parameters and Adam's state in bfloat16. Ranks
share samples and parameters, and nothing else."""

from meshwright.ir.stack_memory import StackMemory
from meshwright.ir.styles import RESERVED, ZERO_ONLY, Style

STYLE = Style(
    title="torch FSDP",
    beside_replicas=True,
    stops_early=True,
    libraries=2024,
    stepped="bfloat16",
    pins=(*ZERO_ONLY, "model=1", "pp=1"),
    memory=StackMemory(reserved=RESERVED),
    reference="VectorInstitute/vectorlm 9045f08: vectorlm/utils/model_utils.py (NO_REENTRANT, "
    "torch_dtype bfloat16), docs/reference_throughput.md (torch 2.2.1, flash-attn 2.5.8)",
)
